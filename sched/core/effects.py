"""What the core wants done: every output, as frozen data. The shell carries them out in order.

``RunStep``, ``Spill``, ``Restore``, ``Commit``, ``Retire``, ``CloseSequence`` and ``DropState`` go
to the device thread's one queue in the order given: a commit between two steps is the barrier.
"""

from __future__ import annotations

import msgspec

from .events import Failure


def fed(index: int) -> int:
    """Stands for the token that row ``index`` of the step before samples (its own inverse)."""
    return ~index


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One row of a step: feed ``tokens`` at positions ``start..`` of ``seq``; ``slot`` -1 = base.
    ``blocks`` is the sequence's block table (only grows while the sequence runs); ``sample`` is
    false for a prefill chunk that is not the last. ``adapter_id`` is what the slot must hold.
    ``load``: the snapshot its recurrent state is first copied from, ``save``: the one it is copied
    to at the end; -1 for none.

    A row's one token may be ``fed(i)``, a negative number: what row ``i`` of the step before, of
    the same sequence, sampled. It is planned while that step is still in flight."""

    seq: int
    slot: int
    adapter_id: int
    start: int
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    sample: bool
    load: int = -1
    save: int = -1


class RunStep(msgspec.Struct, frozen=True, tag=True, array_like=True):
    step: int
    rows: tuple[Row, ...]


class OpenSequence(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """First admission of a sequence: the runner makes its sampler state."""

    seq: int


class CloseSequence(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The sequence has left the device for good: free its sampler state and its host copy."""

    seq: int


class Spill(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Copy ``blocks``, in order, to host memory kept for ``seq``, and its recurrent state, which is
    given up whether that succeeds or not. Both may be written by any job queued after this one."""

    seq: int
    blocks: tuple[int, ...]


class Restore(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Copy the ``i``-th spilled block of ``seq`` into ``block``, for each ``(i, block)``, and its
    recurrent state into a place, and free the host's copy."""

    seq: int
    places: tuple[tuple[int, int], ...]


class DropState(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A preempted sequence of a model with recurrent state will start again, from position 0 or a
    snapshot: free its state, keep its sampler."""

    seq: int


class Token(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Deliver ``token``, the ``index``-th new token, sampled by row ``row`` of step ``step``."""

    seq: int
    token: int
    index: int
    adapter_id: int
    step: int
    row: int


class Ended(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The one terminal effect of a sequence. ``reason``: ``stop``, ``length``, ``cancelled``,
    ``deadline`` or ``error`` (then ``failure`` says what)."""

    seq: int
    reason: str
    adapter_id: int
    failure: Failure | None = None


class StartStage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    stage: int
    name: str
    source: int


class CancelStage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Nobody wants the image; StageDone or StageFailed still comes, once."""

    stage: int


class Commit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Write an image into its slot, and its annex to ``extent``, an offset in the arena (``None``:
    it has no annex)."""

    commit: int
    slot: int
    image: int
    name: str
    adapter_id: int
    extent: int | None = None


class Retire(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Clear the slot's table cells (its last lease has ended)."""

    slot: int


class Resident(msgspec.Struct, frozen=True, array_like=True):
    """An adapter in a slot."""

    slot: int
    name: str
    pinned: bool


class Relayout(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Exchange the pool: nothing is in flight and nothing is leased. RelayoutDone or
    RelayoutFailed comes, once. The device refuses if the annexes of ``residents`` have no place in
    the new arena: of each of them, and of all that are pinned together."""

    max_loras: int
    max_rank: int
    residents: tuple[Resident, ...] = ()


class DropImage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Forget a host slot image."""

    image: int


class DropSource(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """No name needs this source any more."""

    source: int


class Reply(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The one answer to a command. ``outcome``: ``done`` and friends; ``image`` names the staged
    image whose report belongs to the answer (or -1)."""

    command: int
    outcome: str
    name: str | None = None
    slot: int = -1
    generation: int = 0
    adapter_id: int = 0
    evicted: str | None = None
    image: int = -1
    failure: Failure | None = None


class Closed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Nothing runs, nothing is leased, nothing is staged: the shell may stop."""


Effect = (
    RunStep
    | OpenSequence
    | CloseSequence
    | Spill
    | Restore
    | DropState
    | Token
    | Ended
    | StartStage
    | CancelStage
    | Commit
    | Retire
    | Relayout
    | DropImage
    | DropSource
    | Reply
    | Closed
)
