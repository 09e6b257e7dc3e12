"""The batched LoRA delta on processors that multiply pairs of bf16: x and A as they lie in memory.

Takes rows as `bgmv_kernel` does and rounds where it does; only the order of additions differs. A
row's arithmetic never depends on its tile: x A^T adds two products a lane along k_in and folds the
sixteen lanes at the end; (x A^T) B^T adds two ranks at a time for each output.

The weights of a step do not fit a core's caches, so all along the kernel asks for what it will
need `AHEAD` bytes later: further on in the slot, or in the slot of the next tile.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import numpy as np

from .bf16 import (
    ask,
    inlined,
    kernel,
    ld,
    ld_i32,
    ld_i64,
    vadd,
    vdot,
    vld,
    vld_raw,
    vld_raw_columns4,
    vld_raw_columns8,
    vld_raw_part,
    vld_upto,
    vmul,
    vround_raw,
    vsplat,
    vst,
    vst_rounded,
    vst_rounded_halves,
    vst_upto,
    vsums,
)
from .bgmv_kernel import FIELDS, HEADER, ROW_TILE, order_rows, tile_rows

AHEAD = 32768


def scratch_bytes(rank: int, max_rows: int) -> int:
    """Bytes the kernel needs: x A^T, columns of B, the last rows of B, and the rows' order."""
    return 2 * ROW_TILE * rank + 32 * rank + 32 * rank + 4 * max_rows + 256


@inlined
def _ask8(address, end, jump):
    """Ask for eight lines; what lies from `end` on is `jump` bytes away."""
    if address >= end:
        address += jump
    for line in range(0, 512, 64):
        ask(address + line)


@inlined
def _shrink1(a, k_in, rank, x, xa, end, jump):
    """xa[:] = x A^T, rounded; eight ranks at a time."""
    whole = k_in - k_in % 32
    zero = vsplat(np.float32(0.0))
    for r in range(0, rank, 8):
        a0 = r * k_in
        a1, a2, a3, a4 = a0 + k_in, a0 + 2 * k_in, a0 + 3 * k_in, a0 + 4 * k_in
        a5, a6, a7 = a0 + 5 * k_in, a0 + 6 * k_in, a0 + 7 * k_in
        d0, d1, d2, d3, d4, d5, d6, d7 = zero, zero, zero, zero, zero, zero, zero, zero
        ahead = a + 2 * a0 + AHEAD
        for i in range(0, whole, 32):
            _ask8(ahead + 16 * i, end, jump)
            v = vld_raw(x, i)
            d0 = vdot(d0, v, vld_raw(a, a0 + i))
            d1 = vdot(d1, v, vld_raw(a, a1 + i))
            d2 = vdot(d2, v, vld_raw(a, a2 + i))
            d3 = vdot(d3, v, vld_raw(a, a3 + i))
            d4 = vdot(d4, v, vld_raw(a, a4 + i))
            d5 = vdot(d5, v, vld_raw(a, a5 + i))
            d6 = vdot(d6, v, vld_raw(a, a6 + i))
            d7 = vdot(d7, v, vld_raw(a, a7 + i))
        if whole < k_in:
            left = k_in - whole
            v = vld_raw_part(x, whole, left)
            d0 = vdot(d0, v, vld_raw_part(a, a0 + whole, left))
            d1 = vdot(d1, v, vld_raw_part(a, a1 + whole, left))
            d2 = vdot(d2, v, vld_raw_part(a, a2 + whole, left))
            d3 = vdot(d3, v, vld_raw_part(a, a3 + whole, left))
            d4 = vdot(d4, v, vld_raw_part(a, a4 + whole, left))
            d5 = vdot(d5, v, vld_raw_part(a, a5 + whole, left))
            d6 = vdot(d6, v, vld_raw_part(a, a6 + whole, left))
            d7 = vdot(d7, v, vld_raw_part(a, a7 + whole, left))
        every = vsums((d0, d1, d2, d3, d4, d5, d6, d7, d0, d1, d2, d3, d4, d5, d6, d7))
        vst_rounded_halves(xa, r, r, every)


@inlined
def _shrink2(a, k_in, rank, x, z, xa, end, jump):
    """`_shrink1` for the rows x and z of one tile."""
    whole = k_in - k_in % 32
    zero = vsplat(np.float32(0.0))
    for r in range(0, rank, 8):
        a0 = r * k_in
        a1, a2, a3, a4 = a0 + k_in, a0 + 2 * k_in, a0 + 3 * k_in, a0 + 4 * k_in
        a5, a6, a7 = a0 + 5 * k_in, a0 + 6 * k_in, a0 + 7 * k_in
        d0, d1, d2, d3, d4, d5, d6, d7 = zero, zero, zero, zero, zero, zero, zero, zero
        e0, e1, e2, e3, e4, e5, e6, e7 = zero, zero, zero, zero, zero, zero, zero, zero
        ahead = a + 2 * a0 + AHEAD
        for i in range(0, whole, 32):
            _ask8(ahead + 16 * i, end, jump)
            v, w = vld_raw(x, i), vld_raw(z, i)
            m = vld_raw(a, a0 + i)
            d0, e0 = vdot(d0, v, m), vdot(e0, w, m)
            m = vld_raw(a, a1 + i)
            d1, e1 = vdot(d1, v, m), vdot(e1, w, m)
            m = vld_raw(a, a2 + i)
            d2, e2 = vdot(d2, v, m), vdot(e2, w, m)
            m = vld_raw(a, a3 + i)
            d3, e3 = vdot(d3, v, m), vdot(e3, w, m)
            m = vld_raw(a, a4 + i)
            d4, e4 = vdot(d4, v, m), vdot(e4, w, m)
            m = vld_raw(a, a5 + i)
            d5, e5 = vdot(d5, v, m), vdot(e5, w, m)
            m = vld_raw(a, a6 + i)
            d6, e6 = vdot(d6, v, m), vdot(e6, w, m)
            m = vld_raw(a, a7 + i)
            d7, e7 = vdot(d7, v, m), vdot(e7, w, m)
        if whole < k_in:
            left = k_in - whole
            v, w = vld_raw_part(x, whole, left), vld_raw_part(z, whole, left)
            m = vld_raw_part(a, a0 + whole, left)
            d0, e0 = vdot(d0, v, m), vdot(e0, w, m)
            m = vld_raw_part(a, a1 + whole, left)
            d1, e1 = vdot(d1, v, m), vdot(e1, w, m)
            m = vld_raw_part(a, a2 + whole, left)
            d2, e2 = vdot(d2, v, m), vdot(e2, w, m)
            m = vld_raw_part(a, a3 + whole, left)
            d3, e3 = vdot(d3, v, m), vdot(e3, w, m)
            m = vld_raw_part(a, a4 + whole, left)
            d4, e4 = vdot(d4, v, m), vdot(e4, w, m)
            m = vld_raw_part(a, a5 + whole, left)
            d5, e5 = vdot(d5, v, m), vdot(e5, w, m)
            m = vld_raw_part(a, a6 + whole, left)
            d6, e6 = vdot(d6, v, m), vdot(e6, w, m)
            m = vld_raw_part(a, a7 + whole, left)
            d7, e7 = vdot(d7, v, m), vdot(e7, w, m)
        every = vsums((d0, d1, d2, d3, d4, d5, d6, d7, e0, e1, e2, e3, e4, e5, e6, e7))
        vst_rounded_halves(xa, r, rank + r, every)


@inlined
def _fold(delta, scale, out, at, count):
    """out += scale * round(delta), rounded, for up to sixteen columns."""
    if count >= 16:
        y = vld(0, out, at)
        vst_rounded(out, at, vadd(y, vmul(scale, vround_raw(delta))))
    else:
        y = vld_upto(0, out, at, count)
        vst_upto(0, out, at, vround_raw(vadd(y, vmul(scale, vround_raw(delta)))), count)


@inlined
def _expand16(source, at, xa, rows, order, first, scale, out, os, to, count):
    """Sixteen outputs from rows of B of rank 16, whose columns stay in registers."""
    c0, c1, c2, c3, c4, c5, c6, c7 = vld_raw_columns8(source, at)
    zero = vsplat(np.float32(0.0))
    for row in range(rows):
        h = 8 * row
        d = vdot(zero, c0, vsplat(ld(0.0, xa, h)))
        d = vdot(d, c1, vsplat(ld(0.0, xa, h + 1)))
        d = vdot(d, c2, vsplat(ld(0.0, xa, h + 2)))
        d = vdot(d, c3, vsplat(ld(0.0, xa, h + 3)))
        d = vdot(d, c4, vsplat(ld(0.0, xa, h + 4)))
        d = vdot(d, c5, vsplat(ld(0.0, xa, h + 5)))
        d = vdot(d, c6, vsplat(ld(0.0, xa, h + 6)))
        d = vdot(d, c7, vsplat(ld(0.0, xa, h + 7)))
        _fold(d, scale, out, ld_i32(order, first + row) * os + to, count)


@inlined
def _expand(b, n_out, rank, xa, rows, order, first, scale, out, os, column, columns, end, jump):
    """out[row, column + o] += scale * round(sum_r xa[row, r] * B[o, r]) for the tile's rows."""
    spare = columns + 32 * rank
    zero = vsplat(np.float32(0.0))
    for o in range(0, n_out, 16):
        count = n_out - o
        source, at = b, o * rank
        ahead = b + 2 * at + AHEAD
        for more in range(0, 32 * rank, 512):
            _ask8(ahead + more, end, jump)
        if count < 16:
            # The last rows of B, completed with zero rows: nothing after them is read.
            source, at = spare, 0
            for i in range(0, 16 * rank, 32):
                part = min(max(count * rank - i, 0), 32)
                vst(0.0, spare, i // 2, vld_raw_part(b, o * rank + i, part))
        to = column + o
        if rank == 16:
            _expand16(source, at, xa, rows, order, first, scale, out, os, to, count)
            continue
        for r in range(0, rank, 8):
            c0, c1, c2, c3 = vld_raw_columns4(source, at + r, rank)
            vst(0.0, columns, 8 * r, c0)
            vst(0.0, columns, 8 * r + 16, c1)
            vst(0.0, columns, 8 * r + 32, c2)
            vst(0.0, columns, 8 * r + 48, c3)
        half = rank // 2
        for row in range(rows):
            d = zero
            for r in range(half):
                d = vdot(d, vld(0.0, columns, 16 * r), vsplat(ld(0.0, xa, row * half + r)))
            _fold(d, scale, out, ld_i32(order, first + row) * os + to, count)


@inlined
def _first_pair(group, slices, slot):
    """Address of the first A a slot has, or 0."""
    for j in range(slices):
        a = ld_i64(ld_i64(group, HEADER + j * FIELDS), slot)
        if a != 0:
            return a
    return 0


@kernel
def lora_dot_kernel(tag, group, scratch, x, xs, out, os, row_slot, n):
    """Add every row's delta, elements bf16: `tag` is an int. The rest is `lora_delta_kernel`'s."""
    k_in, rank = ld_i64(group, 0), ld_i64(group, 1)
    max_loras, slices = ld_i64(group, 2), ld_i64(group, 3)
    xa = (scratch + 63) // 64 * 64
    columns = xa + (2 * ROW_TILE * rank + 63) // 64 * 64
    order = columns + 2 * 32 * rank
    bad, placed = order_rows(row_slot, n, max_loras, order)
    if bad >= 0:
        return bad
    first = 0
    while first < placed:
        slot = ld_i32(row_slot, ld_i32(order, first))
        rows = tile_rows(row_slot, order, first, placed)
        # The slot's weights lie one after the other; after the last the next tile's begin.
        end = 0
        for j in range(slices):
            b = ld_i64(ld_i64(group, HEADER + j * FIELDS + 1), slot)
            if b != 0:
                end = b + 2 * rank * ld_i64(group, HEADER + j * FIELDS + 3)
        following = 0
        if first + rows < placed:
            other = ld_i32(row_slot, ld_i32(order, first + rows))
            following = _first_pair(group, slices, other)
        if following == 0:
            following = x
        jump = following - end
        for j in range(slices):
            at = HEADER + j * FIELDS
            a = ld_i64(ld_i64(group, at), slot)
            b = ld_i64(ld_i64(group, at + 1), slot)
            if a == 0 or b == 0:
                continue
            scale = vsplat(ld(0.0, ld_i64(group, at + 2), slot))
            n_out, column = ld_i64(group, at + 3), ld_i64(group, at + 4)
            row = 0
            while row + 2 <= rows:
                here = x + 2 * xs * ld_i32(order, first + row)
                there = x + 2 * xs * ld_i32(order, first + row + 1)
                _shrink2(a, k_in, rank, here, there, xa + 2 * row * rank, end, jump)
                row += 2
            if row < rows:
                here = x + 2 * xs * ld_i32(order, first + row)
                _shrink1(a, k_in, rank, here, xa + 2 * row * rank, end, jump)
            _expand(
                b, n_out, rank, xa, rows, order, first, scale, out, os, column, columns, end, jump
            )
        first += rows
    return -1
