"""A step's rows on the device: fixed arrays that one copy fills.

What it owns: a pinned block, its device twin, and tensors over both. Invariants: addresses never
change, so graphs may hold them; the pinned block is written only while no copy from it is queued,
which holds because every step waits for its results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from ...errors import DeviceError
from ..device import Device, Stream
from ..kernels.memory import view_at
from ..kernels.rope import BLOCK_TOKENS
from ..lora.layout import round_up
from ..tensors import TensorSpace
from .batch import StepBatch

ALIGN: Final = 256


class DeviceBatch:
    """The arrays a forward pass reads.

    Attributes (on the device; cut them to the step):
        tokens, positions, mapping: int64 ``[tokens]``; mapping is each token's KV cell.
        lens: int32 ``[rows]``, keys the row's last token sees.
        tables: int32 ``[rows, blocks]``.
        picked: int64 ``[rows]``, the token of each row that is sampled from.
        places: int64 ``[rows]``, where each row's recurrent state is.
        slots: int64 ``[tokens]``, -1 = base.
        row_slots: address of int32 ``[tokens]``, slots for the LoRA kernels.

    Args:
        tokens: most tokens of a step, padding included.
        rows: most rows of a step, padding included.
        blocks: most blocks of a row.

    Raises:
        DeviceError: what the allocations raise.
    """

    def __init__(
        self, device: Device, space: TensorSpace, *, tokens: int, rows: int, blocks: int
    ) -> None:
        self._device = device
        kinds: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "tokens": ((tokens,), torch.int64),
            "positions": ((tokens,), torch.int64),
            "mapping": ((tokens,), torch.int64),
            "slots": ((tokens,), torch.int64),
            "picked": ((rows,), torch.int64),
            "places": ((rows,), torch.int64),
            "lens": ((rows,), torch.int32),
            "row_slots": ((tokens,), torch.int32),
            "tables": ((rows, blocks), torch.int32),
        }
        offsets, size = {}, 0
        for name, (shape, dtype) in kinds.items():
            offsets[name] = size
            size = round_up(size + dtype.itemsize * int(np.prod(shape)), ALIGN)
        self._fixed, self._blocks = offsets["tables"], blocks
        self._host: int | None = None
        self._memory: int | None = device.alloc(size, label="step arrays")
        try:
            self._host = device.pinned_alloc(size, label="step arrays (host)")
        except DeviceError:
            self.close()
            raise
        device_views = {
            name: space.view(self._memory + offsets[name], *kind) for name, kind in kinds.items()
        }
        host_views: dict[str, npt.NDArray[Any]] = {
            name: view_at(self._host + offsets[name], *kind).numpy() for name, kind in kinds.items()
        }
        for view in host_views.values():
            view[...] = 0
        self.tokens, self.positions = device_views["tokens"], device_views["positions"]
        self.mapping, self.lens = device_views["mapping"], device_views["lens"]
        self.tables, self.picked = device_views["tables"], device_views["picked"]
        self.places, self.slots = device_views["places"], device_views["slots"]
        self.row_slots = self._memory + offsets["row_slots"]
        self._at = host_views

    def send(
        self,
        batch: StepBatch,
        *,
        n: int,
        rows: int,
        kernel_slots: Sequence[int],
        picked: Sequence[int],
        places: Sequence[int],
        padded: int,
        waste: int,
        waste_place: int,
        stream: Stream,
    ) -> None:
        """Queue the copy of one step.

        Args:
            batch: filled.
            n: its tokens. rows: its rows.
            kernel_slots: slot of each token for the kernels, -1 for none.
            picked: tokens that are sampled from.
            places: of the rows' states; none in families without.
            padded: tokens (and rows) of a decode step with its padding, or ``n`` for others.
            waste: the KV cell padding writes. waste_place: the state it moves.
        """
        at, extra = self._at, slice(n, padded)
        for name, source, pad in (
            ("tokens", batch.tokens, 0),
            ("positions", batch.positions, 0),
            ("mapping", batch.slot_mapping, waste),
        ):
            at[name][:n] = source[:n].numpy()
            at[name][extra] = pad
        at["slots"][:n] = batch.slots
        at["row_slots"][:n] = kernel_slots
        at["slots"][extra] = at["row_slots"][extra] = -1
        at["picked"][: len(picked)] = picked
        at["places"][: len(places)] = places
        at["lens"][:rows] = batch.lens.numpy()[batch.last]
        at["tables"][:rows] = batch.block_tables[:rows].numpy()
        used = rows
        if padded > n:
            # One key each: the one the padding row writes itself.
            at["lens"][rows:padded] = 1
            at["places"][rows:padded] = waste_place
            at["tables"][rows:padded] = waste // BLOCK_TOKENS
            used = padded
        assert self._memory is not None and self._host is not None
        nbytes = self._fixed + 4 * used * self._blocks
        self._device.copy_h2d(self._memory, self._host, nbytes, stream)

    def close(self) -> None:
        """Free both blocks, once."""
        self._at = {}
        memory, self._memory = self._memory, None
        host, self._host = self._host, None
        if memory is not None:
            self._device.free(memory)
        if host is not None:
            self._device.pinned_free(host)
