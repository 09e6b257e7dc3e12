"""A simulated day as data: what is asked when, and what goes wrong. Made from a seed, or read back.

A scenario is plain values, so that a failing one can be cut down action by action and written to a
file. Owns the choice of workloads; decides nothing about how they are served.
"""

from __future__ import annotations

import random
from typing import Literal

import msgspec

from ..core import CoreConfig

Leave = Literal["", "cancel", "scope", "drop", "stop"]
FaultKind = Literal["step", "row", "commit", "retire", "relayout", "spill", "restore"]


class SourceSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """``error``: a reject code (``reject:...``) or a staging code; empty = it stages.
    ``seconds`` of 1e9 is a peer that never answers. ``path``: one place, changing content."""

    content: str
    seconds: float = 0.05
    error: str = ""
    path: str | None = None
    nbytes: int = 1000
    rank: int = 8
    annex: int = 0


class Ask(msgspec.Struct, frozen=True, tag="ask", omit_defaults=True):
    """A request at time ``at``. ``leave``: how its caller goes away early (``cancel()``, a
    cancelled scope, dropping the iterator, a stop string), after ``leave_after`` seconds. The
    first ``shared`` tokens of its prompt are those of every prompt of its ``topic``. ``samples``:
    how many answers are wanted."""

    at: float
    adapter: str | None = None
    default: bool = False
    prompt: int = 4
    tokens: int = 8
    priority: int = 0
    deadline_s: float | None = None
    leave: Leave = ""
    leave_after: float = 0.0
    topic: int = 0
    shared: int = 0
    samples: int = 1


class Do(msgspec.Struct, frozen=True, tag="do", omit_defaults=True):
    """A command at time ``at``; ``cancel_after``: its caller stops waiting then."""

    at: float
    verb: str
    name: str | None = None
    source: SourceSpec | None = None
    slot: int = -1
    pin: bool = False
    deadline_s: float = 1.0
    cancel_late: bool = False
    cancel_after: float | None = None
    rank: int = 64


class Jump(msgspec.Struct, frozen=True, tag="jump"):
    """The clock jumps (a suspended machine)."""

    at: float
    seconds: float


class Shut(msgspec.Struct, frozen=True, tag="shut"):
    """The engine is closed while things run."""

    at: float


Action = Ask | Do | Jump | Shut


class Fault(msgspec.Struct, frozen=True, omit_defaults=True):
    """The ``nth`` device job of this ``kind`` (counted from 0) fails with ``code``."""

    kind: FaultKind
    nth: int
    code: str = "injected"


class Scenario(msgspec.Struct, frozen=True, omit_defaults=True):
    """``step_s``, ``row_s``, ``token_s``: the device's cost model, in seconds. ``limit_s``: virtual
    time after which whatever still waits is stuck."""

    seed: int
    profile: str
    backend: Literal["asyncio", "trio"]
    config: CoreConfig
    actions: tuple[Action, ...]
    faults: tuple[Fault, ...] = ()
    step_s: float = 0.01
    row_s: float = 0.0002
    token_s: float = 0.00002
    commit_s: float = 0.004
    limit_s: float = 400.0


PROFILES = (
    "mix",
    "hot",
    "reload",
    "pressure",
    "cancel",
    "faults",
    "close",
    "clock",
    "fatal",
    "rotate",
)
_NEVER = 1e9
#: Annexes as shares of the arena, by a draw below: most have one, few have one that never fits.
_ANNEXES = ((0.2, 0.0), (0.4, 0.1), (0.6, 0.3), (0.75, 0.4), (0.9, 0.6), (0.97, 1.0), (1.0, 1.1))
_FAULT_KINDS: tuple[FaultKind, ...] = ("step", "row", "commit", "retire", "commit")


class _Maker:
    """One seed's draws. Times are drawn first and sorted, so actions read in order."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.profile = PROFILES[seed % len(PROFILES)]
        self.actions: list[Action] = []
        self.faults: list[Fault] = []
        self.horizon = self.rng.choice([1.0, 2.0, 4.0])
        self.contents = 0
        rng = self.rng
        tight = self.profile == "pressure"
        self.config = CoreConfig(
            max_loras=rng.choice([1, 2, 3, 4, 8]),
            num_blocks=rng.choice([12, 16, 24]) if tight else rng.choice([32, 64, 256]),
            max_context=160,
            max_running=rng.choice([8, 16]) if tight else rng.choice([2, 4, 8, 16]),
            max_waiting=rng.choice([8, 64, 256]),
            max_step_tokens=rng.choice([16, 64, 256]),
            mixed_step_tokens=rng.choice([8, 32, 64]),
            watermark_blocks=0 if tight else rng.choice([0, 2, 4]),
            prefix_cache=rng.random() < 0.9,
            spill_blocks=rng.choice([0, 6, 40]),
            spill_fixed_cost=rng.choice([0.0, 32.0]),
            spill_block_cost=rng.choice([0.0, 4.0]),
            drain_after_s=rng.choice([0.0, 0.1, 0.5]),
            failure_backoff_s=rng.choice([0.05, 1.0]),
            max_jobs_per_name=rng.choice([2, 8]),
            max_commands=rng.choice([4, 64]),
            image_cache_bytes=rng.choice([0, 2500, 1_000_000]),
            max_remembered_generations=rng.choice([1, 100]),
            log_size=100_000,
            recurrent=seed // len(PROFILES) % 4 == 1,
            step_depth=1 if seed // len(PROFILES) % 3 == 2 else 2,
        )
        if self.profile == "hot":
            self.config = msgspec.structs.replace(
                self.config, max_loras=rng.choice([1, 2]), max_waiting=256, num_blocks=256
            )
        self.names = [f"n{i}" for i in range(rng.choice([2, 4, 8, 12]))]
        self.long, self.alike = tight, False
        self._states(seed)

    def _states(self, seed: int) -> None:
        """Where the model has recurrent states, how many snapshots, how far apart (draws of their
        own: the rest is as it was without). Half of these are short of memory, and ask few adapters
        for what begins alike, so that states are preempted, spilled and begun with again."""
        if not self.config.recurrent:
            return
        rng = random.Random(seed ^ 0x57A7E)
        if self.profile in ("mix", "pressure", "cancel", "clock", "rotate"):
            self.long, self.alike = True, True
            self.names = self.names[:2]
            self.config = msgspec.structs.replace(
                self.config,
                num_blocks=rng.choice([12, 16, 24]),
                watermark_blocks=0,
                max_running=rng.choice([4, 8, 16]),
                max_step_tokens=rng.choice([16, 64, 256]),
                prefix_cache=rng.random() < 0.9,
                spill_blocks=rng.choice([0, 12, 40, 40]),
                spill_fixed_cost=0.0,
                spill_block_cost=rng.choice([0.0, 0.0, 4.0]),
            )
        self.config = msgspec.structs.replace(
            self.config,
            snapshots=rng.choice([0, 1, 1, 2, 4, 40]),
            snapshot_tokens=rng.choice([16, 16, 32, 1024]),
            state_blocks=rng.choice([0, 1, 3]),
        )

    def time(self) -> float:
        return round(self.rng.random() * self.horizon, 4)

    def name(self) -> str:
        """A power law over the names: the first is the busiest."""
        return self.names[int(self.rng.random() ** 2.0 * len(self.names))]

    def source(self, name: str, bad: float) -> SourceSpec:
        rng = self.rng
        self.contents += 1
        error, seconds = "", rng.choice([0.0, 0.01, 0.05, 0.2, 0.8])
        if rng.random() < bad:
            error = rng.choice(
                ["reject:shape-mismatch", "reject:rank-mismatch", "stage-io", "stage-memory"]
            )
        elif rng.random() < bad / 4:
            seconds = _NEVER
        content = f"{name}#{self.contents}"
        if rng.random() < 0.25:
            content = f"{name}#same"
        path = f"/sim/{name}" if rng.random() < 0.3 else None
        nbytes = rng.choice([100, 1000, 2000])
        return SourceSpec(content, seconds, error, path, nbytes, {100: 4, 1000: 8}.get(nbytes, 16))

    def ask(self, at: float | None = None, *, leave: float = 0.15) -> Ask:
        rng = self.rng
        adapter = None if rng.random() < 0.25 else self.name()
        if rng.random() < 0.02:
            adapter = "nobody"
        how: Leave = ""
        if rng.random() < leave:
            how = rng.choice(["cancel", "scope", "drop", "stop"])
        long = self.long
        prompt = rng.randrange(1, 90 if long else 60)
        shared = rng.choice([0, rng.randrange(prompt + 1), rng.randrange(prompt + 1), prompt])
        return Ask(
            self.time() if at is None else at,
            adapter,
            rng.random() < (0.6 if self.profile == "rotate" else 0.1),
            prompt,
            rng.randrange(1, 60 if long else 25),
            rng.choice([0, 0, 0, 1]),
            round(rng.random() * 2, 3) if rng.random() < 0.08 else None,
            how,
            round(rng.random() * 0.6, 4) if how else 0.0,
            0 if self.alike else rng.randrange(2),
            shared,
            rng.randrange(2, 5) if rng.random() < 0.1 else 1,
        )

    def do(self, verb: str, bad: float) -> Do:
        rng = self.rng
        name: str | None = self.name()
        assert name is not None
        wants = verb in ("load", "register", "replace", "swap")
        maybe = verb in ("promote", "prefetch") and rng.random() < 0.3
        source = self.source(name, bad) if wants or maybe else None
        if verb == "rotate" and rng.random() < 0.4:
            name = None
        return Do(
            self.time(),
            verb,
            name,
            source,
            rng.randrange(-1, self.config.max_loras + 1) if verb == "swap" else -1,
            verb == "load" and rng.random() < 0.15,
            rng.choice([0.0, 0.05, 0.3, 2.0]),
            rng.random() < 0.5,
            round(rng.random() * 0.3, 4) if rng.random() < 0.15 else None,
        )

    def make(self, seed: int) -> Scenario:
        rng, profile = self.rng, self.profile
        bad = {"faults": 0.4, "mix": 0.1, "reload": 0.1}.get(profile, 0.03)
        for name in self.names:
            if rng.random() < 0.8:
                self.actions.append(Do(0.0, "register", name, self.source(name, bad)))
        asks = rng.choice([8, 20, 40])
        if profile == "hot":
            self._hot()
            asks //= 4
        leave = {"cancel": 0.8}.get(profile, 0.15)
        self.actions += [self.ask(leave=leave) for _ in range(asks)]
        if profile == "cancel":
            at = self.time()
            self.actions += [self.ask(at, leave=1.0) for _ in range(20)]
        verbs = ["load", "replace", "replace", "promote", "swap", "unload", "prefetch"]
        verbs += ["rotate", "pin", "unpin", "register"]
        count = rng.choice([20, 40]) if profile == "reload" else rng.choice([2, 6, 14])
        for _ in range(count):
            self.actions.append(self.do(rng.choice(verbs), bad))
        if profile == "rotate":
            self.actions += [self.do("rotate", 0.0) for _ in range(12)]
        if profile == "pressure":
            busy = ["replace", "replace", "promote", "swap", "unload"]
            self.actions += [self.do(rng.choice(busy), 0.0) for _ in range(25)]
        if profile == "reload":
            one = self.names[0]
            for _ in range(12):
                verb = rng.choice(["replace", "replace", "unload", "load", "swap"])
                act = self.do(verb, bad)
                source = self.source(one, bad) if act.source is not None else None
                self.actions.append(msgspec.structs.replace(act, name=one, source=source))
        if profile in ("faults", "fatal"):
            for _ in range(rng.choice([1, 3, 6])):
                kind = rng.choice(_FAULT_KINDS)
                self.faults.append(Fault(kind, rng.randrange(40 if kind in ("step", "row") else 8)))
        if profile == "pressure" and rng.random() < 0.3:
            for _ in range(3):
                self.faults.append(Fault(rng.choice(["spill", "restore"]), rng.randrange(4)))
        if profile == "fatal":
            kind = rng.choice((_FAULT_KINDS[0], _FAULT_KINDS[-1]))
            nth = rng.randrange(60 if kind == "step" else 6)
            self.faults.append(Fault(kind, nth, "device-dead"))
        if profile == "clock":
            for _ in range(rng.choice([1, 3])):
                jump = rng.choice([-5.0, -0.3, 0.2, 3.0, 60.0])
                self.actions.append(Jump(self.time(), jump))
        if profile == "close":
            self.actions.append(Shut(self.time()))
        self._resizes(seed)
        self._annexes(seed)
        if self.profile == "pressure":  # where copies happen, an early one fails now and then
            copies: tuple[FaultKind, ...] = ("spill", "restore")
            self.faults += [Fault(k, seed // 10 % 3) for k in copies if seed % 20 == 3]
        order = sorted(range(len(self.actions)), key=lambda i: (self.actions[i].at, i))
        return Scenario(
            seed,
            profile,
            "trio" if seed % 7 == 4 else "asyncio",
            self.config,
            tuple(self.actions[i] for i in order),
            tuple(self.faults),
            step_s=rng.choice([0.005, 0.02]),
        )

    def _resizes(self, seed: int) -> None:
        """Every third seed changes the pool as well (with draws of its own, so that the rest of the
        seed's scenario is the same with and without)."""
        if seed % 3 != 1:
            return
        rng = random.Random(seed ^ 0x7E512E)
        for _ in range(rng.choice([1, 1, 2, 4])):
            slots, rank = rng.randrange(0, 7), rng.choice([4, 8, 16, 64, 64])
            patience = rng.choice([0.0, 0.1, 0.5, 3.0, 3.0])
            at = round(rng.random() * self.horizon, 4)
            leave = round(rng.random() * 0.3, 4) if rng.random() < 0.15 else None
            self.actions.append(
                Do(at, "resize", None, None, slots, False, patience, False, leave, rank)
            )
        if rng.random() < 0.3:
            code = "device-dead" if self.profile == "fatal" else "injected"
            self.faults.append(Fault("relayout", rng.randrange(2), code))

    def _annexes(self, seed: int) -> None:
        """Every second block of profiles has an arena that does not hold all annexes at once (with
        draws of its own, like the resizes)."""
        if seed // len(PROFILES) % 2:
            return
        total = random.Random(seed ^ 0xA22E4A).choice([40, 100, 100, 300])
        self.config = msgspec.structs.replace(self.config, arena_bytes=total)
        for index, action in enumerate(self.actions):
            if not isinstance(action, Do) or action.source is None:
                continue
            draw = random.Random(f"{seed} {action.source.content}").random()
            part = next(share for below, share in _ANNEXES if draw < below)
            source = msgspec.structs.replace(action.source, annex=int(total * part))
            self.actions[index] = msgspec.structs.replace(action, source=source)

    def _hot(self) -> None:
        """A steady stream for the busy adapters, so that a cold one must drain one."""
        rng = self.rng
        at, gap = 0.05, rng.choice([0.02, 0.05])
        hot = self.names[: self.config.max_loras]
        for name in self.names:
            self.actions.append(Do(0.0, "register", name, SourceSpec(f"{name}#hot", 0.01)))
        for _ in range(80):
            self.actions.append(Ask(round(at, 4), rng.choice(hot), tokens=rng.randrange(4, 16)))
            at += gap
        self.actions.append(Ask(0.5, self.names[-1], tokens=4))
        for _ in range(6):
            self.actions.append(Ask(round(0.3 + rng.random(), 4), None, tokens=6))


def scenario_of(seed: int) -> Scenario:
    """The scenario of a seed; the profile is ``PROFILES[seed % len(PROFILES)]``."""
    return _Maker(seed).make(seed)
