"""Broken cores, one mistake each: the simulator's laws catch every one within a few seeds.

The core's own ``check`` is switched off, so what catches them is the ledger, the simulated device,
the callers and the transition tables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rota.sched.core import adapters, commands, placement, planning, registry, resize, tables
from rota.sched.core import events as ev
from rota.sched.core.core import Core
from rota.sched.core.effects import Ended, Retire
from rota.sched.core.identity import adapter_id
from rota.sched.core.lanes import Lanes
from rota.sched.core.memory import KvMemory
from rota.sched.core.registry import Registry
from rota.sched.core.slots import SlotTable
from rota.sched.core.state import State
from rota.sched.core.tables import SlotEvent, SlotState
from rota.sched.sim.run import report

from .broken import leases_taken_away_are_not_missed, must_be_caught

Patch = pytest.MonkeyPatch


def one_release_frees_all(patch: Patch) -> None:
    real = SlotTable.release

    def release(self: SlotTable, slot: Any, seq: int) -> bool:
        slot.leases.intersection_update({seq})
        slot.leases.add(seq)
        return real(self, slot, seq)

    leases_taken_away_are_not_missed(patch)
    patch.setattr(SlotTable, "release", release)


def busy_slots_are_victims(patch: Patch) -> None:
    real = SlotTable.drain_victim

    def drain_victim(self: SlotTable, *args: Any) -> Any:
        slot = real(self, *args)
        if slot is not None:
            slot.state = SlotState.READY
            slot.leases.clear()
        return slot

    def drain(state: State, slot: Any, job: Any) -> None:
        if slot.state is SlotState.IN_USE:
            state.slots.drain(slot, job.id)

    leases_taken_away_are_not_missed(patch)
    patch.setattr(SlotTable, "drain_victim", drain_victim)
    patch.setattr(placement, "_drain", drain)


def identity_by_name_only(patch: Patch) -> None:
    patch.setattr(placement, "adapter_id", lambda name, generation: adapter_id(name, 0))
    patch.setattr(registry, "adapter_id", lambda name, generation: adapter_id(name, 0))


def lost_unpark(patch: Patch) -> None:
    patch.setattr(Lanes, "unpark", lambda self, name: None)


def victim_not_reserved(patch: Patch) -> None:
    real = SlotTable.choose

    def choose(self: SlotTable, slot: Any) -> Any:
        evicted = real(self, slot)
        slot.state = SlotState.EMPTY
        return evicted

    def committed(self: SlotTable, slot: Any, version: Any, pin: bool) -> None:
        slot.state = SlotState.STAGING
        real_committed(self, slot, version, pin)

    real_committed = SlotTable.committed
    patch.setattr(SlotTable, "choose", choose)
    patch.setattr(SlotTable, "committed", committed)


def lease_dropped_on_preemption(patch: Patch) -> None:
    real = planning._preempt

    def preempt(state: State, seq: Any) -> None:
        real(state, seq)
        state.give_lease_back(seq)

    patch.setattr(planning, "_preempt", preempt)


def retire_forgotten(patch: Patch) -> None:
    real = State.slot_emptied

    def slot_emptied(self: State, index: int) -> None:
        real(self, index)
        self.out.remove(Retire(index))

    patch.setattr(State, "slot_emptied", slot_emptied)


def two_terminal_events(patch: Patch) -> None:
    real = State.settle

    def settle(self: State, seq: Any) -> None:
        self.out.append(Ended(seq.id, "length", seq.adapter_id))
        real(self, seq)

    patch.setattr(State, "settle", settle)


def held_image_dropped(patch: Patch) -> None:
    real = Registry.trim

    def trim(self: Registry) -> list[int]:
        holders, self._holders = self._holders, {}
        try:
            return real(self)
        finally:
            self._holders = holders

    patch.setattr(Registry, "trim", trim)


def rotation_moves_waiting_requests(patch: Patch) -> None:
    real = commands._rotate

    def rotate(state: State, command: int, name: str | None) -> None:
        old = state.default
        real(state, command, name)
        for seq in list(state.seqs.values()):
            if not seq.leased and seq.adapter == old:
                state.lanes.remove(seq)
                seq.adapter = name
                state.lanes.add(seq)

    patch.setattr(commands, "_rotate", rotate)


def drains_nothing(patch: Patch) -> None:
    patch.setattr(SlotTable, "drain_victim", lambda self, *args: None)


def drains_late(patch: Patch) -> None:
    real = placement._due
    patch.setattr(
        placement,
        "_due",
        lambda state, job: real(state, job) and state.now >= job.since + 2.0,
    )


def draining_slots_are_leased(patch: Patch) -> None:
    patch.setitem(tables.SLOT_TABLE, (SlotState.DRAINING, SlotEvent.LEASE), SlotState.DRAINING)
    patch.setattr(adapters, "serves", lambda state, version: version.slot >= 0)


def hints_forgotten(patch: Patch) -> None:
    patch.setattr("rota.sched.core.retry._hint", lambda seconds: None)


def resizes_under_leases(patch: Patch) -> None:
    real = resize.settle

    def settle(state: State) -> None:
        resizing = state.resize
        ready = resizing is not None and resizing.state is resize.ResizeState.DRAINING
        if ready and state.seqs and not (state.steps or state.stages or state.commits):
            assert resizing is not None
            resize._exchange(state, resizing)
            return
        real(state)

    patch.setattr("rota.sched.core.core.resize.settle", settle)


def resize_keeps_old_images(patch: Patch) -> None:
    patch.setattr(resize, "_forget_images", lambda state: None)


def commits_what_failed_to_stage(patch: Patch) -> None:
    def stage_failed(state: State, event: ev.StageFailed) -> None:
        adapters.stage_done(state, ev.StageDone(event.stage, event.stage, "unverified", 10))

    patch.setattr("rota.sched.core.core.adapters.stage_failed", stage_failed)


def old_version_stays_open(patch: Patch) -> None:
    real = adapters.leasable

    def supersede(state: State, old: Any) -> None:
        return None

    def leasable(state: State, name: str) -> bool:
        entry = state.names.names[name]
        older = next(
            (s.version for s in state.slots.slots if s.version and s.version.name == name), None
        )
        if older is not None and older is not entry.current:
            entry.current = older
        return real(state, name)

    patch.setattr(adapters, "_supersede", supersede)
    patch.setattr(adapters, "leasable", leasable)


def blocks_lost_on_preemption(patch: Patch) -> None:
    real = planning._preempt

    def preempt(state: State, seq: Any) -> None:
        seq.blocks.clear()
        real(state, seq)

    patch.setattr(planning, "_preempt", preempt)


def lease_freed_under_the_step(patch: Patch) -> None:
    real = State.end

    def end(self: State, seq: Any, reason: str, failure: Any = None) -> None:
        real(self, seq, reason, failure)
        self.give_lease_back(seq)

    patch.setattr(State, "end", end)


def resumes_in_the_middle(patch: Patch) -> None:
    give_back, admit = KvMemory.give_back, KvMemory.admit
    left: dict[int, int] = {}

    def remember(self: KvMemory, seq: Any) -> None:
        left[seq.id] = seq.computed
        give_back(self, seq)

    def go_on(self: KvMemory, seq: Any, found: Any) -> None:
        admit(self, seq, found)
        seq.computed = max(seq.computed, left.get(seq.id, 0))

    patch.setattr(KvMemory, "give_back", remember)
    patch.setattr(KvMemory, "admit", go_on)


def wakes_in_the_past(patch: Patch) -> None:
    patch.setattr(Core, "next_wake", lambda self: 0.0)


def lanes_take_no_turns(patch: Patch) -> None:
    patch.setattr(Lanes, "took_turn", lambda self, lane: None)


def unload_forgets_who_waits(patch: Patch) -> None:
    patch.setattr(Lanes, "of_adapter", lambda self, name: [])


def sources_are_kept(patch: Patch) -> None:
    real = Registry.release_source

    def release_source(self: Registry, source: int) -> list[int]:
        real(self, source)
        return []

    patch.setattr(Registry, "release_source", release_source)


def commands_answered_twice(patch: Patch) -> None:
    real = State.reply

    def reply(self: State, waiting: list[int], answer: Any) -> None:
        first = list(waiting[:1])
        real(self, waiting, answer)
        if first:
            self.commands[first[0]] = -1
            real(self, first, answer)

    patch.setattr(State, "reply", reply)


MUTATIONS: list[Callable[[Patch], None]] = [
    one_release_frees_all,
    busy_slots_are_victims,
    identity_by_name_only,
    lost_unpark,
    victim_not_reserved,
    lease_dropped_on_preemption,
    retire_forgotten,
    two_terminal_events,
    held_image_dropped,
    rotation_moves_waiting_requests,
    drains_nothing,
    drains_late,
    draining_slots_are_leased,
    hints_forgotten,
    resizes_under_leases,
    resize_keeps_old_images,
    commits_what_failed_to_stage,
    old_version_stays_open,
    blocks_lost_on_preemption,
    lease_freed_under_the_step,
    resumes_in_the_middle,
    wakes_in_the_past,
    lanes_take_no_turns,
    unload_forgets_who_waits,
    sources_are_kept,
    commands_answered_twice,
]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda m: m.__name__)
def test_a_broken_core_is_caught(mutate: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutate(monkeypatch)
    must_be_caught(mutate.__name__, monkeypatch)


def test_the_report_names_the_law_the_command_and_few_actions(monkeypatch: Patch) -> None:
    from rota.sched.sim.run import run_seeds
    from rota.sched.sim.scenario import scenario_of

    monkeypatch.setattr(Core, "check", lambda self: None)
    retire_forgotten(monkeypatch)
    # In worlds with an arena its law is broken first.
    plain = [seed for seed in range(20) if not scenario_of(seed).config.arena_bytes]
    failed, _ = run_seeds(plain)
    text, seed = report(failed[0]), failed[0].scenario.seed
    assert "law broken: retire" in text
    assert f"python -m rota.sched.sim.run --seed {seed} --minimise" in text
    actions = [line for line in text.splitlines() if line.startswith("  {")]
    assert 1 <= len(actions) <= 8, text
