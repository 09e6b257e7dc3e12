"""The token overlay of `gpu.model.overlay` on a tensor space.

What it owns: for each slot, where its replaced rows lie on the device and which ids they replace,
as known on the host from the committed image. Invariants: those of `gpu.model.overlay`. It makes
shapes from values, so a step with an overlay is never captured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from ..lora.image import SlotImage
from ..lora.pool import LoraPool
from ..tensors import TensorSpace

Ids = npt.NDArray[np.int32]


class Overlays:
    """Overlays of the committed slots."""

    def __init__(self, pool: LoraPool, space: TensorSpace, dtype: torch.dtype) -> None:
        self._pool, self._space, self._dtype = pool, space, dtype
        self._ids: dict[int, tuple[Ids, Ids]] = {}

    def commit(self, slot: int, image: SlotImage) -> None:
        """Remember the ids an image replaces."""
        offsets = None if image.annex is None else image.annex.overlay
        if offsets is None:
            self._ids.pop(slot, None)
            return
        found = [
            image.buffer[at : at + 4 * count].view(np.int32).copy()
            for at, count in (
                (offsets.embed_ids, image.embed_rows),
                (offsets.head_ids, image.head_rows),
            )
        ]
        self._ids[slot] = (found[0], found[1])

    def _rows(self, slot: int, head: bool) -> torch.Tensor:
        addresses = self._pool.overlay_addresses(slot)
        assert addresses is not None
        at, count = addresses[3 if head else 1], len(self._ids[slot][head])
        return self._space.view(at, (count, self._pool.layout.dims.hidden), self._dtype)

    def embeddings(
        self,
        slots_used: Iterable[int],
        token_slots: Sequence[int],
        tokens: npt.NDArray[np.int64],
        hidden: torch.Tensor,
    ) -> None:
        """See `gpu.model.overlay.overlay_embeddings`; ``tokens`` as known on the host."""
        slots = np.asarray(token_slots)
        for slot in slots_used:
            replaced = self._ids[slot][0]
            where = np.flatnonzero((slots == slot) & np.isin(tokens, replaced))
            if len(where):
                source = np.searchsorted(replaced, tokens[where])
                rows = self._rows(slot, False).index_select(0, self._up(source))
                hidden.index_copy_(0, self._up(where), rows)

    def logits(
        self,
        slots_used: Iterable[int],
        row_slots: Sequence[int],
        states: torch.Tensor,
        logits: torch.Tensor,
    ) -> None:
        """See `gpu.model.overlay.overlay_logits`."""
        used = {slot for slot in slots_used if len(self._ids[slot][1])}
        for row, slot in enumerate(row_slots):
            if slot in used:
                fresh = torch.mv(self._rows(slot, True).float(), states[row].float())
                ids = self._up(self._ids[slot][1])
                logits[row].index_copy_(0, ids, fresh.to(logits.dtype))

    def _up(self, index: npt.NDArray[np.integer]) -> torch.Tensor:
        return torch.from_numpy(index.astype(np.int64)).to(self._space.torch_device)
