"""Recurrent states of the gated delta net layers: one fixed arena, a place per running sequence.

What it owns: two device allocations (convolution inputs and recurrent states of every linear layer)
and who holds which place; behind the places of sequences lie those of snapshots, which the core
names. Invariants: the arena never grows or moves; a sequence's state has seen exactly the positions
0..n-1, so the next row starts at n, at 0 with a state of zeros, or where a snapshot was taken with
a copy of it; nothing is changed unless every row of a step was found right; a step that failed
leaves its sequences without a state, and the snapshots it was to write empty. Where torch's work is
queued, "seen" means: in the order of the stream.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from ...errors import DeviceError, InternalError
from ..device import Device
from ..kernels.gdn import GdnShape, StateRows
from ..kernels.rope import BLOCK_TOKENS
from ..tensors import HostSpace, TensorSpace
from .config import ModelConfig
from .rows import RowLike

MAX_PLACES: Final = 1 << 14


def state_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one sequence's states in all layers; 0 in families without."""
    if config.gdn is None:
        return 0
    each = _conv_elements(config.gdn) * dtype.itemsize + 4 * config.gdn.state_floats
    return len(config.linear_layers) * each


def snapshots_within(device: Device, config: ModelConfig, dtype: torch.dtype, wanted: int) -> int:
    """``wanted`` snapshots, or as many as an eighth of the device's free memory holds."""
    free, _ = device.memory_info()
    return min(wanted, free // 8 // state_bytes(config, dtype))


def _conv_elements(gdn: GdnShape) -> int:
    return (gdn.conv - 1) * gdn.channels


@dataclass(frozen=True, slots=True, eq=False)
class StateCopy:
    """One sequence's states in host memory: ``parts`` is conv ``[layers, conv - 1, channels]``
    and memory ``[layers, value_heads, key_dim, value_dim]``, after ``position`` tokens."""

    position: int
    parts: tuple[torch.Tensor, ...]


class StateArena:
    """States of up to ``places`` sequences, and ``snapshots`` of them.

    Args:
        device: the memory is given back in `close`.
        places: the most sequences of a step.
        space: of the device; ``None``: the host's. Make the arena, and call whatever copies, inside
            its ``computing``.
        spare: places more that no sequence gets, for what padding rows write.
        snapshots: the most copies kept; rows name them by 0..snapshots-1.

    Attributes:
        conv: per linear layer, ascending: ``[all places, conv - 1, channels]`` of ``dtype``, where
            the spare ones and the snapshots lie behind those of sequences.
        memory: the same: float32 ``[all places, value_heads, key_dim, value_dim]``.
        rows: the states of the step in hand, as `begin` left them.
        spare_place: the first spare one.

    Raises:
        DeviceError: not-host-addressable; states-too-large, when they do not fit in the free
            memory; what `Device.alloc` raises.
    """

    def __init__(
        self,
        device: Device,
        config: ModelConfig,
        dtype: torch.dtype,
        places: int,
        *,
        space: TensorSpace | None = None,
        spare: int = 0,
        snapshots: int = 0,
    ) -> None:
        gdn = config.gdn
        if gdn is None or not 1 <= places <= MAX_PLACES or not 0 <= snapshots <= MAX_PLACES:
            raise DeviceError("not a state arena", code="bad-argument", subject="places")
        space = HostSpace(device) if space is None else space
        layers = len(config.linear_layers)
        total = places + spare + snapshots
        held = (layers, total, gdn.conv - 1, gdn.channels)
        shape = (layers, total, gdn.value_heads, gdn.key_dim, gdn.value_dim)
        self.nbytes = total * state_bytes(config, dtype)
        free, _ = device.memory_info()
        if self.nbytes > free:
            raise DeviceError(
                "the recurrent states do not fit; lower the number of running sequences",
                code="states-too-large",
                subject=f"{total} states of {state_bytes(config, dtype)} bytes",
                expected=f"at most {free} bytes",
                found=self.nbytes,
            )
        self._device = device
        self._addresses: list[int] = []
        self._whole: tuple[torch.Tensor, ...] = ()
        try:
            conv = self._take(space, held, dtype, "conv states")
            memory = self._take(space, shape, torch.float32, "recurrent states")
        except BaseException:
            self.close()
            raise
        self.conv, self.memory = list(conv), list(memory)
        self._whole = (conv, memory)
        for whole in self._whole:
            whole[:, places:].zero_()
        self.spare_place, self.snapshots = places, snapshots
        self._first_snapshot = places + spare
        self._free = list(range(places - 1, -1, -1))
        self._places: dict[int, int] = {}
        # Positions a sequence's state has seen.
        self._seen: dict[int, int] = {}
        # The same of each snapshot that has been written.
        self._kept: dict[int, int] = {}
        # numpy's, since torch's work may only be queued here.
        self._columns = np.zeros((3, places), np.int32)
        first, counts, where = (torch.from_numpy(column) for column in self._columns)
        self._all_rows = StateRows(first, counts, where, places)
        self.rows = replace(self._all_rows, rows=0)

    def _take(
        self, space: TensorSpace, shape: tuple[int, ...], dtype: torch.dtype, label: str
    ) -> torch.Tensor:
        address = self._device.alloc(math.prod(shape) * dtype.itemsize, label=label)
        self._addresses.append(address)
        return space.view(address, shape, dtype)

    def begin(self, rows: Sequence[RowLike]) -> None:
        """Give every row its state for one step: its own, a snapshot's, or zeros where the row
        starts at position 0.

        Raises:
            InternalError: state-position (a row does not go on where its state is); bad-snapshot
                (one that is not there, or is written by one row and named by another);
                no-state-place (more sequences at once than places). Nothing was changed.
        """
        fresh = 0
        named: set[int] = set()
        for row in rows:
            fresh += row.seq not in self._places
            self._check_start(row)
            if row.save >= 0 or row.load >= 0:
                self._check_snapshots(row, named)
        if named and any(row.load in named for row in rows):
            raise self._bad_snapshot("a snapshot is read and written in one step", None, named)
        if fresh > len(self._free):
            raise InternalError(
                "more sequences hold a state than there are places",
                code="no-state-place",
                expected=f"at most {self._columns.shape[1]}",
                found=len(self._places) + fresh,
            )
        first = 0
        columns = []
        for row in rows:
            count = len(row.tokens)
            place = self._places.get(row.seq)
            if place is None:
                place = self._places[row.seq] = self._free.pop()
            if row.load >= 0:
                self._copy(self._place_of(row.load), place)
            elif row.start == 0:
                for whole in self._whole:
                    whole[:, place].zero_()
            self._kept.pop(row.save, None)
            # Until the step is over: `done` says where it got to.
            self._seen.pop(row.seq, None)
            columns.append((first, count, place))
            first += count
        self._columns[:, : len(rows)] = np.array(columns, np.int32).T
        self.rows = replace(self._all_rows, rows=len(rows))

    @property
    def held(self) -> npt.NDArray[np.int32]:
        """int32 ``[rows]``: the places of the step in hand."""
        return self._columns[2, : self.rows.rows]

    def _check_start(self, row: RowLike) -> None:
        seen = self._seen.get(row.seq)
        right = (seen, 0) if row.load < 0 else (self._kept.get(row.load),)
        if row.start not in right:
            known = [str(position) for position in right[::-1] if position is not None]
            raise InternalError(
                "a row does not go on where the sequence's state is",
                code="state-position",
                subject=f"sequence {row.seq}",
                expected=" or ".join(known) or f"no row: snapshot {row.load} is empty",
                found=row.start,
            )

    def _check_snapshots(self, row: RowLike, written: set[int]) -> None:
        for snapshot in (row.load, row.save):
            if not -1 <= snapshot < self.snapshots:
                raise self._bad_snapshot("no such snapshot", row, snapshot)
        if row.save in written:
            raise self._bad_snapshot("a snapshot is written twice", row, row.save)
        if row.save >= 0:
            written.add(row.save)

    def _bad_snapshot(self, message: str, row: RowLike | None, found: object) -> InternalError:
        return InternalError(
            message,
            code="bad-snapshot",
            subject=None if row is None else f"sequence {row.seq}",
            expected=f"one of {self.snapshots}, by one row",
            found=str(found)[:200],
        )

    def _place_of(self, snapshot: int) -> int:
        return self._first_snapshot + snapshot

    def _copy(self, source: int, target: int) -> None:
        for whole in self._whole:
            whole[:, target].copy_(whole[:, source])

    def save(self, rows: Sequence[RowLike]) -> None:
        """Copy the states of these rows, whose tokens they have seen, to the snapshots the rows
        name. To be called before `done`; what it queues may still be running then."""
        for row in rows:
            if row.save >= 0:
                self._copy(self._places[row.seq], self._place_of(row.save))

    def done(self, rows: Sequence[RowLike]) -> None:
        """The step of these rows is over, or all of it queued: their states have seen their tokens,
        and so have the snapshots they name."""
        for row in rows:
            position = self._seen[row.seq] = row.start + len(row.tokens)
            if row.save >= 0:
                self._kept[row.save] = position

    def failed(self, rows: Sequence[RowLike]) -> None:
        """What was queued for these rows, and called done, has failed."""
        for row in rows:
            self._seen.pop(row.seq, None)
            self._kept.pop(row.save, None)

    def copy_of(self, seq: int, tokens: int) -> StateCopy:
        """A copy of the state of ``seq``, which has seen more than ``tokens - 16`` tokens and not
        more than ``tokens``.

        Raises:
            InternalError: state-position.
        """
        seen = self._seen.get(seq)
        if seen is None or not tokens - BLOCK_TOKENS < seen <= tokens:
            raise InternalError(
                "the state is not behind the sequence's last block",
                code="state-position",
                subject=f"sequence {seq}",
                expected=f"{tokens - BLOCK_TOKENS + 1}..{tokens}",
                found=seen,
            )
        place = self._places[seq]
        return StateCopy(seen, tuple(whole[:, place].to("cpu", copy=True) for whole in self._whole))

    def put(self, seq: int, copy: StateCopy) -> None:
        """Give ``seq`` the state that `copy_of` copied.

        Raises:
            InternalError: no-state-place.
        """
        place = self._places.get(seq)
        if place is None:
            if not self._free:
                raise InternalError(
                    "more sequences hold a state than there are places",
                    code="no-state-place",
                    expected=f"at most {self._columns.shape[1]}",
                    found=len(self._places) + 1,
                )
            place = self._places[seq] = self._free.pop()
        for whole, held in zip(self._whole, copy.parts, strict=True):
            whole[:, place].copy_(held)
        self._seen[seq] = copy.position

    def drop(self, seq: int) -> None:
        """Give the sequence's place back. Idempotent."""
        self._seen.pop(seq, None)
        place = self._places.pop(seq, None)
        if place is not None:
            self._free.append(place)

    def close(self) -> None:
        """Drop the tensors and free the memory, once; one refusal does not keep the rest. End the
        work that uses it first."""
        self.conv, self.memory, self._whole = [], [], ()
        with ExitStack() as stack:
            for address in self._addresses:
                stack.callback(self._device.free, address)
            self._addresses.clear()
