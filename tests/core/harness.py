"""A tiny world around the core: it carries out effects at once or when told, and checks every law.

The world's device "computes" a token from (adapter_id, position), so that a token of the wrong
version shows at once.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from rota.sched.core import Core, CoreConfig
from rota.sched.core import effects as fx
from rota.sched.core import events as ev
from rota.sched.core.config import most_step_tokens


def token_of(adapter_id: int, position: int) -> int:
    return (adapter_id * 31 + position * 7) % 50_000 + 10


Seen = tuple[int, tuple[int, ...]]


class World:
    """Owns a core and the in-flight work it asked for. ``content`` maps a source id to a digest."""

    def __init__(self, **config: Any) -> None:
        base: dict[str, Any] = {"max_loras": 3, "num_blocks": 64, "max_context": 256}
        base.update(config)
        self.config = CoreConfig(**base)
        self.core = Core(self.config)
        self.now = 0.0
        self.device: deque[fx.Effect] = deque()
        self.staging: dict[int, fx.StartStage] = {}
        self.content: dict[int, str] = {}
        self.slot_id = [0] * self.config.max_loras
        #: Bytes of the annex of each content, and where each slot's annex lies.
        self.annex: dict[str, int] = {}
        self.annexes: dict[int, range] = {}
        self.slot_content: dict[int, str] = {}
        self.tokens: dict[int, list[tuple[int, int]]] = {}
        self.ended: dict[int, fx.Ended] = {}
        self.replies: dict[int, fx.Reply] = {}
        self.closed = False
        self.open: set[int] = set()
        self.host: dict[int, int] = {}
        #: Of a recurrent model: the version and tokens each state has seen; of snapshots; of
        #: states in host memory.
        self.states: dict[int, Seen] = {}
        self.snapshots: dict[int, Seen] = {}
        self.host_states: dict[int, Seen] = {}
        self.prompts: dict[int, tuple[int, ...]] = {}
        #: What the step before sampled, by row: sequence and token.
        self.sampled: list[tuple[int, int]] = []
        self.images: dict[int, str] = {}
        self.dropped_sources: set[int] = set()
        self.ids = 1000

    def send(self, event: ev.Event) -> list[fx.Effect]:
        if isinstance(event, ev.Submit):
            self.prompts |= dict.fromkeys((event.seq, *event.siblings), event.prompt)
        effects = self.core.handle(event, self.now)
        for effect in effects:
            self._take(effect)
        self.core.check()
        return effects

    def _take(self, effect: fx.Effect) -> None:
        match effect:
            case (
                fx.RunStep()
                | fx.Relayout()
                | fx.Spill()
                | fx.Restore()
                | fx.Commit()
                | fx.Retire()
                | fx.CloseSequence()
                | fx.DropState()
            ):
                self.device.append(effect)
            case fx.OpenSequence(seq):
                assert seq not in self.open
                self.open.add(seq)
            case fx.Token(seq, token, index, ident, _, _):
                assert seq not in self.ended, "token after the end"
                got = self.tokens.setdefault(seq, [])
                assert len(got) == index
                got.append((ident, token))
            case fx.Ended(seq):
                assert seq not in self.ended, "ended twice"
                self.ended[seq] = effect
            case fx.StartStage(stage):
                assert effect.source not in self.dropped_sources
                self.staging[stage] = effect
            case fx.Reply(command):
                assert command not in self.replies, "answered twice"
                self.replies[command] = effect
            case fx.DropImage(image):
                del self.images[image]
            case fx.DropSource(source):
                assert source not in self.dropped_sources, "source dropped twice"
                self.dropped_sources.add(source)
            case fx.Closed():
                self.closed = True
            case fx.CancelStage():
                pass

    def submit(
        self, seq: int, adapter: str | None = None, n: int = 4, prompt: int = 5, **kw: Any
    ) -> None:
        self.send(
            ev.Submit(seq, tuple(range(1, prompt + 1)), adapter, kw.pop("default", False), n, **kw)
        )

    # the device, the workers ------------------------------------------------------------------
    def run_device(self, *, fail: str | None = None, fatal: bool = False) -> bool:
        """Do the next piece of device work; false if there is none."""
        if not self.device:
            return False
        job = self.device.popleft()
        failure = ev.Failure("device", fail or "", "injected")
        match job:
            case fx.RunStep(step, rows):
                before, self.sampled = self.sampled, []
                if fail:
                    self.send(ev.StepFailed(step, failure, fatal))
                    return True
                done = []
                config = self.config
                assert sum(len(row.tokens) for row in rows) <= most_step_tokens(
                    config.max_step_tokens,
                    config.mixed_step_tokens,
                    config.max_running,
                    config.block_size,
                ), "more than the device was made for"
                for row in rows:
                    tokens = row.tokens
                    if tokens[0] < 0:
                        source = before[fx.fed(tokens[0])] if before else (row.seq, -1)
                        assert source[0] == row.seq and len(tokens) == 1, "another's token"
                        tokens = source[1:]
                    if tokens[0] < 0:
                        unfed = ev.Failure("internal", "row-not-fed", "injected")
                        done.append(ev.RowDone(row.seq, -1, unfed))
                        continue
                    if row.slot >= 0:
                        assert self.slot_id[row.slot] == row.adapter_id, "wrong weights"
                    need = -(-(row.start + len(row.tokens)) // self.config.block_size)
                    assert len(row.blocks) >= need and len(set(row.blocks)) == len(row.blocks)
                    position = row.start + len(row.tokens)
                    if self.config.recurrent:
                        self.advance(row, tokens)
                    done.append(
                        ev.RowDone(
                            row.seq, token_of(row.adapter_id, position) if row.sample else -1
                        )
                    )
                size = self.config.block_size
                own = [b for r in rows for b in r.blocks[r.start // size :]]
                assert len(own) == len(set(own)), "two sequences write a block"
                for r in rows:
                    assert not set(own) & set(r.blocks[: r.start // size]), "read while written"
                for r in rows:
                    if r.save >= 0 and r.seq in self.states:
                        assert all(r.save not in (o.load, o.save) for o in rows if o is not r)
                        assert r.save < self.config.snapshots
                        self.snapshots[r.save] = self.states[r.seq]
                self.sampled = [(one.seq, one.token) for one in done]
                self.send(ev.StepDone(step, tuple(done)))
            case fx.Commit(commit, slot, image, _, ident, extent):
                assert image in self.images
                size = self.annex.get(self.images[image], 0)
                self.annexes.pop(slot, None)
                assert (extent is None) == (size == 0)
                if extent is not None:
                    place = range(extent, extent + size)
                    assert 0 <= place.start < place.stop <= self.config.arena_bytes
                    for other in self.annexes.values():
                        assert place.stop <= other.start or other.stop <= place.start
                    self.annexes[slot] = place
                if fail:
                    self.slot_id[slot] = -1
                    self.send(ev.CommitFailed(commit, failure, fatal))
                    return True
                self.slot_id[slot] = ident
                self.slot_content[slot] = self.images[image]
                self.send(ev.CommitDone(commit))
            case fx.Spill(seq, blocks):
                left = self.states.pop(seq) if self.config.recurrent else None
                if fail:
                    self.send(ev.SpillFailed(seq, failure, fatal))
                    return True
                assert seq in self.open and seq not in self.host
                self.host[seq] = len(blocks)
                extra = 0
                if left is not None:
                    self.host_states[seq] = left
                    extra = self.config.state_blocks
                    assert -(-len(left[1]) // self.config.block_size) == len(blocks)
                held = sum(count + extra for count in self.host.values())
                assert held <= self.config.spill_blocks
                self.send(ev.SpillDone(seq))
            case fx.Restore(seq, places):
                count = self.host.pop(seq)
                back = self.host_states.pop(seq, None)
                if fail:
                    self.send(ev.RestoreFailed(seq, failure, fatal))
                    return True
                if back is not None:
                    assert seq not in self.states
                    self.states[seq] = back
                assert [i for i, _ in places] == list(range(count - len(places), count))
                self.send(ev.RestoreDone(seq))
            case fx.Relayout(max_loras, _, residents):
                assert not self.staging and not self.open, "no global barrier"
                if fail:
                    self.send(ev.RelayoutFailed(failure, fatal))
                    return True
                self.slot_id = [0] * max_loras
                self.annexes.clear()
                # The test may have given the contents annexes of another size by now.
                needs = tuple(self.annex.get(self.slot_content[r.slot], 0) for r in residents)
                assert sum(n for r, n in zip(residents, needs, strict=True) if r.pinned) <= (
                    self.config.arena_bytes
                )
                self.send(ev.RelayoutDone(self.config.arena_bytes, needs))
            case fx.Retire(slot):
                self.annexes.pop(slot, None)
                self.slot_id[slot] = 0
            case fx.CloseSequence(seq):
                self.open.remove(seq)
                self.host.pop(seq, None)
                self.host_states.pop(seq, None)
                self.states.pop(seq, None)
            case fx.DropState(seq):
                assert self.config.recurrent and seq in self.open
                self.states.pop(seq, None)
        assert len(self.states) <= self.config.max_running, "more states than places"
        return True

    def advance(self, row: fx.Row, tokens: tuple[int, ...]) -> None:
        """Move the state of a row's sequence on: it must be that of the tokens before the row."""
        if row.load >= 0:
            assert row.seq not in self.states, "a state was never given up"
            assert row.start > 0
            self.states[row.seq] = self.snapshots[row.load]
        elif row.start == 0:
            assert row.seq not in self.states, "a state was never given up"
            self.states[row.seq] = (row.adapter_id, ())
        ident, seen = self.states[row.seq]
        assert ident == row.adapter_id, "a state of another version"
        assert len(seen) == row.start, "not where its state is"
        assert list(seen) == self.known(row.seq)[: row.start], "a state of other tokens"
        self.states[row.seq] = (ident, (*seen, *tokens))

    def known(self, seq: int) -> list[int]:
        """Prompt and output of a sequence so far."""
        return [*self.prompts[seq], *self.output(seq)]

    def step(self) -> tuple[fx.Row, ...]:
        """Plan and run one step, and all else the device has to do; the step's rows."""
        self.send(ev.Plan())
        rows = next((e.rows for e in self.device if isinstance(e, fx.RunStep)), ())
        while self.device:
            self.run_device()
        return rows

    def run_stage(self, stage: int | None = None, *, fail: str | None = None) -> bool:
        if not self.staging:
            return False
        ident = next(iter(self.staging)) if stage is None else stage
        job = self.staging.pop(ident)
        if fail:
            failure = ev.Failure("reject", fail, "injected")
            self.send(ev.StageFailed(ident, failure))
            return True
        digest = self.content.get(job.source, f"digest-{job.source}")
        self.images[ident] = digest
        annex = self.annex.get(digest, 0)
        self.send(ev.StageDone(ident, ident, digest, 100, rank=8, annex=annex))
        return True

    def settle(self, limit: int = 20_000) -> None:
        """Run everything to rest."""
        for _ in range(limit):
            if self.run_stage() or self.run_device():
                continue
            self.send(ev.Plan())
            if self.device or self.staging:
                continue
            wake = self.core.next_wake()
            if wake is None or self.core.idle():
                return
            self.now = max(self.now, wake)
            self.send(ev.Tick())
        raise AssertionError("the world does not come to rest")

    def command(self, make: Any, *args: Any, **kw: Any) -> int:
        self.ids += 1
        self.send(make(self.ids, *args, **kw))
        return self.ids

    def load(self, name: str, source: int, **kw: Any) -> fx.Reply:
        ident = self.command(ev.Load, name, source, **kw)
        self.settle()
        return self.replies[ident]

    def output(self, seq: int) -> list[int]:
        return [t for _, t in self.tokens.get(seq, [])]

    def check_right_versions(self, prompt: dict[int, int]) -> None:
        """Each sequence's tokens all come from one version, position by position."""
        for seq, got in self.tokens.items():
            assert len({ident for ident, _ in got}) == 1, "mixed versions in one sequence"
            for index, (ident, token) in enumerate(got):
                assert token == token_of(ident, prompt[seq] + index)


def rng(seed: int) -> random.Random:
    return random.Random(seed)
