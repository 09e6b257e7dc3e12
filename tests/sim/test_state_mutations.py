"""Broken recurrent states: cores that copy, keep or free them wrongly, each caught by the seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from rota.sched.core import effects as fx
from rota.sched.core import planning
from rota.sched.core.core import Core
from rota.sched.core.memory import KvMemory
from rota.sched.core.prefix import Node
from rota.sched.core.recurrent import Snapshots
from rota.sched.sim.scenario import scenario_of

from .broken import must_be_caught

Patch = pytest.MonkeyPatch
KEEP, TAKE = KvMemory.keep, Snapshots.take
#: Those of models with recurrent states.
SEEDS = [seed for seed in range(600) if scenario_of(seed).config.recurrent]


def states_kept_on_preemption(patch: Patch) -> None:
    handle = Core.handle

    def drops_nothing(self: Core, event: Any, now: float) -> list[fx.Effect]:
        return [e for e in handle(self, event, now) if not isinstance(e, fx.DropState)]

    patch.setattr(Core, "handle", drops_nothing)


def snapshot_taken_one_chunk_late(patch: Patch) -> None:
    """What a row should save, the sequence's next row does."""
    real = planning._row
    late: dict[int, int] = {}

    def row(state: Any, seq: Any, end: int) -> fx.Row:
        made = real(state, seq, end)
        save = late.pop(seq.id, -1)
        if made.save >= 0:
            late[seq.id] = made.save
        if save < 0:
            save = made.save
        elif made.save < 0:
            state.memory.snapshots.keep(seq.nodes[-1], save)
        return msgspec.structs.replace(made, save=save)

    def keep(self: KvMemory, seq: Any, row: fx.Row) -> None:
        if row.save >= 0 and seq.id not in late:
            KEEP(self, seq, row)

    patch.setattr(planning, "_row", row)
    patch.setattr(KvMemory, "keep", keep)


def snapshot_behind_another_block(patch: Patch) -> None:
    real = Snapshots.keep
    patch.setattr(
        Snapshots,
        "keep",
        lambda self, node, s: real(self, node.parent if node.parent.parent else node, s),
    )


def snapshot_not_loaded_on_resume(patch: Patch) -> None:
    real = KvMemory.copies
    patch.setattr(KvMemory, "copies", lambda self, *a: (-1, real(self, *a)[1]))


def snapshot_freed_while_a_row_will_load_it(patch: Patch) -> None:
    patch.setattr(Snapshots, "hold", lambda self, node, seq: None)
    patch.setattr(Snapshots, "release", lambda self, node, seq: None)


def snapshot_named_by_a_step_in_flight_is_free(patch: Patch) -> None:
    def take(self: Snapshots, prompt: int, end: int) -> int:
        snapshot = TAKE(self, prompt, end)
        if snapshot >= 0:
            self._free.insert(0, snapshot)
            self._free = list(dict.fromkeys(self._free))
        return snapshot

    def give_back(self: Snapshots, snapshot: int) -> None:
        self._writing.discard(snapshot)

    patch.setattr(Snapshots, "take", take)
    patch.setattr(Snapshots, "give_back", give_back)
    patch.setattr(Snapshots, "_written", lambda self, snapshot: self._writing.discard(snapshot))


def begins_behind_blocks_without_a_snapshot(patch: Patch) -> None:
    patch.setattr(KvMemory, "_usable", lambda self, seq, found: len(found))


def chunks_not_cut_at_boundaries(patch: Patch) -> None:
    """And the snapshot is taken wherever the chunk ends."""
    take = Snapshots.take
    patch.setattr(Snapshots, "cut", lambda self, prompt, start, end: end)
    patch.setattr(Snapshots, "take", lambda self, prompt, end: take(self, prompt, end // 16 * 16))


def restored_behind_more_blocks_than_its_state(patch: Patch) -> None:
    real = KvMemory._usable

    def usable(self: KvMemory, seq: Any, found: list[Node]) -> int:
        return len(found) if seq.host_tokens else real(self, seq, found)

    patch.setattr(KvMemory, "_usable", usable)


def host_memory_of_states_not_counted(patch: Patch) -> None:
    patch.setattr(KvMemory, "host_cost", lambda self, tokens: self.need(tokens))


MUTATIONS: list[Callable[[Patch], None]] = [
    states_kept_on_preemption,
    snapshot_taken_one_chunk_late,
    snapshot_behind_another_block,
    snapshot_not_loaded_on_resume,
    snapshot_freed_while_a_row_will_load_it,
    snapshot_named_by_a_step_in_flight_is_free,
    begins_behind_blocks_without_a_snapshot,
    chunks_not_cut_at_boundaries,
    restored_behind_more_blocks_than_its_state,
    host_memory_of_states_not_counted,
]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda m: m.__name__)
def test_a_broken_state_is_caught(mutate: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutate(monkeypatch)
    must_be_caught(mutate.__name__, monkeypatch, SEEDS)
