"""Preemption by spill: a sequence's KV blocks are copied to host memory and brought back later.

The device takes its jobs in order, so a victim's blocks are free as soon as the copy is queued: a
step that writes them comes after it. What comes back is used only when the device has said that it
is there. A copy that fails costs a recompute, never an answer. The lease is kept throughout.
"""

from __future__ import annotations

from .effects import Restore, Spill
from .events import RestoreDone, RestoreFailed, SpillDone, SpillFailed
from .prefix import Node
from .sequences import Sequence
from .state import State
from .tables import SeqEvent, SeqState


def is_cheaper(state: State, seq: Sequence) -> bool:
    """Whether copying ``seq`` out and back costs less than recomputing it, and there is room.

    In tokens of recompute: a copy costs ``spill_fixed_cost`` and ``spill_block_cost`` a block;
    what other sequences hold in the prefix cache would not be recomputed either way.
    """
    memory, config = state.memory, state.config
    count = memory.host_cost(seq.computed)
    if not count or count > memory.host_free or seq.resume is not None:
        return False  # with a state not yet loaded there is nothing of its own to copy
    shared = [node for node in seq.nodes if len(node.leases) > 1]
    kept = (memory.resumable(shared) if memory.recurrent else len(shared)) * memory.size
    return seq.computed - kept > config.spill_fixed_cost + count * config.spill_block_cost


def begin(state: State, seq: Sequence) -> None:
    """Copy out what ``seq`` has computed; its blocks are free for the steps that come after."""
    seq.move(SeqEvent.SPILL, state.log)
    seq.in_flight = 1
    count = state.memory.hold_host(seq)
    state.counters.spilled += 1
    state.out.append(Spill(seq.id, tuple(seq.blocks[:count])))
    state.memory.give_back(seq)


def spill_done(state: State, event: SpillDone) -> None:
    seq = _landed(state, event.seq)
    if seq is not None:
        seq.move(SeqEvent.SPILLED, state.log)
        _wait(state, seq)


def spill_failed(state: State, event: SpillFailed) -> None:
    seq = _landed(state, event.seq)
    if seq is not None:
        seq.move(SeqEvent.COPY_FAILED, state.log)
        state.memory.forget_host(seq)
        _wait(state, seq)


def restore(state: State, seq: Sequence, found: list[Node]) -> None:
    """Bring ``seq`` back, behind what the prefix cache still has of it."""
    seq.move(SeqEvent.RESTORE, state.log)
    seq.in_flight = 1
    state.running[seq.id] = seq
    memory = state.memory
    memory.admit(seq, found)
    memory.grow(seq, seq.host_tokens)
    count = memory.need(seq.host_tokens)
    places = tuple((index, seq.blocks[index]) for index in range(len(found), count))
    state.out.append(Restore(seq.id, places))


def restore_done(state: State, event: RestoreDone) -> None:
    seq = _landed(state, event.seq)
    if seq is not None:
        seq.computed = max(seq.computed, seq.host_tokens)
        state.memory.forget_host(seq)
        seq.move(SeqEvent.RESTORED, state.log)


def restore_failed(state: State, event: RestoreFailed) -> None:
    seq = _landed(state, event.seq)
    if seq is not None:
        state.memory.forget_host(seq)
        state.memory.give_back(seq)
        seq.move(SeqEvent.COPY_FAILED, state.log)
        _wait(state, seq)


def _landed(state: State, ident: int) -> Sequence | None:
    """The sequence whose copy is over, if it is still wanted."""
    seq = state.seqs[ident]
    seq.in_flight = 0
    if seq.state is SeqState.CLOSING:
        state.settle(seq)
        return None
    return seq


def _wait(state: State, seq: Sequence) -> None:
    del state.running[seq.id]
    state.lanes.add(seq, front=True)
