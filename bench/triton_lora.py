"""A LoRA delta in Triton, the usual way, to time the kernels against.

One program for each row and slice of ranks (shrink, sums of a split of the input added in a second
axis) or of outputs (expand), weights found through the same pointer tables. Needs Triton; torch's
CUDA builds bring it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK_K, BLOCK_N = 512, 128


@triton.jit
def _shrink(  # type: ignore[no-untyped-def]  # Triton types it
    planes, x, table, slots, k_in, x_stride, rows,
    RANK: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, split = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot >= 0:
        a = tl.load(table + slot).to(tl.pointer_type(tl.bfloat16))
        ranks = tl.arange(0, RANK)
        total = tl.zeros((RANK,), tl.float32)
        for start in range(split * SPLIT, min((split + 1) * SPLIT, k_in), BLOCK):
            k = start + tl.arange(0, BLOCK)
            inside = (k < k_in) & (k < (split + 1) * SPLIT)
            v = tl.load(x + row * x_stride + k, mask=inside, other=0.0).to(tl.float32)
            at = ranks[:, None] * k_in + k[None, :]
            w = tl.load(a + at, mask=inside[None, :], other=0.0).to(tl.float32)
            total += tl.sum(w * v[None, :], axis=1)
        tl.store(planes + (split * rows + row) * RANK + ranks, total)


@triton.jit
def _expand(  # type: ignore[no-untyped-def]  # Triton types it
    out, planes, table, scales, slots, n_out, out_stride, rows, splits,
    RANK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot >= 0:
        b = tl.load(table + slot).to(tl.pointer_type(tl.bfloat16))
        scale = tl.load(scales + slot)
        ranks = tl.arange(0, RANK)
        total = tl.zeros((RANK,), tl.float32)
        for split in range(splits):
            total += tl.load(planes + (split * rows + row) * RANK + ranks)
        total = total.to(tl.bfloat16).to(tl.float32)
        n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = n < n_out
        w = tl.load(b + n[:, None] * RANK + ranks[None, :], mask=inside[:, None], other=0.0)
        delta = tl.sum(w.to(tl.float32) * total[None, :], axis=1).to(tl.bfloat16).to(tl.float32)
        at = out + row * out_stride + n
        before = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        tl.store(at, (before + scale * delta).to(tl.bfloat16), mask=inside)


class TritonSlice:
    """One pair of one layer.

    Args:
        a, b: bf16 ``[slots, rank, k_in]`` and ``[slots, n_out, rank]``; rank a power of two, at
            least 16.
        scales: float32 ``[slots]``.
        column: first column of the output.
        rows: most rows.
    """

    def __init__(
        self, a: torch.Tensor, b: torch.Tensor, scales: torch.Tensor, column: int, rows: int
    ) -> None:
        self._keep, self._scales, self._column = (a, b), scales, column
        self._rank, self._k_in, self._n_out = a.shape[1], a.shape[2], b.shape[1]
        on = {"device": a.device, "dtype": torch.int64}
        self._a = torch.tensor([one.data_ptr() for one in a], **on)
        self._b = torch.tensor([one.data_ptr() for one in b], **on)
        self._split = max(BLOCK_K, -(-self._k_in // 8 // BLOCK_K) * BLOCK_K)
        self._splits = -(-self._k_in // self._split)
        self._planes = torch.zeros(self._splits * rows * self._rank, device=a.device)

    def apply(self, x: torch.Tensor, out: torch.Tensor, slots: torch.Tensor) -> None:
        """out[row, column..] += scale * delta, in place."""
        rows = x.shape[0]
        # The compiler's own type of an index expression is unknown to type checkers.
        shrink: Any = _shrink
        expand: Any = _expand
        shrink[(rows, self._splits)](
            self._planes, x, self._a, slots, self._k_in, x.stride(0), rows,
            RANK=self._rank, SPLIT=self._split, BLOCK=BLOCK_K,
        )  # fmt: skip
        expand[(rows, -(-self._n_out // BLOCK_N))](
            out[:, self._column :], self._planes, self._b, self._scales, slots, self._n_out,
            out.stride(0), rows, self._splits, RANK=self._rank, BLOCK=BLOCK_N,
        )  # fmt: skip
