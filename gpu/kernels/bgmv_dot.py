"""The batched LoRA delta on processors that multiply pairs of bf16: x and A as they lie in memory.

Takes rows as `bgmv_kernel` does and rounds where it does; only the order of additions differs. A
row's arithmetic never depends on its company: x A^T adds two products a lane along k_in and folds
the sixteen lanes at the end; (x A^T) B^T adds two ranks at a time for each output.

The weights of a step do not fit a core's caches, and one run of addresses does not keep the memory
busy. So up to `PANEL` rows go side by side, whatever their slots: the hardware then follows a run
in each slot, and the kernel itself asks for what comes `AHEAD` bytes later. Rows of one slot lie
next to each other in a panel and find its weights in the first cache.
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
    st_i64,
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
    vst_rounded_pairs,
    vst_upto,
    vsums,
)
from .bgmv_kernel import FIELDS, HEADER, order_rows

AHEAD = 2048
PANEL = 8
FEW = 2
"""Panels of up to so many rows go row by row: empty lanes cost as much as full ones. So do those of
one slot, two rows at a time: there is one run to follow, and less to load."""
UNIT = 4
"""Fields of a unit, the rows of one slot: address of B, first lane, rows, address of the scale."""


def scratch_bytes(k_in: int, rank: int, max_rows: int) -> int:
    """Bytes the kernel needs: a panel's x, lanes and units, x A^T, columns of B, the last rows of
    B, and the rows' order."""
    panel = 2 * PANEL * (k_in + 32) + 8 * PANEL * (1 + UNIT) + 2 * PANEL * rank
    return panel + 32 * rank + 32 * rank + 4 * max_rows + 256


@inlined
def _ask8(address):
    """Ask for eight lines."""
    for line in range(0, 512, 64):
        prefetch(address + line)


@inlined
def _two(d, e, x, at, a, row, after):
    """One lane of `_shrink_panel`: the next 32 products of two ranks."""
    prefetch(a + 2 * row + AHEAD)
    prefetch(a + 2 * after + AHEAD)
    v = vld_raw(x, at)
    return vdot(d, v, vld_raw(a, row)), vdot(e, v, vld_raw(a, after))


@inlined
def _two_part(d, e, x, at, a, row, after, left):
    """`_two` for the last `left` products."""
    v = vld_raw(x, at)
    d = vdot(d, v, vld_raw_part(a, row, left))
    return d, vdot(e, v, vld_raw_part(a, after, left))


@inlined
def _shrink_panel(lanes, k_in, rank, x, xa):
    """xa[pair of ranks, lane] = x A^T, rounded; each lane has an A of its own.

    x holds 32 elements of every lane in turn, zeros where k_in ends.
    """
    whole = k_in - k_in % 32
    zero = vsplat(np.float32(0.0))
    a0, a1, a2, a3 = ld_i64(lanes, 0), ld_i64(lanes, 1), ld_i64(lanes, 2), ld_i64(lanes, 3)
    a4, a5, a6, a7 = ld_i64(lanes, 4), ld_i64(lanes, 5), ld_i64(lanes, 6), ld_i64(lanes, 7)
    for r in range(0, rank, 2):
        d0, d1, d2, d3, d4, d5, d6, d7 = zero, zero, zero, zero, zero, zero, zero, zero
        e0, e1, e2, e3, e4, e5, e6, e7 = zero, zero, zero, zero, zero, zero, zero, zero
        for i in range(0, whole, 32):
            m, n, at = r * k_in + i, (r + 1) * k_in + i, PANEL * i
            d0, e0 = _two(d0, e0, x, at, a0, m, n)
            d1, e1 = _two(d1, e1, x, at + 32, a1, m, n)
            d2, e2 = _two(d2, e2, x, at + 64, a2, m, n)
            d3, e3 = _two(d3, e3, x, at + 96, a3, m, n)
            d4, e4 = _two(d4, e4, x, at + 128, a4, m, n)
            d5, e5 = _two(d5, e5, x, at + 160, a5, m, n)
            d6, e6 = _two(d6, e6, x, at + 192, a6, m, n)
            d7, e7 = _two(d7, e7, x, at + 224, a7, m, n)
        if whole < k_in:
            left = k_in - whole
            m, n, at = r * k_in + whole, (r + 1) * k_in + whole, PANEL * whole
            d0, e0 = _two_part(d0, e0, x, at, a0, m, n, left)
            d1, e1 = _two_part(d1, e1, x, at + 32, a1, m, n, left)
            d2, e2 = _two_part(d2, e2, x, at + 64, a2, m, n, left)
            d3, e3 = _two_part(d3, e3, x, at + 96, a3, m, n, left)
            d4, e4 = _two_part(d4, e4, x, at + 128, a4, m, n, left)
            d5, e5 = _two_part(d5, e5, x, at + 160, a5, m, n, left)
            d6, e6 = _two_part(d6, e6, x, at + 192, a6, m, n, left)
            d7, e7 = _two_part(d7, e7, x, at + 224, a7, m, n, left)
        every = vsums((d0, e0, d1, e1, d2, e2, d3, e3, d4, e4, d5, e5, d6, e6, d7, e7))
        vst_rounded(xa, PANEL * r, every)


@inlined
def _shrink_row(a, k_in, rank, x, xa, lane):
    """`_shrink_panel` for one row that has lane `lane`, eight ranks at a time; x as it lies."""
    whole = k_in - k_in % 32
    zero = vsplat(np.float32(0.0))
    for r in range(0, rank, 8):
        a0 = r * k_in
        a1, a2, a3, a4 = a0 + k_in, a0 + 2 * k_in, a0 + 3 * k_in, a0 + 4 * k_in
        a5, a6, a7 = a0 + 5 * k_in, a0 + 6 * k_in, a0 + 7 * k_in
        d0, d1, d2, d3, d4, d5, d6, d7 = zero, zero, zero, zero, zero, zero, zero, zero
        ahead = a + 2 * a0 + AHEAD
        for i in range(0, whole, 32):
            _ask8(ahead + 16 * i)
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
        at = PANEL * r // 2 + lane
        vst_rounded_pairs(xa, at, at, PANEL, every)


@inlined
def _shrink_rows(a, k_in, rank, x, z, xa, lane):
    """`_shrink_row` for two rows of one slot, x and z."""
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
            _ask8(ahead + 16 * i)
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
        at = PANEL * r // 2 + lane
        vst_rounded_pairs(xa, at, at + 1, PANEL, every)


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
def _expand16(b, at, xa, lane, rows, order, first, scale, out, os, to, count):
    """`_expand_rows` of rank 16: columns of B stay in registers."""
    c0, c1, c2, c3, c4, c5, c6, c7 = vld_raw_columns8(b, at)
    zero = vsplat(np.float32(0.0))
    for h in range(lane, lane + rows):
        d = vdot(zero, c0, vsplat(ld(0.0, xa, h)))
        d = vdot(d, c1, vsplat(ld(0.0, xa, h + PANEL)))
        d = vdot(d, c2, vsplat(ld(0.0, xa, h + 2 * PANEL)))
        d = vdot(d, c3, vsplat(ld(0.0, xa, h + 3 * PANEL)))
        d = vdot(d, c4, vsplat(ld(0.0, xa, h + 4 * PANEL)))
        d = vdot(d, c5, vsplat(ld(0.0, xa, h + 5 * PANEL)))
        d = vdot(d, c6, vsplat(ld(0.0, xa, h + 6 * PANEL)))
        d = vdot(d, c7, vsplat(ld(0.0, xa, h + 7 * PANEL)))
        _fold(d, scale, out, ld_i32(order, first + h) * os + to, count)


@inlined
def _expand_rows(b, at, rank, xa, lane, rows, order, first, scale, out, os, to, count, columns):
    """Sixteen rows of B, from element `at` on, for the lanes of their slot:
    out[row, to ...] += scale * round(xa B^T); `count` of the sixteen outputs are written."""
    if rank == 16:
        _expand16(b, at, xa, lane, rows, order, first, scale, out, os, to, count)
        return
    for r in range(0, rank, 8):
        c0, c1, c2, c3 = vld_raw_columns4(b, at + r, rank)
        vst(0.0, columns, 8 * r, c0)
        vst(0.0, columns, 8 * r + 16, c1)
        vst(0.0, columns, 8 * r + 32, c2)
        vst(0.0, columns, 8 * r + 48, c3)
    for h in range(lane, lane + rows):
        d = vsplat(np.float32(0.0))
        for r in range(rank // 2):
            d = vdot(d, vld(0.0, columns, 16 * r), vsplat(ld(0.0, xa, h + PANEL * r)))
        _fold(d, scale, out, ld_i32(order, first + h) * os + to, count)


@inlined
def _expand(units, count, n_out, rank, xa, order, first, out, os, column, columns):
    """All outputs of all units, units side by side."""
    spare = columns + 32 * rank
    for o in range(0, n_out, 16):
        for unit in range(0, UNIT * count, UNIT):
            b, lane, rows = ld_i64(units, unit), ld_i64(units, unit + 1), ld_i64(units, unit + 2)
            scale = vsplat(ld(0.0, ld_i64(units, unit + 3), 0))
            to, at, left = column + o, o * rank, n_out - o
            if left >= 16:
                for more in range(0, 32 * rank, 512):
                    _ask8(b + 2 * at + AHEAD + more)
                _expand_rows(
                    b, at, rank, xa, lane, rows, order, first, scale, out, os, to, 16, columns
                )
                continue
            # The last rows of B, completed with zero rows: nothing after them is read.
            for i in range(0, 16 * rank, 32):
                part = min(max(left * rank - i, 0), 32)
                vst(0.0, spare, i // 2, vld_raw_part(b, at + i, part))
            _expand_rows(
                spare, 0, rank, xa, lane, rows, order, first, scale, out, os, to, left, columns
            )


@inlined
def _copy_panel(x, xs, k_in, order, first, rows, to):
    """The panel's x as `_shrink_panel` takes it."""
    for row in range(rows):
        source = x + 2 * xs * ld_i32(order, first + row)
        for i in range(0, k_in, 32):
            part = vld_raw(source, i) if i + 32 <= k_in else vld_raw_part(source, i, k_in - i)
            vst(0.0, to, (PANEL * i + 32 * row) // 2, part)


@inlined
def _list_units(group, at, row_slot, order, first, rows, lanes, units):
    """Write the A of every lane and the units of the slots that have the pair; returns how many.

    A lane without a row, or without the pair, gets the A of another: its results are not used.
    """
    a_table, b_table, scales = ld_i64(group, at), ld_i64(group, at + 1), ld_i64(group, at + 2)
    count, some, before = 0, 0, -1
    for lane in range(rows):
        slot = ld_i32(row_slot, ld_i32(order, first + lane))
        a, b = ld_i64(a_table, slot), ld_i64(b_table, slot)
        if b == 0:
            a = 0
        st_i64(lanes, lane, a)
        if a != 0 and slot == before:
            unit = UNIT * (count - 1)
            st_i64(units, unit + 2, ld_i64(units, unit + 2) + 1)
        elif a != 0:
            some = a
            st_i64(units, UNIT * count, b)
            st_i64(units, UNIT * count + 1, lane)
            st_i64(units, UNIT * count + 2, 1)
            st_i64(units, UNIT * count + 3, scales + 4 * slot)
            count += 1
        before = slot
    for lane in range(PANEL):
        if lane >= rows or ld_i64(lanes, lane) == 0:
            st_i64(lanes, lane, some)
    return count


@kernel
def lora_dot_kernel(tag, group, scratch, x, xs, out, os, row_slot, n):
    """Add every row's delta, elements bf16: `tag` is an int. The rest is `lora_delta_kernel`'s."""
    k_in, rank = ld_i64(group, 0), ld_i64(group, 1)
    max_loras, slices = ld_i64(group, 2), ld_i64(group, 3)
    panel = (scratch + 63) // 64 * 64
    lanes = panel + 2 * PANEL * ((k_in + 31) // 32 * 32)
    units = lanes + 8 * PANEL
    xa = units + 8 * UNIT * PANEL
    columns = xa + (2 * PANEL * rank + 63) // 64 * 64
    order = columns + 2 * 32 * rank
    bad, placed = order_rows(row_slot, n, max_loras, order)
    if bad >= 0:
        return bad
    for first in range(0, placed, PANEL):
        rows = min(PANEL, placed - first)
        slot = ld_i32(row_slot, ld_i32(order, first))
        alone = ld_i32(row_slot, ld_i32(order, first + rows - 1)) == slot
        if rows > FEW and not alone:
            _copy_panel(x, xs, k_in, order, first, rows, panel)
        for j in range(slices):
            at = HEADER + j * FIELDS
            count = _list_units(group, at, row_slot, order, first, rows, lanes, units)
            if count == 0:
                continue
            if rows > FEW and not alone:
                _shrink_panel(lanes, k_in, rank, panel, xa)
            else:
                lane = 0
                while lane < rows:
                    a, here = ld_i64(lanes, lane), x + 2 * xs * ld_i32(order, first + lane)
                    if alone and lane + 1 < rows:
                        there = x + 2 * xs * ld_i32(order, first + lane + 1)
                        _shrink_rows(a, k_in, rank, here, there, xa, lane)
                        lane += 2
                    else:
                        _shrink_row(a, k_in, rank, here, xa, lane)
                        lane += 1
            n_out, column = ld_i64(group, at + 3), ld_i64(group, at + 4)
            _expand(units, count, n_out, rank, xa, order, first, out, os, column, columns)
    return -1
