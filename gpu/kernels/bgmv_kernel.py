"""The numba kernel of the batched LoRA delta: one call for all rows and slices of a group.

Rows are taken slot by slot, up to `ROW_TILE` at a time, so that each weight is read once per tile.
A row's arithmetic never depends on its tile: x A^T adds pairs of vectors along k_in and folds the
sixteen lanes at the end; (x A^T) B^T adds rank by rank for each output. Row blocks of 1, 2 or 4
only share loads.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import numpy as np

from .bf16 import (
    inlined,
    kernel,
    ld,
    ld_i32,
    ld_i64,
    prefetch,
    st,
    st_i32,
    vadd,
    vfma,
    vld,
    vld_columns,
    vld_pairs,
    vld_upto,
    vmul,
    vround,
    vsplat,
    vst,
    vst_upto,
    vsum,
    width,
)

ROW_TILE = 16
HEADER = 4
AHEAD = 8
FIELDS = 5
ROW_BYTES = 4
"""Bytes of scratch memory that each row adds: its place in the order."""


def scratch_bytes(k_in: int, rank: int, max_rows: int) -> int:
    """Bytes the kernel needs: widened x, x A^T, columns of B, and the rows' order."""
    return 4 * (ROW_TILE * (k_in + 32 + rank) + 48 * rank + max_rows) + 256


@inlined
def _widen_row(tag, x, at, k_in, wide, to):
    """One row of x as fp32, in the order `_shrink` meets it: pairs, then what is left."""
    whole = k_in - k_in % 32
    for i in range(0, whole, 32):
        low, high = vld_pairs(tag, x, at + i)
        vst(0.0, wide, to + i, low)
        vst(0.0, wide, to + i + 16, high)
    for i in range(whole, k_in, 16):
        vst(0.0, wide, to + i, vld_upto(tag, x, at + i, k_in - i))


@inlined
def _ask4(base, at, size):
    """Ask for the next 128 elements of the slot: its regions lie one after the other, but a row of
    A is too short for the hardware to foresee the next."""
    for line in range(0, 128 * size, 64):
        prefetch(base + at + line)


@inlined
def _shrink1(tag, a, k_in, rank, wide, row, row_step, xa):
    """xa[row, :] = x[row] A^T, rounded to the element type; four ranks at a time."""
    whole = k_in - k_in % 32
    x = row * row_step
    for r in range(0, rank, 4):
        a0, a1, a2, a3 = r * k_in, (r + 1) * k_in, (r + 2) * k_in, (r + 3) * k_in
        e0 = vsplat(np.float32(0.0))
        e1, e2, e3, o0, o1, o2, o3 = e0, e0, e0, e0, e0, e0, e0
        ahead = a + (a0 + 4 * k_in) * width(tag)
        for i in range(0, whole, 32):
            _ask4(ahead, (4 * i) * width(tag), width(tag))
            xe, xo = vld(0.0, wide, x + i), vld(0.0, wide, x + i + 16)
            e, o = vld_pairs(tag, a, a0 + i)
            e0, o0 = vfma(e, xe, e0), vfma(o, xo, o0)
            e, o = vld_pairs(tag, a, a1 + i)
            e1, o1 = vfma(e, xe, e1), vfma(o, xo, o1)
            e, o = vld_pairs(tag, a, a2 + i)
            e2, o2 = vfma(e, xe, e2), vfma(o, xo, o2)
            e, o = vld_pairs(tag, a, a3 + i)
            e3, o3 = vfma(e, xe, e3), vfma(o, xo, o3)
        for i in range(whole, k_in, 16):
            left = k_in - i
            xe = vld(0.0, wide, x + i)
            e0 = vfma(vld_upto(tag, a, a0 + i, left), xe, e0)
            e1 = vfma(vld_upto(tag, a, a1 + i, left), xe, e1)
            e2 = vfma(vld_upto(tag, a, a2 + i, left), xe, e2)
            e3 = vfma(vld_upto(tag, a, a3 + i, left), xe, e3)
        at = row * rank + r
        st(0.0, xa, at, vsum(vadd(e0, o0)))
        st(0.0, xa, at + 1, vsum(vadd(e1, o1)))
        st(0.0, xa, at + 2, vsum(vadd(e2, o2)))
        st(0.0, xa, at + 3, vsum(vadd(e3, o3)))


@inlined
def _shrink2(tag, a, k_in, rank, wide, row, row_step, xa):
    """`_shrink1` for `row` and `row + 1`."""
    whole = k_in - k_in % 32
    x, z = row * row_step, (row + 1) * row_step
    for r in range(0, rank, 4):
        a0, a1, a2, a3 = r * k_in, (r + 1) * k_in, (r + 2) * k_in, (r + 3) * k_in
        e0 = vsplat(np.float32(0.0))
        e1, e2, e3, o0, o1, o2, o3 = e0, e0, e0, e0, e0, e0, e0
        f0, f1, f2, f3, p0, p1, p2, p3 = e0, e0, e0, e0, e0, e0, e0, e0
        ahead = a + (a0 + 4 * k_in) * width(tag)
        for i in range(0, whole, 32):
            _ask4(ahead, (4 * i) * width(tag), width(tag))
            xe, xo = vld(0.0, wide, x + i), vld(0.0, wide, x + i + 16)
            ze, zo = vld(0.0, wide, z + i), vld(0.0, wide, z + i + 16)
            e, o = vld_pairs(tag, a, a0 + i)
            e0, o0, f0, p0 = vfma(e, xe, e0), vfma(o, xo, o0), vfma(e, ze, f0), vfma(o, zo, p0)
            e, o = vld_pairs(tag, a, a1 + i)
            e1, o1, f1, p1 = vfma(e, xe, e1), vfma(o, xo, o1), vfma(e, ze, f1), vfma(o, zo, p1)
            e, o = vld_pairs(tag, a, a2 + i)
            e2, o2, f2, p2 = vfma(e, xe, e2), vfma(o, xo, o2), vfma(e, ze, f2), vfma(o, zo, p2)
            e, o = vld_pairs(tag, a, a3 + i)
            e3, o3, f3, p3 = vfma(e, xe, e3), vfma(o, xo, o3), vfma(e, ze, f3), vfma(o, zo, p3)
        for i in range(whole, k_in, 16):
            left = k_in - i
            xe, ze = vld(0.0, wide, x + i), vld(0.0, wide, z + i)
            e = vld_upto(tag, a, a0 + i, left)
            e0, f0 = vfma(e, xe, e0), vfma(e, ze, f0)
            e = vld_upto(tag, a, a1 + i, left)
            e1, f1 = vfma(e, xe, e1), vfma(e, ze, f1)
            e = vld_upto(tag, a, a2 + i, left)
            e2, f2 = vfma(e, xe, e2), vfma(e, ze, f2)
            e = vld_upto(tag, a, a3 + i, left)
            e3, f3 = vfma(e, xe, e3), vfma(e, ze, f3)
        at = row * rank + r
        st(0.0, xa, at, vsum(vadd(e0, o0)))
        st(0.0, xa, at + 1, vsum(vadd(e1, o1)))
        st(0.0, xa, at + 2, vsum(vadd(e2, o2)))
        st(0.0, xa, at + 3, vsum(vadd(e3, o3)))
        at += rank
        st(0.0, xa, at, vsum(vadd(f0, p0)))
        st(0.0, xa, at + 1, vsum(vadd(f1, p1)))
        st(0.0, xa, at + 2, vsum(vadd(f2, p2)))
        st(0.0, xa, at + 3, vsum(vadd(f3, p3)))


@inlined
def _fold(tag, delta, scale, out, at, count):
    """out += scale * round(delta), rounded, for up to sixteen columns."""
    y = vld_upto(tag, out, at, count)
    vst_upto(tag, out, at, vadd(y, vmul(scale, vround(tag, delta))), count)


@inlined
def _expand(tag, b, n_out, rank, xa, rows, order, first, scale, out, os, column, columns):
    """out[row, column + o] += scale * round(sum_r xa[row, r] * B[o, r]) for the tile's rows."""
    spare = columns + 64 * rank
    for o in range(0, n_out, 16):
        count = n_out - o
        source, at = b, o * rank
        if count < 16:
            # The last rows of B, completed with zero rows: nothing after them is read.
            source, at = spare, 0
            for i in range(0, 16 * rank, 16):
                part = count * rank - i
                if part > 0:
                    vst(tag, spare, i, vld_upto(tag, b, o * rank + i, part))
                else:
                    vst(tag, spare, i, vsplat(np.float32(0.0)))
        for line in range(0, 16 * rank * width(tag), 64):
            prefetch(b + (o + 16 * AHEAD) * rank * width(tag) + line)
        for r in range(0, rank, 8):
            c = vld_columns(tag, source, at + r, rank)
            vst(0.0, columns, 16 * r, c[0])
            vst(0.0, columns, 16 * r + 16, c[1])
            vst(0.0, columns, 16 * r + 32, c[2])
            vst(0.0, columns, 16 * r + 48, c[3])
            vst(0.0, columns, 16 * r + 64, c[4])
            vst(0.0, columns, 16 * r + 80, c[5])
            vst(0.0, columns, 16 * r + 96, c[6])
            vst(0.0, columns, 16 * r + 112, c[7])
        row = 0
        zero = vsplat(np.float32(0.0))
        while row + 4 <= rows:
            d0, d1, d2, d3 = zero, zero, zero, zero
            h = row * rank
            for r in range(rank):
                c = vld(0.0, columns, 16 * r)
                d0 = vfma(vsplat(ld(0.0, xa, h + r)), c, d0)
                d1 = vfma(vsplat(ld(0.0, xa, h + rank + r)), c, d1)
                d2 = vfma(vsplat(ld(0.0, xa, h + 2 * rank + r)), c, d2)
                d3 = vfma(vsplat(ld(0.0, xa, h + 3 * rank + r)), c, d3)
            to = column + o
            _fold(tag, d0, scale, out, ld_i32(order, first + row) * os + to, count)
            _fold(tag, d1, scale, out, ld_i32(order, first + row + 1) * os + to, count)
            _fold(tag, d2, scale, out, ld_i32(order, first + row + 2) * os + to, count)
            _fold(tag, d3, scale, out, ld_i32(order, first + row + 3) * os + to, count)
            row += 4
        while row + 2 <= rows:
            d0, d1 = zero, zero
            h = row * rank
            for r in range(rank):
                c = vld(0.0, columns, 16 * r)
                d0 = vfma(vsplat(ld(0.0, xa, h + r)), c, d0)
                d1 = vfma(vsplat(ld(0.0, xa, h + rank + r)), c, d1)
            to = column + o
            _fold(tag, d0, scale, out, ld_i32(order, first + row) * os + to, count)
            _fold(tag, d1, scale, out, ld_i32(order, first + row + 1) * os + to, count)
            row += 2
        if row < rows:
            d0 = zero
            h = row * rank
            for r in range(rank):
                d0 = vfma(vsplat(ld(0.0, xa, h + r)), vld(0.0, columns, 16 * r), d0)
            _fold(tag, d0, scale, out, ld_i32(order, first + row) * os + column + o, count)


@inlined
def order_rows(row_slot, n, max_loras, order):
    """Put the rows that have a slot into `order`, those of one slot next to each other.

    Returns the first row whose slot is outside the tables, or -1, and how many rows were placed.
    """
    for row in range(n):
        slot = ld_i32(row_slot, row)
        if slot < -1 or slot >= max_loras:
            return row, 0
    placed = 0
    for row in range(n):
        slot = ld_i32(row_slot, row)
        if slot < 0:
            continue
        # A row already placed is found by its earlier twin.
        seen = False
        for i in range(placed):
            if ld_i32(row_slot, ld_i32(order, i)) == slot:
                seen = True
                break
        if seen:
            continue
        for other in range(row, n):
            if ld_i32(row_slot, other) == slot:
                st_i32(order, placed, other)
                placed += 1
    return -1, placed


@inlined
def tile_rows(row_slot, order, first, placed):
    """How many rows from `first` on share its slot, up to `ROW_TILE`."""
    slot = ld_i32(row_slot, ld_i32(order, first))
    rows = 1
    while (
        rows < ROW_TILE
        and first + rows < placed
        and ld_i32(row_slot, ld_i32(order, first + rows)) == slot
    ):
        rows += 1
    return rows


@kernel
def lora_delta_kernel(tag, group, scratch, x, xs, out, os, row_slot, n):
    """Add every row's delta; see `LoraGroup.apply`.

    `group` is the address of i64: k_in, rank, max_loras, slices, then per slice a_table, b_table,
    scales, n_out, column. Returns -1, or the first row whose slot is outside the tables (nothing is
    written then).
    """
    k_in, rank = ld_i64(group, 0), ld_i64(group, 1)
    max_loras, slices = ld_i64(group, 2), ld_i64(group, 3)
    row_step = (k_in + 15) // 16 * 16
    wide = (scratch + 63) // 64 * 64
    xa = wide + 4 * ROW_TILE * row_step
    columns = (xa + 4 * ROW_TILE * rank + 63) // 64 * 64
    order = columns + 4 * 32 * rank
    bad, placed = order_rows(row_slot, n, max_loras, order)
    if bad >= 0:
        return bad
    first = 0
    while first < placed:
        slot = ld_i32(row_slot, ld_i32(order, first))
        rows = tile_rows(row_slot, order, first, placed)
        widened = False
        for j in range(slices):
            at = HEADER + j * FIELDS
            a = ld_i64(ld_i64(group, at), slot)
            b = ld_i64(ld_i64(group, at + 1), slot)
            if a == 0 or b == 0:
                continue
            scale = ld(0.0, ld_i64(group, at + 2), slot)
            n_out, column = ld_i64(group, at + 3), ld_i64(group, at + 4)
            if not widened:
                widened = True
                for row in range(rows):
                    here = ld_i32(order, first + row) * xs
                    _widen_row(tag, x, here, k_in, wide, row * row_step)
            row = 0
            while row + 2 <= rows:
                _shrink2(tag, a, k_in, rank, wide, row, row_step, xa)
                row += 2
            if row < rows:
                _shrink1(tag, a, k_in, rank, wide, row, row_step, xa)
            for i in range(0, rows * rank, 16):
                left = rows * rank - i
                vst_upto(0.0, xa, i, vround(tag, vld_upto(0.0, xa, i, left)), left)
            _expand(
                tag, b, n_out, rank, xa, rows, order, first, vsplat(scale), out, os, column, columns
            )
        first += rows
    return -1
