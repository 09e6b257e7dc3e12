"""Samples of one prompt: one leads, the others follow once the prompt is in the prefix cache.

What the leader's lease is, the followers' are too, each its own; so all samples run on one version.
Owned by the leader's ``followers``. Invariant: a sequence is FOLLOWING if and only if it is in the
list of a leader that waits or is prefilled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .sequences import Sequence
from .tables import SeqEvent

if TYPE_CHECKING:
    from .state import State


def join(state: State, seqs: list[Sequence]) -> None:
    """New sequences of one prompt: the first waits for admission, the others for the first."""
    leader, *others = seqs
    state.lanes.add(leader)
    for seq in others:
        seq.move(SeqEvent.FOLLOW, state.log)
        _follow(state, leader, seq)


def _follow(state: State, leader: Sequence, seq: Sequence) -> None:
    seq.leader = leader
    leader.followers.append(seq)
    state.following += 1


def leave(state: State, seq: Sequence) -> None:
    """``seq`` follows no more."""
    assert seq.leader is not None
    seq.leader.followers.remove(seq)
    seq.leader = None
    state.following -= 1


def lead_on(state: State, leader: Sequence) -> None:
    """The prompt is computed: who followed waits for a place in the next steps. They hold leases,
    so they go first, in their order."""
    for seq in reversed(list(leader.followers)):
        leave(state, seq)
        seq.move(SeqEvent.LED, state.log)
        state.lanes.add(seq, front=True)


def leader_ended(state: State, leader: Sequence) -> None:
    """The leader left before the prompt was computed: the first who followed it leads now."""
    first, *others = list(leader.followers)
    for seq in (first, *others):
        leave(state, seq)
    first.move(SeqEvent.LED, state.log)
    state.lanes.add(first, front=first.leased)
    for seq in others:
        _follow(state, first, seq)
