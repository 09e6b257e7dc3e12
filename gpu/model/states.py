"""Recurrent states of the gated delta net layers: one fixed arena, a place per running sequence.

What it owns: two device allocations (convolution inputs and recurrent states of every linear layer)
and who holds which place. Invariants: the arena never grows or moves; a sequence's state has seen
exactly the positions 0..n-1, so the next row starts at n, or at 0 with a state of zeros; nothing is
changed unless every row of a step was found right; a step that failed leaves its sequences without
a state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from ...errors import DeviceError, InternalError
from ..device import Device
from ..kernels.gdn import GdnShape, StateRows
from ..tensors import HostSpace, TensorSpace
from .batch import RowLike
from .config import ModelConfig

MAX_PLACES: Final = 1 << 14


def state_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one sequence's states in all layers; 0 in families without."""
    if config.gdn is None:
        return 0
    each = _conv_elements(config.gdn) * dtype.itemsize + 4 * config.gdn.state_floats
    return len(config.linear_layers) * each


def _conv_elements(gdn: GdnShape) -> int:
    return (gdn.conv - 1) * gdn.channels


class StateArena:
    """States of up to ``places`` sequences.

    Args:
        device: the memory is given back in `close`.
        places: the most sequences of a step.
        space: of the device; ``None``: the host's. Make the arena, and call `begin`, inside its
            ``computing``.
        spare: places more that no sequence gets, for what padding rows write.

    Attributes:
        conv: per linear layer, ascending: ``[places + spare, conv - 1, channels]`` of ``dtype``.
        memory: the same: float32 ``[places + spare, value_heads, key_dim, value_dim]``.
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
    ) -> None:
        gdn = config.gdn
        if gdn is None or not 1 <= places <= MAX_PLACES:
            raise DeviceError("not a state arena", code="bad-argument", subject="places")
        space = HostSpace(device) if space is None else space
        layers = len(config.linear_layers)
        held = (layers, places + spare, gdn.conv - 1, gdn.channels)
        shape = (layers, places + spare, gdn.value_heads, gdn.key_dim, gdn.value_dim)
        self.nbytes = (places + spare) * state_bytes(config, dtype)
        free, _ = device.memory_info()
        if self.nbytes > free:
            raise DeviceError(
                "the recurrent states do not fit; lower the number of running sequences",
                code="states-too-large",
                subject=f"{places} sequences of {state_bytes(config, dtype)} bytes",
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
        self.spare_place = places
        self._free = list(range(places - 1, -1, -1))
        self._places: dict[int, int] = {}
        # Positions a sequence's state has seen.
        self._seen: dict[int, int] = {}
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
        """Give every row its state for one step, zeroed where the row starts at position 0.

        Raises:
            InternalError: state-position (a row does not go on where its state is); no-state-place
                (more sequences at once than places). Nothing was changed.
        """
        fresh = 0
        for row in rows:
            seen = self._seen.get(row.seq)
            fresh += row.seq not in self._places
            if row.start not in (0, seen):
                raise InternalError(
                    "a row does not go on where the sequence's state is",
                    code="state-position",
                    subject=f"sequence {row.seq}",
                    expected="0" if seen is None else f"0 or {seen}",
                    found=row.start,
                )
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
            if row.start == 0:
                for whole in self._whole:
                    whole[:, place].zero_()
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

    def done(self, rows: Sequence[RowLike]) -> None:
        """The step of these rows is over: their states have seen their tokens."""
        for row in rows:
            self._seen[row.seq] = row.start + len(row.tokens)

    def drop(self, seq: int) -> None:
        """Give the sequence's place back. Idempotent."""
        self._seen.pop(seq, None)
        place = self._places.pop(seq, None)
        if place is not None:
            self._free.append(place)

    def close(self) -> None:
        """Drop the tensors and free the memory, once. End the work that uses it first."""
        self.conv, self.memory, self._whole = [], [], ()
        while self._addresses:
            self._device.free(self._addresses.pop())
