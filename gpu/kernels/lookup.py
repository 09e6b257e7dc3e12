"""An embedding's LoRA delta on the host: y += scale * B A[:, token], an adapter for every row.

What it owns: nothing. Weights are found through pointer tables; cell 0 or slot -1 leaves the row
untouched. The delta is rounded to the element type, then out = round(out + scale * delta), as in
`bgmv`; a row's result depends on its own token and slot alone, whatever the batch.

Formula: PEFT 0.21, `peft/tuners/lora/layer.py` (`Embedding.forward`).
"""

from __future__ import annotations

import numpy as np
import torch

from .bgmv import LoraSlice, slot_error
from .memory import strided_at, view_at


class LookupGroup:
    """The pair of an embedding, applied to all rows of a step.

    Holds addresses only; the tables must outlive it. Contents of tables may change between calls.

    Args:
        part: tables; ``n_out`` and ``column`` are of the output. A is ``[rank, vocab]``.
        vocab: columns of A.
        rank: padded rank.
        max_loras: cells of each table row.
        dtype: of out, A and B.
    """

    def __init__(
        self, part: LoraSlice, *, vocab: int, rank: int, max_loras: int, dtype: torch.dtype
    ) -> None:
        self._part, self._vocab, self._rank = part, vocab, rank
        self._max_loras, self._dtype = max_loras, dtype

    def apply(
        self, tokens_addr: int, out_addr: int, out_stride: int, row_slot_addr: int, n_rows: int
    ) -> None:
        """Add scale * B A[:, token] to ``out`` for every row with an adapter.

        Args:
            tokens_addr: address of i64 [n_rows], each within the vocabulary.
            out_addr: address of column 0 of out.
            out_stride: elements between rows of out.
            row_slot_addr: address of i32 [n_rows], -1 = base.
            n_rows: rows.

        Raises:
            InternalError: "slot-out-of-range"; what the call wrote before is undefined.
        """
        slots = view_at(row_slot_addr, (n_rows,), torch.int32).numpy()
        tokens = view_at(tokens_addr, (n_rows,), torch.int64).numpy()
        for slot in np.unique(slots).tolist():
            where = np.flatnonzero(slots == slot)
            if not -1 <= slot < self._max_loras:
                raise slot_error(int(where[0]), slot, self._max_loras)
            if slot >= 0:
                self._add(slot, where, tokens[where], out_addr, out_stride)

    def _add(
        self,
        slot: int,
        where: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
        tokens: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
        out_addr: int,
        out_stride: int,
    ) -> None:
        part, dtype, cells = self._part, self._dtype, (self._max_loras,)
        a_addr = int(view_at(part.a_table, cells, torch.int64)[slot])
        b_addr = int(view_at(part.b_table, cells, torch.int64)[slot])
        if a_addr == 0 or b_addr == 0:
            return
        scale = view_at(part.scales, cells, torch.float32)[slot]
        wide = view_at(b_addr, (part.n_out, self._rank), dtype).float()
        ids, place = np.unique(tokens, return_inverse=True)
        columns = view_at(a_addr, (self._rank, self._vocab), dtype)[:, torch.from_numpy(ids)]
        # A product a token: of many together the last bits would depend on how many they are.
        deltas = torch.stack([torch.mv(wide, column) for column in columns.float().t()])
        first = out_addr + part.column * dtype.itemsize
        out = strided_at(first, int(where[-1]) + 1, part.n_out, out_stride, dtype)
        index = torch.from_numpy(where)
        made = out[index].float() + scale * deltas.to(dtype).float()[torch.from_numpy(place)]
        out[index] = made.to(dtype)
