"""Programmatic dependent launch: a kernel that may begin before the one ahead of it has ended.

What it owns: for each stream, and for each member of a capture, what the last kernel stored. The
model runs kernels one after the other all the same; what it judges is whether the result could
depend on that.

Judged, for a kernel launched so: before it waits (``griddepcontrol.wait``, each thread for itself)
it may read nothing that the kernel ahead stores, and store nothing at all, for that kernel may
still read it; it never reads what that kernel stores through the read-only path, which wants memory
that does not change while a kernel runs; and some thread of it waits, or it could end first and
what follows overtake the kernel ahead. Between two kernels that are not neighbours, and after
anything but a kernel, nothing overlaps.

Source: PTX ISA 9.0, griddepcontrol; "Programmatic Dependent Launch and Synchronization" of the
CUDA programming guide.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .arena import AccessError

Addresses = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Store:
    """One store instruction: the address and the block of each lane, bytes a lane."""

    addresses: Addresses
    blocks: npt.NDArray[np.int64]
    nbytes: int


class Trail:
    """What the last kernel of one stream stored; empty when it has surely ended."""

    def __init__(self) -> None:
        self._stores: list[Store] = []
        self._ranges: tuple[Addresses, Addresses] | None = None

    def clear(self) -> None:
        """All work so far has ended before what comes next begins."""
        self._stores, self._ranges = [], None

    def follow(self, stores: list[Store], early: bool) -> None:
        """A kernel has run. One that began ``early`` may itself be followed while the kernel before
        it still runs: what that one stored stays."""
        self._stores = [*(self._stores if early else ()), *stores]
        self._ranges = None

    def touched(self, addresses: Addresses, nbytes: int) -> npt.NDArray[np.bool_]:
        """Which of the ranges ``addresses .. + nbytes`` meet a stored byte."""
        if self._ranges is None:
            self._ranges = _merged(self._stores)
        starts, ends = self._ranges
        if not len(starts):
            return np.zeros(len(addresses), bool)
        at = np.searchsorted(starts, addresses + np.uint64(nbytes)).astype(np.int64) - 1
        met: npt.NDArray[np.bool_] = (at >= 0) & (ends[np.maximum(at, 0)] > addresses)
        return met


def _merged(stores: list[Store]) -> tuple[Addresses, Addresses]:
    """Disjoint ranges in order that hold every stored byte."""
    if not stores:
        none = np.zeros(0, np.uint64)
        return none, none
    starts = np.concatenate([store.addresses for store in stores])
    sizes = [np.full(len(store.addresses), store.nbytes, np.uint64) for store in stores]
    order = np.argsort(starts, kind="stable")
    starts = starts[order]
    ends = np.maximum.accumulate(starts + np.concatenate(sizes)[order])
    first = np.concatenate([[True], starts[1:] > ends[:-1]])
    last = np.concatenate([first[1:], [True]])
    return starts[first], ends[last]


@dataclass
class Early:
    """One batch of blocks of a kernel that began early: which lanes have waited."""

    ahead: Trail
    lanes: int
    waited: npt.NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        self.waited = np.zeros(self.lanes, bool)

    def judge(
        self,
        ids: npt.NDArray[np.int64],
        addresses: Addresses,
        nbytes: int,
        *,
        storing: bool,
        read_only: bool,
        what: str,
    ) -> None:
        """Raise `AccessError` for a global access whose result is nobody's."""
        waiting = ~self.waited[ids]
        if storing:
            if waiting.any():
                raise AccessError(
                    f"{what}: race: stores before griddepcontrol.wait, while the kernel before may "
                    "still read"
                )
            return
        if not read_only and not waiting.any():
            return
        met = np.broadcast_to(self.ahead.touched(np.atleast_1d(addresses), nbytes), len(ids))
        if read_only and met.any():
            raise AccessError(
                f"{what}: race: the read-only path to memory that the kernel before stores to"
            )
        if (met & waiting).any():
            raise AccessError(
                f"{what}: race: reads what the kernel before stores, before griddepcontrol.wait"
            )
