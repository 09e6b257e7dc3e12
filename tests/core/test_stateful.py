"""The pure core as a hypothesis state machine: rules choose events, the world carries them out and
checks every law after each; hypothesis shrinks what fails to a few rules."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rota.sched.core import effects as fx
from rota.sched.core import events as ev

from . import harness

NAMES = st.sampled_from(["a", "b", "c", "d"])
CONTENTS = st.sampled_from(["one", "two", "three"])


class CoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world: Any = harness.World(max_loras=1)
        self.prompts: dict[int, int] = {}
        self.names: dict[int, str | None] = {}
        self.sources = 0

    @initialize(
        slots=st.integers(1, 3),
        blocks=st.sampled_from([10, 16, 64]),
        running=st.sampled_from([1, 2, 8]),
        drain=st.sampled_from([0.0, 0.5]),
        cache=st.sampled_from([0, 150, 10_000]),
        spare=st.sampled_from([0, 8]),
        spill=st.sampled_from([0, 4, 16]),
        recurrent=st.booleans(),
        snapshots=st.sampled_from([0, 1, 4]),
        depth=st.sampled_from([2, 1]),
        arena=st.sampled_from([0, 50, 100]),
    )
    def start(
        self,
        slots: int,
        blocks: int,
        running: int,
        drain: float,
        cache: int,
        spare: int,
        spill: int,
        recurrent: bool,
        snapshots: int,
        depth: int,
        arena: int,
    ) -> None:
        self.world = harness.World(
            max_loras=slots,
            num_blocks=blocks,
            max_running=running,
            drain_after_s=drain,
            image_cache_bytes=cache,
            spare_jobs=spare,
            spill_blocks=spill,
            spill_fixed_cost=0.0,
            step_depth=depth,
            max_step_tokens=32,
            mixed_step_tokens=16,
            watermark_blocks=1,
            max_waiting=12,
            recurrent=recurrent,
            snapshots=snapshots,
            snapshot_tokens=16,
            state_blocks=1,
            arena_bytes=arena,
        )
        if arena:
            self.world.annex = {"two": 30, "three": 60}

    def _source(self, content: str) -> int:
        self.sources += 1
        self.world.content[self.sources] = content
        return self.sources

    @rule(
        name=st.none() | NAMES,
        prompt=st.integers(1, 40),
        n=st.integers(1, 20),
        priority=st.integers(0, 1),
        deadline=st.none() | st.floats(0.01, 1.0),
        default=st.booleans(),
        samples=st.sampled_from([1, 1, 1, 3]),
    )
    def submit(
        self,
        name: str | None,
        prompt: int,
        n: int,
        priority: int,
        deadline: float | None,
        default: bool,
        samples: int,
    ) -> None:
        seq, *siblings = range(len(self.prompts) + 1, len(self.prompts) + 1 + samples)
        world = self.world
        for one in (seq, *siblings):
            self.prompts[one] = prompt
            self.names[one] = world.core.stats().default_adapter if default else name
        when = None if deadline is None else world.now + deadline
        world.submit(
            seq,
            name,
            n=n,
            prompt=prompt,
            priority=priority,
            deadline=when,
            default=default,
            siblings=tuple(siblings),
        )

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), stop=st.booleans())
    def leave(self, data: st.DataObject, stop: bool) -> None:
        seq = data.draw(st.integers(1, len(self.prompts)))
        self.world.send(ev.Stop(seq) if stop else ev.Cancel(seq))

    @rule(
        kind=st.sampled_from([ev.Load, ev.Register, ev.Replace, ev.Promote, ev.Prefetch]),
        name=NAMES,
        content=CONTENTS,
    )
    def bring(self, kind: Any, name: str, content: str) -> None:
        self.world.command(kind, name, self._source(content))

    @rule(name=NAMES, content=CONTENTS, slot=st.integers(-1, 3))
    def swap(self, name: str, content: str, slot: int) -> None:
        self.world.command(ev.Swap, name, self._source(content), slot)

    @rule(name=NAMES, after=st.floats(0.0, 1.0), late=st.booleans())
    def unload(self, name: str, after: float, late: bool) -> None:
        self.world.command(ev.Unload, name, self.world.now + after, late)

    @rule(name=st.none() | NAMES)
    def rotate(self, name: str | None) -> None:
        self.world.command(ev.Rotate, name)

    @rule(name=NAMES, pinned=st.booleans())
    def pin(self, name: str, pinned: bool) -> None:
        self.world.command(ev.Pin, name, pinned)

    @rule(back=st.integers(0, 5))
    def cancel_command(self, back: int) -> None:
        self.world.send(ev.CancelCommand(self.world.ids - back))

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.5, 2.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.now += seconds
        self.world.send(ev.Tick())

    @rule()
    def plan(self) -> None:
        self.world.send(ev.Plan())

    @precondition(lambda self: self.world.device)
    @rule(fail=st.integers(0, 9))
    def device(self, fail: int) -> None:
        self.world.run_device(fail="injected" if fail == 0 else None)

    @precondition(lambda self: self.world.staging)
    @rule(data=st.data(), fail=st.integers(0, 4))
    def stage(self, data: st.DataObject, fail: int) -> None:
        stage = data.draw(st.sampled_from(sorted(self.world.staging)))
        self.world.run_stage(stage, fail="injected" if fail == 0 else None)

    @invariant()
    def sequences_run_under_the_name_they_asked_for(self) -> None:
        world = self.world
        for effect in world.device:
            if isinstance(effect, fx.RunStep):
                for row in effect.rows:
                    assert (row.slot < 0) == (self.names[row.seq] is None)

    @invariant()
    def only_what_may_run_is_in_a_step(self) -> None:
        world = self.world
        for effect in world.device:
            if isinstance(effect, fx.RunStep):
                states = {world.core._state.seqs[row.seq].state.value for row in effect.rows}
                assert states <= {"PREFILL", "DECODE", "CLOSING"}

    def teardown(self) -> None:
        world = self.world
        for name in ("a", "b", "c", "d"):
            world.command(ev.Pin, name, False)
        world.settle()
        assert world.core.idle(), "somebody waits and nothing will ever wake it"
        world.send(ev.Close())
        world.settle()
        assert world.closed and set(world.ended) == set(self.prompts) and not world.open
        stats = world.core.stats()
        assert stats.blocks_free == stats.blocks_total and not any(s.leases for s in stats.slots)
        world.check_right_versions(self.prompts)


CoreMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestCoreMachine = CoreMachine.TestCase
