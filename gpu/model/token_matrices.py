"""What adapters change in embed_tokens and lm_head: low-rank deltas, and replaced rows.

What it owns: which filled slots have such changes, and the groups of both matrices, on any device.
Invariants: a row's embedding and logits depend on its own token, state and slot alone, whatever the
batch; rows are replaced first and the delta comes on top, as in PEFT, whose factors stand beside
the matrix they were trained on; a step without such an adapter launches nothing here.

Formulas: PEFT 0.21, `peft/tuners/lora/layer.py` (`Embedding.forward`, `Linear.forward`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..kernels.affine import AffineSlice
from ..kernels.bgmv import LoraSlice
from ..lora.dims import TOKEN_MODULES
from ..lora.image import SlotImage
from ..lora.layout import affine_step
from ..lora.pool import LoraPool
from .groups import Affine, Delta, GroupMaker, Lookup
from .overlay import overlay_embeddings, overlay_logits


@dataclass(frozen=True, slots=True)
class _Facts:
    """What one slot's adapter changes: replaced rows, factors and vectors of either matrix."""

    overlay: bool = False
    embed: bool = False
    head: bool = False
    embed_vectors: bool = False
    head_vectors: bool = False


_EVERYTHING = _Facts(True, True, True, True, True)
_NOTHING = _Facts()


class TokenMatrices:
    """The token matrices of every slot of one pool."""

    def __init__(self, pool: LoraPool, kernels: GroupMaker) -> None:
        self._pool = pool
        self._slots: dict[int, _Facts] = {}
        layout, loras = pool.layout, pool.max_loras
        self._on_embed: Lookup | None = None
        self._on_head: Delta | None = None
        self._embed_vectors: Affine | None = None
        self._head_vectors: Affine | None = None
        if not layout.embedding_rank:
            return
        self._embed, self._head = (
            layout.pair_index[layout.dims.num_layers, module] for module in TOKEN_MODULES
        )
        place = layout.pairs[self._embed]
        part = LoraSlice(*pool.pair_tables(self._embed), place.n_out, 0)
        self._on_embed = kernels.lookup_group(
            part, vocab=place.k_in, rank=place.stride, max_loras=loras
        )
        place = layout.pairs[self._head]
        part = LoraSlice(*pool.pair_tables(self._head), place.n_out, 0)
        self._on_head = kernels.lora_group(
            (part,), k_in=place.k_in, rank=place.stride, max_loras=loras
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
        facts = _Facts(bool(image.embed_rows or image.head_rows))
        if self._on_embed is not None:
            vectors = image.affine or (False,) * len(image.present)
            facts = _Facts(
                facts.overlay,
                image.present[self._embed],
                image.present[self._head],
                vectors[self._embed],
                vectors[self._head],
            )
        if facts != _NOTHING:
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

    def deltas(self, slots: frozenset[int]) -> frozenset[int]:
        """Those of ``slots`` whose adapter has factors or vectors of a token matrix."""
        return frozenset(
            slot for slot in self.of(slots) if self._slots[slot] not in (_NOTHING, _Facts(True))
        )

    def _any(self, slots: frozenset[int] | None) -> list[_Facts]:
        return [_EVERYTHING] if slots is None else [self._slots[slot] for slot in slots]

    def add_embed(
        self,
        slots: frozenset[int] | None,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        row_slots: int,
    ) -> None:
        """Launch the embedding's deltas and vectors, in place, where an adapter has any.

        Args:
            slots: as `deltas` gave them; ``None`` launches everything, whatever the slots hold.
            tokens: int64 ``[n]``.
            hidden: ``[n, hidden]``, the embeddings with rows replaced.
            row_slots: address of int32 ``[n]``, the slot of each token; -1 = base.
        """
        facts = self._any(slots)
        at, stride, n = hidden.data_ptr(), hidden.stride(0), hidden.shape[0]
        if self._on_embed is not None and any(f.embed for f in facts):
            self._on_embed.apply(tokens.data_ptr(), at, stride, row_slots, n)
        if self._embed_vectors is not None and any(f.embed_vectors for f in facts):
            self._embed_vectors.apply(at, stride, row_slots, n)

    def add_head(
        self,
        slots: frozenset[int] | None,
        states: torch.Tensor,
        logits: torch.Tensor,
        row_slots: int,
    ) -> None:
        """Launch lm_head's deltas and vectors, in place, where an adapter has any.

        Args:
            slots: as in `add_embed`.
            states: ``[rows, hidden]``, what lm_head was given.
            logits: ``[rows, vocab]``, with rows replaced.
            row_slots: address of int32 ``[rows]``, the slot of each row; -1 = base.
        """
        facts = self._any(slots)
        at, stride, n = logits.data_ptr(), logits.stride(0), logits.shape[0]
        if self._on_head is not None and any(f.head for f in facts):
            self._on_head.apply(states.data_ptr(), states.stride(0), at, stride, row_slots, n)
        if self._head_vectors is not None and any(f.head_vectors for f in facts):
            self._head_vectors.apply(at, stride, row_slots, n)

    # On the host, with the rows an adapter replaces

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
        overlaid = self.overlays(slots)
        if overlaid:
            overlay_embeddings(self._pool, overlaid, token_slots, tokens, hidden)
        self.add_embed(slots, tokens, hidden, row_slots)

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
        overlaid = self.overlays(slots)
        if overlaid:
            overlay_logits(self._pool, overlaid, row_slots, states, logits)
        own = torch.tensor(row_slots, dtype=torch.int32)
        self.add_head(slots, states, logits, own.data_ptr())
