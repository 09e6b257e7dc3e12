"""What follows a LoRA delta in some adapters: y = mul * y + add per output, another for every row.

DoRA scales the rows of the merged weight, lora_bias adds to them, and a trained bias takes the
base's place: all three are one factor and one offset per output (`gpu.lora.affine` says which).
Vectors are found through pointer tables; cell 0 or slot -1 leaves the row's columns untouched. The
product and the sum are rounded to fp32 each, the result once to the element type; a row's result
depends on its own values and slot alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...errors import InternalError
from .bf16 import kernel, ld_i32, ld_i64, vadd, vld_upto, vmul, vst_upto
from .bgmv import MAX_SLICES, slot_error
from .memory import view_at

HEADER = 2
FIELDS = 4


@dataclass(frozen=True, slots=True)
class AffineSlice:
    """The vectors of one pair of one fused linear.

    Attributes:
        table: address of u64 [max_loras], each cell the address of mul, fp32 [n_out], or 0.
        add_after: bytes from mul to add, fp32 [n_out].
        n_out: columns this slice changes.
        column: first column in `out`.
    """

    table: int
    add_after: int
    n_out: int
    column: int


def affine_reference(
    slices: tuple[AffineSlice, ...],
    max_loras: int,
    dtype: torch.dtype,
    out_addr: int,
    out_stride: int,
    row_slot_addr: int,
    n_rows: int,
) -> None:
    """Scale and shift every row in place; strides in elements. See `AffineGroup.apply`.

    Raises:
        InternalError: "slot-out-of-range" when a row names a slot outside [-1, max_loras).
    """
    row_slot = view_at(row_slot_addr, (n_rows,), torch.int32).tolist()
    for row, slot in enumerate(row_slot):
        if not -1 <= slot < max_loras:
            raise slot_error(row, slot, max_loras)
        if slot < 0:
            continue
        for part in slices:
            cell = int(view_at(part.table, (max_loras,), torch.int64)[slot])
            if cell == 0:
                continue
            mul = view_at(cell, (part.n_out,), torch.float32)
            add = view_at(cell + part.add_after, (part.n_out,), torch.float32)
            address = out_addr + (row * out_stride + part.column) * dtype.itemsize
            out = view_at(address, (part.n_out,), dtype)
            out.copy_(out.float() * mul + add)


@kernel
# Numba types it.
def affine_kernel(tag, group, out, os, row_slot, n):  # type: ignore[no-untyped-def]
    """`affine_reference` over raw addresses.

    `group` is the address of i64: max_loras, slices, then per slice table, add_after, n_out,
    column. Returns -1, or the first row whose slot is outside the tables (rows before it are done).
    """
    max_loras, slices = ld_i64(group, 0), ld_i64(group, 1)
    for row in range(n):
        slot = ld_i32(row_slot, row)
        if slot < -1 or slot >= max_loras:
            return row
        if slot < 0:
            continue
        for j in range(slices):
            at = HEADER + j * FIELDS
            mul = ld_i64(ld_i64(group, at), slot)
            if mul == 0:
                continue
            add, n_out = mul + ld_i64(group, at + 1), ld_i64(group, at + 2)
            first = row * os + ld_i64(group, at + 3)
            for i in range(0, n_out, 16):
                left = n_out - i
                y = vld_upto(tag, out, first + i, left)
                y = vmul(y, vld_upto(0.0, mul, i, left))
                vst_upto(tag, out, first + i, vadd(y, vld_upto(0.0, add, i, left)), left)
    return -1


class AffineGroup:
    """Up to three pairs' vectors over one fused output, applied to all rows of a step in one call.

    Holds addresses only; the tables must outlive it. Contents of tables may change between calls.
    ``address`` is what kernels know the group by.
    """

    def __init__(
        self,
        slices: tuple[AffineSlice, ...],
        *,
        max_loras: int,
        dtype: torch.dtype,
        use_numba: bool,
    ) -> None:
        if not 1 <= len(slices) <= MAX_SLICES:
            raise InternalError(
                "wrong number of slices in an affine group",
                code="lora-group-slices",
                expected=f"1 to {MAX_SLICES}",
                found=len(slices),
            )
        self.slices = slices
        self.max_loras = max_loras
        self.dtype = dtype
        self._use_numba = use_numba
        self._tag: int | float = 0 if dtype == torch.bfloat16 else 0.0
        fields = [max_loras, len(slices)]
        for part in slices:
            fields += [part.table, part.add_after, part.n_out, part.column]
        self._fields = torch.tensor(fields, dtype=torch.int64)
        self.address = self._fields.data_ptr()

    def apply(self, out_addr: int, out_stride: int, row_slot_addr: int, n_rows: int) -> None:
        """out = mul * out + add for every row whose slot has vectors.

        Args:
            out_addr: address of column 0 of out.
            out_stride: elements between rows of out.
            row_slot_addr: address of i32 [n_rows], -1 = base.
            n_rows: rows.

        Raises:
            InternalError: "slot-out-of-range"; what the call wrote before is undefined.
        """
        if not self._use_numba:
            affine_reference(
                self.slices,
                self.max_loras,
                self.dtype,
                out_addr,
                out_stride,
                row_slot_addr,
                n_rows,
            )
            return
        bad: int = affine_kernel(
            self._tag, self.address, out_addr, out_stride, row_slot_addr, n_rows
        )
        if bad >= 0:
            slot = int(view_at(row_slot_addr, (n_rows,), torch.int32)[bad])
            raise slot_error(bad, slot, self.max_loras)
