"""Ranges of a device's memory: what every heap counts, looks up and refuses alike.

What it owns: the byte count against the limit, the sorted table of ranges, and a bounded memory of
freed ones. Where the memory comes from is the heap's.

Invariants: the table is an immutable snapshot replaced as a whole under the lock, so look-ups take
no lock; `used` is the sum of the rounded sizes of the live ranges.
"""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_right
from collections import OrderedDict
from typing import Final, Generic, Literal, TypeVar

from ..errors import DeviceError
from .device import ALIGNMENT

Kind = Literal["device", "pinned"]
REMEMBERED_FREES: Final = 1024
"""Freed ranges that a heap can still name in an error."""


class Range:
    """One allocation. ``live`` until it is freed."""

    __slots__ = ("end", "kind", "label", "live", "nbytes", "serial", "start")

    def __init__(self, start: int, nbytes: int, kind: Kind, label: str, serial: int) -> None:
        self.start = start
        self.end = start + nbytes
        self.nbytes = nbytes
        self.kind: Kind = kind
        self.label = label
        self.serial = serial
        self.live = True


RangeT = TypeVar("RangeT", bound=Range)


def rounded(nbytes: int) -> int:
    """Bytes an allocation takes of the limit."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Ranges(Generic[RangeT]):
    """The ranges of one device.

    Args:
        limit: bytes they may take together.

    Attributes:
        used: bytes they take.
        frees: counts frees, so that a graph validated before the last one is known to be stale.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.frees = 0
        self._lock = threading.Lock()
        self._serials = itertools.count()
        self._live: OrderedDict[int, RangeT] = OrderedDict()
        self._recent: OrderedDict[int, RangeT] = OrderedDict()
        self._table: tuple[list[int], list[RangeT]] = ([], [])

    def reserve(self, nbytes: int, kind: Kind, label: str) -> None:
        """Count an allocation against the limit. Codes: bad-argument, out-of-memory."""
        if nbytes <= 0 or not label:
            raise DeviceError(
                "an allocation needs a label and at least one byte",
                code="bad-argument",
                subject=label,
                expected="> 0",
                found=nbytes,
            )
        with self._lock:
            if self.used + rounded(nbytes) > self.limit:
                raise DeviceError(
                    f"out of {kind} memory",
                    code="out-of-memory",
                    subject=label,
                    expected=f"at most {self.limit - self.used} bytes",
                    found=nbytes,
                )
            self.used += rounded(nbytes)

    def unreserve(self, nbytes: int) -> None:
        """Take back `reserve` for an allocation that was refused."""
        with self._lock:
            self.used -= rounded(nbytes)

    def labels(self) -> tuple[str, ...]:
        """Labels of the live ranges, oldest first."""
        with self._lock:
            return tuple(found.label for found in self._live.values())

    # Under the lock

    def _insert(self, place: int, made: RangeT) -> None:
        """Enter a range that begins the table's entry ``place``."""
        self._live[made.start] = made
        self._recent.pop(made.start, None)
        starts, ranges = self._table
        at = bisect_right(starts, place)
        self._table = ([*starts[:at], place, *starts[at:]], [*ranges[:at], made, *ranges[at:]])

    def _take_out(self, place: int, gone: RangeT) -> None:
        """Remember a range by name alone."""
        starts, ranges = self._table
        at = bisect_right(starts, place) - 1
        self._table = (starts[:at] + starts[at + 1 :], ranges[:at] + ranges[at + 1 :])
        self._recent[gone.start] = gone
        if len(self._recent) > REMEMBERED_FREES:
            self._recent.popitem(last=False)

    # Refusals

    def _recently(self, addr: int) -> RangeT | None:
        """The remembered freed range that held this address."""
        for gone in reversed(self._recent.values()):
            if gone.start <= addr < gone.end:
                return gone
        return None


def not_a_start(addr: int, kind: Kind, freed: Range | None, inside: Range | None) -> DeviceError:
    """The refusal to free what no allocation of this kind begins with. ``freed``: a freed one that
    did; ``inside``: the one around it."""
    if freed is not None and freed.start == addr and freed.kind == kind:
        return DeviceError("freed twice", code="double-free", subject=freed.label)
    return DeviceError(
        f"{addr:#x} is not the start of a live {kind} allocation",
        code="bad-address",
        subject=inside.label if inside is not None else None,
    )


def unusable(
    addr: int, nbytes: int, kind: Kind | None, near: Range | None, freed: Range | None
) -> DeviceError:
    """The refusal of ``addr..addr+nbytes``. ``near``: the live range around it, or just before;
    ``freed``: a freed one that held it; it is told of only where there is no ``near``."""
    if nbytes < 0:
        return DeviceError("a negative size", code="bad-argument", found=nbytes)
    if near is None:
        if freed is None:
            return DeviceError(f"{addr:#x} is in no allocation", code="bad-address")
        return DeviceError("used after free", code="use-after-free", subject=freed.label)
    if kind is not None and near.kind != kind:
        return DeviceError(
            f"{addr:#x} is {near.kind} memory",
            code="bad-address",
            subject=near.label,
            expected=kind,
            found=near.kind,
        )
    return DeviceError(
        "a range leaves its allocation",
        code="out-of-bounds",
        subject=near.label,
        expected=f"inside {near.nbytes} bytes",
        found=f"{nbytes} bytes at offset {addr - near.start}",
    )
