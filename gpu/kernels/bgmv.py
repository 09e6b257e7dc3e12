"""Batched LoRA delta, a different adapter for every row: y += scale * (x A^T) B^T.

A group holds up to three slices that share x (q, k and v; gate and up; o or down alone), so one
call serves one fused linear. Weights are found through pointer tables: cell 0 or slot -1 leaves the
row's columns untouched. Rounding points for bf16: x A^T is rounded, the delta is rounded, then out
= bf16(f32(out) + scale * f32(delta)); fp32 elements are never rounded. A row's result depends on
its own x, slot and weights alone, whatever the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...errors import InternalError
from . import bgmv_dot, bgmv_kernel
from .memory import Scratch, strided_at, view_at

MAX_SLICES = 3


@dataclass(frozen=True, slots=True)
class LoraSlice:
    """One pair of one fused linear.

    Attributes:
        a_table: address of u64 [max_loras], each cell the address of A [rank, k_in] row-major or 0.
        b_table: address of u64 [max_loras], each cell the address of B [n_out, rank] row-major or
            0.
        scales: address of f32 [max_loras].
        n_out: columns this slice writes.
        column: first column in `out`.
    """

    a_table: int
    b_table: int
    scales: int
    n_out: int
    column: int


def lora_delta_reference(
    slices: tuple[LoraSlice, ...],
    k_in: int,
    rank: int,
    max_loras: int,
    dtype: torch.dtype,
    x_addr: int,
    x_stride: int,
    out_addr: int,
    out_stride: int,
    row_slot_addr: int,
    n_rows: int,
) -> None:
    """Add every row's delta in place, row by row; strides in elements. See `LoraGroup.apply`.

    Raises:
        InternalError: "slot-out-of-range" when a row names a slot outside [-1, max_loras).
    """
    row_slot = view_at(row_slot_addr, (n_rows,), torch.int32).tolist()
    x = strided_at(x_addr, n_rows, k_in, x_stride, dtype)
    for row, slot in enumerate(row_slot):
        if not -1 <= slot < max_loras:
            raise slot_error(row, slot, max_loras)
        if slot < 0:
            continue
        for part in slices:
            a_addr = int(view_at(part.a_table, (max_loras,), torch.int64)[slot])
            b_addr = int(view_at(part.b_table, (max_loras,), torch.int64)[slot])
            if a_addr == 0 or b_addr == 0:
                continue
            scale = view_at(part.scales, (max_loras,), torch.float32)[slot]
            a = view_at(a_addr, (rank, k_in), dtype).float()
            b = view_at(b_addr, (part.n_out, rank), dtype).float()
            xa = (a @ x[row].float()).to(dtype).float()
            delta = (b @ xa).to(dtype).float()
            address = out_addr + (row * out_stride + part.column) * dtype.itemsize
            out = view_at(address, (part.n_out,), dtype)
            out.copy_(out.float() + scale * delta)


def slot_error(row: int, slot: int, max_loras: int) -> InternalError:
    """The refusal of a row that names a slot the tables do not have."""
    return InternalError(
        "a row names a slot outside the tables",
        code="slot-out-of-range",
        subject=f"row {row}",
        expected=f"-1 <= slot < {max_loras}",
        found=slot,
    )


class LoraGroup:
    """Up to three LoRA pairs that share one input, applied to all rows of a step in one call.

    Holds addresses only; the tables must outlive it. Contents of tables may change between calls.
    With a scratch a numba kernel serves, without one the torch reference; with `dot` the one that
    multiplies pairs of bf16, which the processor must know (`bf16.has_dot`).

    ``address`` is what kernels know the group by; ``dot`` tells that such a kernel serves it.

    A step calls some hundred groups, and what each call touches has left the caches since the step
    before: hence slots, and no calls on the way to the kernel.
    """

    __slots__ = (
        "_entry",
        "_fields",
        "_kernel",
        "_need",
        "_scratch",
        "_tag",
        "address",
        "dot",
        "dtype",
        "k_in",
        "max_loras",
        "rank",
        "slices",
    )

    def __init__(
        self,
        slices: tuple[LoraSlice, ...],
        *,
        k_in: int,
        rank: int,
        max_loras: int,
        dtype: torch.dtype,
        scratch: Scratch | None,
        dot: bool = False,
    ) -> None:
        if not 1 <= len(slices) <= MAX_SLICES:
            raise InternalError(
                "wrong number of slices in a LoRA group",
                code="lora-group-slices",
                expected=f"1 to {MAX_SLICES}",
                found=len(slices),
            )
        if rank < 8 or rank % 8:
            raise InternalError(
                "the padded rank must be a multiple of 8",
                code="lora-group-rank",
                expected="8, 16, 24, ...",
                found=rank,
            )
        self.slices = slices
        self.k_in = k_in
        self.rank = rank
        self.max_loras = max_loras
        self.dtype = dtype
        self._scratch = scratch
        self._tag: int | float = 0 if dtype == torch.bfloat16 else 0.0
        self._kernel: Any = bgmv_kernel.lora_delta_kernel
        self._need = bgmv_kernel.scratch_bytes(k_in, rank, 0)
        self.dot = dot and dtype == torch.bfloat16
        if self.dot:
            self._kernel = bgmv_dot.lora_dot_kernel
            self._need = bgmv_dot.scratch_bytes(k_in, rank, 0)
        self._entry: Any = None
        fields = [k_in, rank, max_loras, len(slices)]
        for part in slices:
            fields += [part.a_table, part.b_table, part.scales, part.n_out, part.column]
        self._fields = torch.tensor(fields, dtype=torch.int64)
        self.address = self._fields.data_ptr()

    def scratch_bytes(self, n_rows: int) -> int:
        """Bytes of scratch a call for so many rows needs."""
        return self._need + bgmv_kernel.ROW_BYTES * n_rows

    def apply(
        self,
        x_addr: int,
        x_stride: int,
        out_addr: int,
        out_stride: int,
        row_slot_addr: int,
        n_rows: int,
    ) -> None:
        """Add scale * (x A^T) B^T to `out` for every row with an adapter.

        Args:
            x_addr: address of x [n_rows, k_in], elements of the group's dtype.
            x_stride: elements between rows of x.
            out_addr: address of column 0 of out; slice j writes columns column_j .. column_j +
                n_out_j.
            out_stride: elements between rows of out.
            row_slot_addr: address of i32 [n_rows], -1 = base.
            n_rows: rows.

        Raises:
            InternalError: "slot-out-of-range"; what the call wrote before is undefined.
        """
        scratch = self._scratch
        if scratch is not None:
            need = self.scratch_bytes(n_rows)
            if need > scratch.size:
                scratch.at_least(need)
            bad: int = (self._entry or self._start)(
                self._tag,
                self.address,
                scratch.address,
                x_addr,
                x_stride,
                out_addr,
                out_stride,
                row_slot_addr,
                n_rows,
            )
            if bad >= 0:
                slot = int(view_at(row_slot_addr, (n_rows,), torch.int32)[bad])
                raise slot_error(bad, slot, self.max_loras)
            return
        lora_delta_reference(
            self.slices,
            self.k_in,
            self.rank,
            self.max_loras,
            self.dtype,
            x_addr,
            x_stride,
            out_addr,
            out_stride,
            row_slot_addr,
            n_rows,
        )

    def _start(self, *scalars: float) -> int:
        """The first call: it may compile. Later ones go straight to the compiled code."""
        bad: int = self._kernel(*scalars)
        self._entry = self._kernel.entry(self._tag)
        return bad
