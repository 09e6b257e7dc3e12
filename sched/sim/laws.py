"""Independent checkers: what must hold, judged from events, effects and the device alone.

The ledger keeps its own books from what goes in and out of the core; it imports nothing of how the
core decides. A broken law is recorded, never raised: the run goes on and the first one counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..core import CoreConfig
from ..core import effects as fx
from ..core import events as ev
from .annexes import Annexes
from .copies import Copies
from .flights import Flights
from .keeping import Keeping
from .records import Req, Violation


@dataclass
class Ledger:
    """Feed with :meth:`see`; read :attr:`violations`."""

    config: CoreConfig
    slot_content: Callable[[int], str | None]
    violations: list[Violation] = field(default_factory=list)
    clock_may_jump: bool = False
    retires_work: bool = True
    now: float = 0.0

    def __post_init__(self) -> None:
        self.reqs: dict[int, Req] = {}
        self.commands: dict[int, str] = {}
        self.answered: set[int] = set()
        self.default: str | None = None
        self.slot_id: dict[int, int] = {}
        self.users: dict[int, set[int]] = {}
        self.commits: dict[int, tuple[fx.Commit, int]] = {}
        self.latest: dict[str, int] = {}
        self.epoch: dict[str, int] = {}
        self.content: dict[int, str] = {}
        self.stages: dict[int, tuple[str, int]] = {}
        self.images: set[int] = set()
        self.sources: set[int] = set()
        self.dropped: set[int] = set()
        self.slots_given: list[tuple[float, int, str]] = []
        self.pin_times: list[float] = []
        #: Resizes: from the command to its answer, and how many slots there ever were.
        self.resizes: dict[int, list[float]] = {}
        self.slot_counts = [self.config.max_loras]
        self.rebuilding: fx.Relayout | None = None
        self.copies = Copies(self.config, self.need)
        self.keeping = Keeping(self.config, self.need)
        self.flights = Flights(self.config, self.need)
        self.annexes = Annexes(self.config.arena_bytes, self.need)
        self.families: dict[int, int] = {}
        self.base_passed: dict[int, dict[str, int]] = {}
        self.waiting: dict[tuple[int, str | None], set[int]] = {}
        self.closed = False
        self._done: ev.StepDone | None = None
        self._passed_twice: dict[int, str] = {}

    def broken(self, law: str, what: str) -> None:
        self.violations.append(Violation(law, what, self.now))

    def need(self, truth: bool, law: str, what: str) -> None:
        if not truth:
            self.broken(law, what)

    # what goes in -------------------------------------------------------------------------------
    def see(self, event: ev.Event, effects: list[fx.Effect], now: float) -> None:
        self.need(now >= self.now or self.clock_may_jump, "time", "time went back")
        self.now = now
        self.need(not self.closed, "close", f"{type(event).__name__} handled after Closed")
        self._event(event)
        for effect in effects:
            self._effect(effect)
        if isinstance(event, ev.Submit):
            self._now_waiting(event)
        for adapter in self._passed_twice.values():
            self.broken("base starves", f"passed by {adapter} twice")
        self._passed_twice.clear()
        self._done = None

    def _event(self, event: ev.Event) -> None:
        self.copies.event(event)
        self.keeping.event(event)
        self.annexes.event(event)
        match event:
            case ev.Submit():
                adapter = self.default if event.use_default else event.adapter
                for seq in (event.seq, *event.siblings):
                    req = Req(adapter, len(event.prompt), event.priority, self.now)
                    self.reqs[seq] = req
                    req.family = event.seq
                    req.wanted = min(event.max_tokens, self.config.max_context - req.prompt)
            case ev.StepDone(step, _):
                self.flights.over(step)
                self._done = event
            case ev.StepFailed(step, failure, _):
                self.need(not failure.code.startswith("sim-"), "device", failure.message)
                self.flights.over(step)
            case ev.CommitDone(commit):
                made, epoch = self.commits.pop(commit)
                self.slot_id[made.slot] = made.adapter_id
                if self.epoch.get(made.name, 0) == epoch:
                    self.latest[made.name] = made.adapter_id
            case ev.CommitFailed(commit, failure, _):
                self.need(not failure.code.startswith("sim-"), "device", failure.message)
                self.commits.pop(commit)
            case ev.StageDone(stage, image):
                self.stages.pop(stage)
                self.images.add(image)
            case ev.StageFailed(stage):
                self.stages.pop(stage)
            case ev.CancelCommand(command):
                self.commands.pop(command, None)
            case ev.Unload(command, name):
                self.commands[command] = f"unload {name}"
                self.epoch[name] = self.epoch.get(name, 0) + 1
            case ev.Resize(command):
                self.commands[command] = "resize"
                self.resizes[command] = [self.now, float("inf")]
            case ev.RelayoutDone():
                assert self.rebuilding is not None
                self.slot_id.clear()
                self.slot_counts.append(self.rebuilding.max_loras)
                self.rebuilding = None
            case ev.RelayoutFailed(failure):
                self.need(not failure.code.startswith("sim-"), "device", failure.message)
                self.rebuilding = None
            case ev.Pin(command):
                self.pin_times.append(self.now)
                self.commands[command] = "pin"
            case ev.Rotate(command, name):
                self.commands[command] = f"rotate {name or ''}"
            case (
                ev.Load() | ev.Register() | ev.Replace() | ev.Promote() | ev.Swap() | ev.Prefetch()
            ):
                self.commands[event.command] = type(event).__name__
                if event.source is not None:
                    self.sources.add(event.source)
            case _:
                pass

    def _now_waiting(self, event: ev.Submit) -> None:
        req = self.reqs[event.seq]
        if req.ended:
            return
        key = (req.priority, req.adapter)
        lane = self.waiting.setdefault(key, set())
        if req.adapter is None and not lane:
            self.base_passed[req.priority] = {}
        lane.add(event.seq)

    # what comes out -----------------------------------------------------------------------------
    def _effect(self, effect: fx.Effect) -> None:
        failure = getattr(effect, "failure", None)
        if failure is not None and failure.code in ("QUEUE_FULL", "POOL_FULL"):
            hint = failure.retry_after_s
            self.need(hint is not None and 0 < hint <= 60, "retry hint", f"{failure.code}: {hint}")
        self.annexes.effect(effect, self.now)
        match effect:
            case fx.RunStep():
                self._run_step(effect)
            case fx.Token():
                self._token(effect)
            case fx.DropState(seq):
                # Put back; it may be back in this very step, behind a snapshot of all it had.
                self.reqs[seq].absent = True
            case fx.Ended(seq, reason, _, failure):
                req = self.reqs.get(seq)
                if req is None or req.ended:
                    self.broken("ends once", f"seq {seq} ended {'again' if req else 'unknown'}")
                    return
                self.need((reason == "error") == (failure is not None), "named end", f"seq {seq}")
                req.ended = True
                self._no_longer_waits(seq, req)
            case fx.OpenSequence(seq):
                self._open(seq)
            case fx.CloseSequence(seq):
                req = self.reqs[seq]
                self.need(req.opened and not req.closed, "lease", f"seq {seq} closed wrongly")
                self.need(req.ended, "lease", f"seq {seq} closed before it ended")
                in_step = seq in self.flights.seqs()
                self.need(not in_step, "quiescence", f"seq {seq} closed under its own step")
                req.closed, req.left = True, self.now
                self.copies.closed(seq)
                for users in self.users.values():
                    users.discard(seq)
            case fx.Spill(seq):
                in_step = seq in self.flights.seqs()
                self.copies.spill(effect, self.reqs[seq].computed, in_step)
            case fx.Restore(seq):
                self.copies.restore(effect)
                self.reqs[seq].decoding = False  # its next row ends a prefill
                if self.reqs[seq].adapter is None:
                    self._base_had_turn(self.reqs[seq])
            case fx.Commit():
                self._commit(effect)
            case fx.Retire(slot):
                users = self._users_of(slot)
                self.need(not users, "busy slot", f"slot {slot} retired under {users}")
                self.slot_id.pop(slot, None)
            case fx.Relayout():
                self._relayout(effect)
            case fx.StartStage(stage, name, source):
                self.need(self.rebuilding is None, "global barrier", f"stage {stage}")
                self.need(source not in self.dropped, "source", f"source {source} staged, dropped")
                self.stages[stage] = (name, source)
            case fx.DropImage(image):
                self.need(image in self.images, "image", f"image {image} dropped, not held")
                self.images.discard(image)
            case fx.DropSource(source):
                self.need(source in self.sources, "source", f"source {source} dropped, not held")
                busy = any(s == source for _, s in self.stages.values())
                self.need(not busy, "source", f"source {source} dropped while staged")
                self.sources.discard(source)
                self.dropped.add(source)
            case fx.Reply():
                self._reply(effect)
            case fx.Closed():
                quiet = not self.flights.steps and not self.commits and not self.stages
                quiet = quiet and self.rebuilding is None
                self.need(quiet, "close", "Closed with work in flight")
                self.need(all(r.ended for r in self.reqs.values()), "close", "requests not ended")
                self.closed = True
            case fx.CancelStage(stage):
                self.need(stage in self.stages, "stage", f"stage {stage} cancelled, not running")

    def _relayout(self, effect: fx.Relayout) -> None:
        held = {s for users in self.users.values() for s in users if not self.reqs[s].closed}
        quiet = not self.flights.steps and not self.commits and not self.stages
        self.need(quiet and not held, "global barrier", f"under {held}, or with work in flight")
        open_now = [s for s, r in self.reqs.items() if r.opened and not r.closed]
        self.need(not open_now, "global barrier", f"sequences {open_now} are open")
        self.rebuilding = effect

    def _reply(self, effect: fx.Reply) -> None:
        command = effect.command
        self.need(command not in self.answered, "answered once", f"command {command} twice")
        self.answered.add(command)
        what = self.commands.pop(command, None)
        self.need(what is not None, "answered once", f"command {command} is not waiting")
        if what is None:
            return
        verb, _, name = what.partition(" ")
        if verb == "resize":
            self.resizes[command][1] = self.now
        if verb == "rotate" and effect.failure is None:
            self.default = name or None
        elif verb == "unload" and effect.failure is not None:
            self.epoch[name] -= 1

    def _commit(self, effect: fx.Commit) -> None:
        slot = effect.slot
        users = self._users_of(slot)
        self.need(not users, "busy slot", f"slot {slot} written under {users}")
        self.need(
            all(c.slot != slot for c, _ in self.commits.values()), "busy slot", f"slot {slot} twice"
        )
        self.need(effect.image in self.images, "image", f"image {effect.image} committed, dropped")
        self.slot_id.pop(slot, None)
        self.commits[effect.commit] = (effect, self.epoch.get(effect.name, 0))
        self.slots_given.append((round(self.now, 6), slot, effect.name))

    def _users_of(self, slot: int) -> set[int]:
        """Sequences that may still read the slot: not ended, or in a step in flight."""
        flying = self.flights.seqs()
        users = self.users.get(slot, set())
        return {s for s in users if not self.reqs[s].ended or s in flying}

    def _run_step(self, step: fx.RunStep) -> None:
        self.need(self.rebuilding is None, "global barrier", f"step {step.step} on a moving pool")
        ahead = bool(self.flights.steps)
        self.need(not (ahead and self.commits), "barrier", f"step {step.step} makes a commit wait")
        self.flights.planned(step)
        self.need(bool(step.rows), "step", "an empty step")
        total = sum(len(r.tokens) for r in step.rows)
        config = self.config
        decoding = [row.start for row in step.rows if self._decodes(row)]
        least = max(1, min(config.mixed_step_tokens // 2, config.block_size))
        mixed = max(config.mixed_step_tokens, len(decoding) + least)
        # One that starts a block may be prefill behind all the rest of its tokens, read again.
        sure = any(start % config.block_size for start in decoding)
        cap = mixed if sure else max(mixed, config.max_step_tokens)
        self.need(total <= cap, "budget", f"{total} tokens in one step")
        self.need(len(step.rows) <= self.config.max_running, "budget", f"{len(step.rows)} rows")
        for row in step.rows:
            self._row(row, ahead)
        self.keeping.step(step)
        present = {row.seq for row in step.rows}
        for seq, req in self.reqs.items():
            req.absent = seq not in present

    def _decodes(self, row: fx.Row) -> bool:
        req = self.reqs.get(row.seq)
        return (
            req is not None
            and req.decoding
            and row.start == req.computed > 0
            and len(row.tokens) == 1
        )

    def _row(self, row: fx.Row, ahead: bool) -> None:
        req = self.reqs.get(row.seq)
        if req is None or req.ended or not req.opened or req.closed:
            self.broken("lease", f"seq {row.seq} runs, but is not open")
            return
        who = f"seq {row.seq}"
        self.need(not self.copies.away(row.seq), "quiescence", f"{who} runs, but is spilled")
        if req.first is None:
            req.first, req.hit = self.now, row.start
            req.slot, req.ident = row.slot, row.adapter_id
            if req.adapter is not None:
                newest = self.latest.get(req.adapter)
                newest = self.families.get(req.family, newest)
                self.need(row.adapter_id == newest, "newest version", f"{who} leased an old one")
            self.families.setdefault(req.family, row.adapter_id)
        same = row.adapter_id == self.families[req.family]
        self.need(same, "one version", f"{who} differs from its samples")
        self.need(row.slot == req.slot, "one lease", f"{who} moved from {req.slot} to {row.slot}")
        self.need(row.adapter_id == req.ident, "one version", f"{who} changed version")
        self.need((row.slot < 0) == (req.adapter is None), "base", f"{who} in slot {row.slot}")
        if row.slot >= 0:
            self.need(
                self.slot_id.get(row.slot) == row.adapter_id,
                "right weights",
                f"{who} reads slot {row.slot}, which holds another version",
            )
            content = self.slot_content(row.slot)
            known = self.content.setdefault(row.adapter_id, content or "")
            self.need(known == content, "identity", f"one adapter_id, two contents: {known}")
            self.users.setdefault(row.slot, set()).add(row.seq)
        # Whether the blocks it begins behind hold its own tokens, the simulated device judges.
        length = req.prompt + req.tokens + ahead  # a step ahead is fed one token more
        self.need(req.tokens + ahead < req.wanted, "waste", f"{who} has its last token on the way")
        begins = row.start % self.config.block_size == 0 and row.start < length
        begins = begins and (self.config.shares_prefixes or row.start == 0)
        begins = begins and (not self.config.recurrent or row.start == 0 or row.load >= 0)
        fed = row.start + len(row.tokens)
        self.need(begins or row.start == req.computed, "resume", f"{who} starts at {row.start}")
        self.need(fed <= length, "resume", f"{who} runs ahead to {fed}")
        self.need(row.sample == (fed == length), "resume", f"{who} samples at {fed}")
        if req.adapter is None and req.computed and (row.start != req.computed or req.absent):
            # A preempted base sequence (may have) come back: base had its turn in this step.
            self._base_had_turn(req)
        req.decoding = row.sample
        req.computed = row.start + len(row.tokens)

    def _base_had_turn(self, req: Req) -> None:
        self.base_passed[req.priority] = {}
        self._passed_twice.pop(req.priority, None)

    def _token(self, effect: fx.Token) -> None:
        req = self.reqs.get(effect.seq)
        if req is None or req.ended:
            self.broken("ends once", f"seq {effect.seq} got a token after its end")
            return
        self.need(effect.index == req.tokens, "order", f"seq {effect.seq}: index {effect.index}")
        self.need(effect.adapter_id == req.ident, "one version", f"seq {effect.seq}: wrong id")
        done = self._done
        relayed = done is not None and done.rows[effect.row].token == effect.token
        self.need(relayed, "relay", f"seq {effect.seq}: not the device's token")
        req.tokens += 1

    def _open(self, seq: int) -> None:
        req = self.reqs[seq]
        self.need(not req.opened and not req.ended, "lease", f"seq {seq} opened wrongly")
        req.opened = True
        for one in self.reqs.values():
            if one.family == req.family and one.held is None and not one.ended:
                one.held = self.now  # all samples lease together
        self._no_longer_waits(seq, req)
        if req.adapter is None:
            self.base_passed[req.priority] = {}
        elif self.waiting.get((req.priority, None)) and not self._resizing():
            # Lanes of one priority take turns: while base waits, another passes it once at most.
            passed = self.base_passed[req.priority]
            passed[req.adapter] = passed.get(req.adapter, 0) + 1
            if passed[req.adapter] > 1:
                self._passed_twice[req.priority] = req.adapter

    def _resizing(self) -> bool:
        return any(end == float("inf") for _, end in self.resizes.values())

    def _no_longer_waits(self, seq: int, req: Req) -> None:
        lane = self.waiting.get((req.priority, req.adapter))
        if lane is not None:
            lane.discard(seq)
