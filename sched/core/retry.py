"""When to come back: the ``retry_after_s`` of refusals that pass, from real progress.

With *gap* = mean seconds between the last 32 sequences that ended (commands answered), the wait
since the last one included, and *lease left* of a sequence = (tokens it may still make + steps of
its prompt still to run) x recent step time:

    requests QUEUE_FULL   gap, or before any has ended: the shortest lease left of what runs
    commands QUEUE_FULL   gap of answered commands
    POOL_FULL             the slot that is idle first: min over slots of their longest lease left
    failure back-off      what is left of it

Where nothing is known yet it is 1 s; always within 0.05 s and 60 s, except a back-off, which is
exact. A pinned pool opens only when somebody unpins: its hint is when that could help at once.
"""

from __future__ import annotations

from typing import Final

import msgspec

from .events import Failure
from .progress import mean_gap
from .registry import Name
from .sequences import Sequence
from .state import State

UNKNOWN_S: Final = 1.0
SHORTEST_S: Final = 0.05
LONGEST_S: Final = 60.0


def _hint(seconds: float | None) -> float:
    return UNKNOWN_S if seconds is None else min(LONGEST_S, max(SHORTEST_S, seconds))


def lease_left(state: State, seq: Sequence) -> float | None:
    """Seconds ``seq`` may still hold its lease; ``None`` before the first step was timed."""
    step_s = state.progress.step_s
    if step_s is None:
        return None
    known = len(seq.tokens)
    chunks = -(-(known - seq.computed) // state.config.max_step_tokens)
    return (seq.max_len - known + max(0, chunks - 1)) * step_s


def queue_full(state: State) -> float:
    """Until a place in the queue is free."""
    gap = mean_gap(state.progress.ended, state.now)
    if gap is None:
        lefts = [lease_left(state, s) for s in state.running.values()]
        gap = min((left for left in lefts if left is not None), default=None)
    return _hint(gap)


def commands_full(state: State) -> float:
    """Until one more command may wait."""
    return _hint(mean_gap(state.progress.answered, state.now))


def pool_full(state: State) -> float:
    """Until some slot is idle."""
    ends: list[float] = []
    for slot in state.slots.slots:
        lefts = [lease_left(state, state.seqs[ident]) for ident in slot.leases]
        known = [left for left in lefts if left is not None]
        if len(known) == len(lefts):
            ends.append(max(known, default=UNKNOWN_S))
    return _hint(min(ends, default=None))


def backing_off(state: State, entry: Name) -> Failure | None:
    """Why ``entry`` failed and when it is tried again, while its back-off lasts."""
    if entry.failed is None:
        return None
    left = entry.failed_until - state.now
    if left <= 0:
        entry.failed = None
        return None
    return msgspec.structs.replace(entry.failed, retry_after_s=left)
