"""The token overlay of each row's adapter: replaced embedding rows and recomputed logits.

What it owns: nothing. Invariants: rows of other adapters and of base are untouched; a row's result
depends on its own hidden state and slot alone; a replaced lm_head row is the dot product with that
row in fp32, rounded once to the engine's dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from ..lora.pool import LoraPool


def overlay_embeddings(
    pool: LoraPool,
    slots_used: Iterable[int],
    token_slots: Sequence[int],
    tokens: torch.Tensor,
    hidden: torch.Tensor,
) -> None:
    """Overwrite the embedding of every token its row's adapter replaces.

    Args:
        slots_used: slots with an overlay that occur in ``token_slots``.
        token_slots: slot of each token.
        tokens: int64 ``[n]``.
        hidden: ``[n, hidden]``, the base embeddings; changed in place.
    """
    slots = np.asarray(token_slots)
    ids = tokens.numpy()
    for slot in slots_used:
        view = pool.overlay_view(slot)
        if view is None or not len(view[0]):
            continue
        replaced = view[0].numpy()
        where = np.flatnonzero((slots == slot) & np.isin(ids, replaced))
        if len(where):
            source = np.searchsorted(replaced, ids[where])
            hidden[torch.from_numpy(where)] = view[1][torch.from_numpy(source)]


def overlay_logits(
    pool: LoraPool,
    slots_used: Iterable[int],
    row_slots: Sequence[int],
    states: torch.Tensor,
    logits: torch.Tensor,
) -> None:
    """Recompute the logits of every id whose lm_head row the adapter replaces.

    Args:
        slots_used: slots with an overlay.
        row_slots: slot of each row.
        states: ``[rows, hidden]``, what lm_head was given.
        logits: ``[rows, vocab]``; changed in place.
    """
    views = {slot: pool.overlay_view(slot) for slot in slots_used}
    for row, slot in enumerate(row_slots):
        view = views.get(slot)
        if view is None or not len(view[2]):
            continue
        fresh = torch.mv(view[3].float(), states[row].float())
        logits[row, view[2].long()] = fresh.to(logits.dtype)
