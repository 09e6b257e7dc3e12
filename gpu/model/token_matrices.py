"""What adapters change in embed_tokens and lm_head: low-rank deltas, and replaced rows.

What it owns: which filled slots have such changes, and the LoRA group of lm_head. Invariants: a
row's embedding and logits depend on its own token, state and slot alone, whatever the batch; rows
are replaced first and the delta comes on top, as in PEFT, whose factors stand beside the matrix
they were trained on; a step without such an adapter calls nothing here.

Formulas: PEFT 0.21, `peft/tuners/lora/layer.py` (`Embedding.forward`, `Linear.forward`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..kernels.affine import AffineSlice
from ..kernels.bgmv import LoraSlice
from ..lora.image import SlotImage
from ..lora.layout import affine_step
from ..lora.pool import LoraPool
from .groups import Affine, Delta, GroupMaker
from .overlay import overlay_embeddings, overlay_logits


@dataclass(frozen=True, slots=True)
class _Facts:
    """What one slot's adapter changes. ``rank``: of the embedding's factors, 0 = none."""

    overlay: bool
    rank: int
    head: bool
    embed_vectors: bool
    head_vectors: bool


class TokenMatrices:
    """The token matrices of every slot of one pool."""

    def __init__(self, pool: LoraPool, kernels: GroupMaker) -> None:
        self._pool = pool
        self._slots: dict[int, _Facts] = {}
        layout = pool.layout
        self._low_rank = layout.embedding_rank > 0
        self._embed, self._head = len(layout.pairs) - 2, len(layout.pairs) - 1
        self._on_head: Delta | None = None
        self._embed_vectors: Affine | None = None
        self._head_vectors: Affine | None = None
        if not self._low_rank:
            return
        self._row_slots = torch.empty(pool.max_rows, dtype=torch.int32)
        place = layout.pairs[self._head]
        part = LoraSlice(*pool.pair_tables(self._head), place.n_out, 0)
        self._on_head = kernels.lora_group(
            (part,), k_in=place.k_in, rank=place.stride, max_loras=pool.max_loras
        )
        if layout.affine:
            self._embed_vectors = self._vectors(kernels, self._embed)
            self._head_vectors = self._vectors(kernels, self._head)

    def _vectors(self, kernels: GroupMaker, pair: int) -> Affine:
        n_out = self._pool.layout.pairs[pair].n_out
        part = AffineSlice(self._pool.affine_table(pair), affine_step(n_out), n_out, 0)
        return kernels.affine_group((part,), max_loras=self._pool.max_loras)

    def commit(self, slot: int, image: SlotImage) -> None:
        """Remember what the adapter that filled ``slot`` changes here."""
        overlay = bool(image.embed_rows or image.head_rows)
        facts = _Facts(overlay, 0, False, False, False)
        if self._low_rank:
            embed, head = self._embed, self._head
            vectors = image.affine or (False,) * len(image.present)
            rank, present = image.ranks[embed], image.present[head]
            facts = _Facts(overlay, rank, present, vectors[embed], vectors[head])
        if facts != _Facts(False, 0, False, False, False):
            self._slots[slot] = facts

    def forget(self, slot: int) -> None:
        """``slot`` is empty. Idempotent."""
        self._slots.pop(slot, None)

    def of(self, slots: frozenset[int]) -> frozenset[int]:
        """Those of ``slots`` whose adapter changes a token matrix."""
        return slots & self._slots.keys() if self._slots else frozenset()

    def overlays(self, slots: frozenset[int]) -> frozenset[int]:
        """Those of ``slots`` whose adapter replaces token rows."""
        return frozenset(slot for slot in self.of(slots) if self._slots[slot].overlay)

    def embed(
        self,
        slots: frozenset[int],
        token_slots: Sequence[int],
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        row_slots: int,
    ) -> None:
        """Change the embeddings of the tokens of these adapters, in place.

        Args:
            slots: as `of` gave them.
            token_slots: slot of each token. row_slots: the address of the same, int32 ``[n]``.
            tokens: int64 ``[n]``.
            hidden: ``[n, hidden]``, the base embeddings.
        """
        facts = {slot: self._slots[slot] for slot in slots}
        overlaid = [slot for slot, fact in facts.items() if fact.overlay]
        if overlaid:
            overlay_embeddings(self._pool, overlaid, token_slots, tokens, hidden)
        for slot, fact in facts.items():
            if fact.rank:
                self._add(slot, fact.rank, np.asarray(token_slots), tokens, hidden)
        if self._embed_vectors is not None and any(f.embed_vectors for f in facts.values()):
            at, stride = hidden.data_ptr(), hidden.stride(0)
            self._embed_vectors.apply(at, stride, row_slots, len(hidden))

    def _add(
        self,
        slot: int,
        rank: int,
        token_slots: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
        tokens: torch.Tensor,
        hidden: torch.Tensor,
    ) -> None:
        mine = torch.from_numpy(np.flatnonzero(token_slots == slot))
        if not len(mine):
            return
        a, b = self._pool.view(slot, self._embed)
        scale, wide = self._pool.scale(slot, self._embed), b[:, :rank].float()
        ids, where = (torch.from_numpy(x) for x in np.unique(tokens[mine], return_inverse=True))
        # A product a token: of many together the last bits would depend on how many they are.
        deltas = torch.stack([torch.mv(wide, column) for column in a[:rank, ids].float().t()])
        made = hidden[mine].float() + scale * deltas[where]
        hidden[mine] = made.to(hidden.dtype)

    def logits(
        self,
        slots: frozenset[int],
        row_slots: Sequence[int],
        states: torch.Tensor,
        logits: torch.Tensor,
    ) -> None:
        """Change the logits of the rows of these adapters, in place.

        Args:
            slots: as `of` gave them.
            row_slots: slot of each row.
            states: ``[rows, hidden]``, what lm_head was given.
            logits: ``[rows, vocab]``.
        """
        facts = {slot: self._slots[slot] for slot in slots}
        overlaid = [slot for slot, fact in facts.items() if fact.overlay]
        if overlaid:
            overlay_logits(self._pool, overlaid, row_slots, states, logits)
        if self._on_head is None or not any(fact.head for fact in facts.values()):
            return
        rows = len(row_slots)
        self._row_slots[:rows] = torch.tensor(row_slots, dtype=torch.int32)
        own, at, stride = self._row_slots.data_ptr(), logits.data_ptr(), logits.stride(0)
        self._on_head.apply(states.data_ptr(), states.stride(0), at, stride, own, rows)
        if self._head_vectors is not None and any(f.head_vectors for f in facts.values()):
            self._head_vectors.apply(at, stride, own, rows)
