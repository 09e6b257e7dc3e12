"""A step's rows on the device: fixed arrays that one copy fills, and what the step chooses.

What it owns: one block on the device, tensors over it, and pinned twins of its two ends, one for
each of two steps in flight. Invariants: addresses never change, so graphs may hold them; a step's
ids lie beside the tokens of the next, so that one gather makes a step's ids of both; a pinned twin
is used again only when the step before that had it is over, which whoever calls `send` sees to.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from ...errors import DeviceError
from ..device import Device, Stream
from ..kernels.memory import view_at
from ..kernels.rope import BLOCK_TOKENS
from ..lora.annex import round_up
from ..tensors import TensorSpace
from .batch import StepBatch
from .torch_rows import HostRows

ALIGN: Final = 256
TWINS: Final = 2
"""Steps in flight at most."""


class DeviceBatch:
    """The arrays a forward pass reads.

    Attributes (on the device; cut them to the step):
        chosen: int64 ``[rows]``, what the step chose; the next one's rows may be fed from there.
        peaks: float32 ``[rows]``, the greatest logit of each.
        positions, mapping: int64 ``[tokens]``; mapping is each token's KV cell.
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
            "peaks": ((rows,), torch.float32),
            "chosen": ((rows,), torch.int64),
            "tokens": ((tokens,), torch.int64),
            "positions": ((tokens,), torch.int64),
            "mapping": ((tokens,), torch.int64),
            "sources": ((tokens,), torch.int64),
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
        self._first = offsets["tokens"]
        word = torch.int64.itemsize
        # Where a token of the copy lies, counted from the first id chosen.
        self._own = (self._first - offsets["chosen"]) // word + np.arange(tokens)
        self._host: list[int] = []
        self._memory: int | None = device.alloc(size, label="step arrays")
        try:
            for _ in range(TWINS):
                self._host.append(device.pinned_alloc(size, label="step arrays (host)"))
        except DeviceError:
            self.close()
            raise
        device_views = {
            name: space.view(self._memory + offsets[name], *kind) for name, kind in kinds.items()
        }
        self._at: list[dict[str, npt.NDArray[Any]]] = [
            {name: view_at(host + at, *kinds[name]).numpy() for name, at in offsets.items()}
            for host in self._host
        ]
        for twin in self._at:
            for view in twin.values():
                view[...] = 0
        self.chosen, self.peaks = device_views["chosen"], device_views["peaks"]
        span = (self._first - offsets["chosen"]) // word + tokens
        self._ids = space.view(self._memory + offsets["chosen"], (span,), torch.int64)
        self._sources, self.positions = device_views["sources"], device_views["positions"]
        self.mapping, self.lens = device_views["mapping"], device_views["lens"]
        self.tables, self.picked = device_views["tables"], device_views["picked"]
        self.places, self.slots = device_views["places"], device_views["slots"]
        self.row_slots = self._memory + offsets["row_slots"]

    def tokens(self, n: int) -> torch.Tensor:
        """int64 ``[n]``, newly made: the step's tokens, fed ones from what the last step chose."""
        return self._ids.index_select(0, self._sources[:n])

    def send(
        self,
        batch: StepBatch,
        *,
        twin: int,
        n: int,
        rows: int,
        fed: Sequence[tuple[int, int]],
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
            twin: the pinned block to use; no step in flight may have it.
            n: its tokens. rows: its rows.
            fed: (token, place in `chosen`) of tokens that the step before chooses.
            kernel_slots: slot of each token for the kernels, -1 for none.
            picked: tokens that are sampled from.
            places: of the rows' states; none in families without.
            padded: tokens (and rows) of a decode step with its padding, or ``n`` for others.
            waste: the KV cell padding writes. waste_place: the state it moves.
        """
        at, extra = self._at[twin], slice(n, padded)
        for name, source, pad in (
            ("tokens", batch.tokens, 0),
            ("positions", batch.positions, 0),
            ("mapping", batch.slot_mapping, waste),
        ):
            at[name][:n] = source[:n].numpy()
            at[name][extra] = pad
        at["sources"][:padded] = self._own[:padded]
        for token, place in fed:
            at["sources"][token] = place
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
        assert self._memory is not None
        nbytes = self._fixed - self._first + 4 * used * self._blocks
        host, memory = self._host[twin] + self._first, self._memory + self._first
        self._device.copy_h2d(memory, host, nbytes, stream)

    def fetch(self, twin: int, stream: Stream) -> None:
        """Queue the copy of what the step chose to the pinned block it was sent from."""
        assert self._memory is not None
        self._device.copy_d2h(self._host[twin], self._memory, self._first, stream)

    def choices(self, twin: int) -> tuple[list[int], list[float]]:
        """What `fetch` brought, once the stream has passed it: ids and greatest logits."""
        at = self._at[twin]
        return at["chosen"].tolist(), at["peaks"].tolist()

    def host(self, rows: int, twin: int) -> HostRows:
        """The host's side of what ``twin`` sent, cut to ``rows``; good until it sends again."""
        at = self._at[twin]
        return HostRows(at["tables"][:rows], at["lens"][:rows])

    def close(self) -> None:
        """Free all blocks, once; one refusal does not keep the rest."""
        self._at = []
        memory, self._memory = self._memory, None
        with ExitStack() as stack:
            for host in self._host:
                stack.callback(self._device.pinned_free, host)
            self._host = []
            if memory is not None:
                stack.callback(self._device.free, memory)
