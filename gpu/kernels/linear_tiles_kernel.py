"""The linear layer of bf16 on matrix tiles: y = x W^T (+ b), weights read once and in order.

Packed weights are panels of sixteen outputs, one after the other; a panel is k_in / 32 tiles of 16
pairs x 16 outputs x 2. Before them lies a line of four numbers: k_in, n_out, whether there is a
bias, and `chunk_rows`; after them the bias. Every sum starts at zero and takes 32 products at a
time along k_in, then the bias in fp32, and is rounded once, as oneDNN's does. Which rows go side by
side changes nothing in that.

Weights come from beyond the caches in every step, and one run of addresses does not keep the memory
busy. Up to sixteen rows, four panels a quarter of the weights apart go side by side, and x is taken
as it lies. With more rows, two panels stay near while all rows of a chunk pass 32 at a time, and
each pass asks for its share of the next two. They are half the weights apart; where rows are so
many that reading weights is not what takes the time, neighbours, so that whole lines are written.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import numpy as np

from .bf16 import (
    inlined,
    kernel,
    ld_i64,
    prefetch,
    st_i64,
    tile_config,
    tile_release,
    tile_step1,
    tile_step4,
    tile_step22,
    tile_store1,
    tile_store4,
    tile_zero1,
    tile_zero4,
    vadd,
    vld,
    vld_raw,
    vsplat,
    vst,
    vst_rounded,
)

HEADER_BYTES = 64
ROWS = 16
"""Rows of a tile, and outputs of a panel."""
DEPTH = 32
"""Products a step adds."""
FEW_ROWS = 16
FEW_PASSES = 2
"""Passes of 32 rows up to which reading weights takes most of the time."""
MOST_CHUNK_ROWS = 256
LEAST_CHUNK_ROWS = 64
CHUNK_BYTES = 1 << 20
"""Of x that is kept in the second cache while the weights pass."""
AHEAD = 1024
"""Bytes between what is multiplied and what is asked for."""


def chunk_rows(k_in: int) -> int:
    """Rows that pass at once, a multiple of 32."""
    return min(MOST_CHUNK_ROWS, max(LEAST_CHUNK_ROWS, CHUNK_BYTES // (2 * k_in) // 32 * 32))


def scratch_bytes(k_in: int, rows: int) -> int:
    """Bytes the kernel needs: the configuration, four stored tiles, and a chunk of x as tiles."""
    chunk = 0 if rows <= FEW_ROWS else min(-(-rows // 32) * 32, chunk_rows(k_in))
    return 64 + 64 + 4096 + 2 * k_in * chunk


@inlined
def _configure(config, rows):
    """Sums and tile 7 have `rows` rows, the others sixteen; all rows have 64 bytes."""
    st_i64(config, 0, 1)
    st_i64(config, 1, 0)
    st_i64(config, 2, 0x0040004000400040)
    st_i64(config, 3, 0x0040004000400040)
    st_i64(config, 4, 0)
    st_i64(config, 5, 0)
    st_i64(config, 6, rows * 0x0100000001010101 + 0x0010101000000000)
    st_i64(config, 7, 0)
    tile_config(config)


@inlined
def _emit(sums, rows, out, os, bias):
    """One stored tile to sixteen columns of `rows` rows; `bias`: address or 0."""
    if bias == 0:
        for row in range(rows):
            vst_rounded(out, row * os, vld(0.0, sums, 16 * row))
    else:
        b = vld(0, bias, 0)
        for row in range(rows):
            vst_rounded(out, row * os, vadd(vld(0.0, sums, 16 * row), b))


@inlined
def _ask16(address):
    """Ask for a tile's lines."""
    for line in range(0, 1024, 64):
        prefetch(address + line)


@inlined
def _one(w, k, bias, x, stride, step, out, os, rows, sums):
    """One panel, up to sixteen rows: rows of x `stride` bytes apart, products `step` bytes."""
    tile_zero1()
    for i in range(0, k, DEPTH):
        tile_step1(x + step * i, stride, w + 32 * i)
    tile_store1(sums)
    _emit(sums, rows, out, os, bias)


@inlined
def _few(w, k, n_out, bias, x, xs, out, os, rows, sums):
    """Up to sixteen rows."""
    panel = 2 * ROWS * k
    quarter = n_out // (4 * ROWS)
    apart = quarter * panel
    for p in range(quarter):
        at = w + p * panel
        tile_zero4()
        for i in range(0, k, DEPTH):
            ask = at + 32 * i + AHEAD
            _ask16(ask)
            _ask16(ask + apart)
            _ask16(ask + 2 * apart)
            _ask16(ask + 3 * apart)
            tile_step4(x + 2 * i, 2 * xs, at + 32 * i, apart)
        tile_store4(sums)
        for j in range(4):
            column = 2 * ROWS * (p + j * quarter)
            _emit(sums + 1024 * j, rows, out + column, os, bias + column if bias else 0)
    for o in range(4 * ROWS * quarter, n_out, ROWS):
        _one(
            w + 2 * k * o, k, bias + 2 * o if bias else 0, x, 2 * xs, 2, out + 2 * o, os, rows, sums
        )


@inlined
def _copy_tiles(x, xs, rows, k, to):
    """x as tiles, sixteen rows after sixteen; rows that are missing in the last are zero."""
    for row in range((rows + ROWS - 1) // ROWS * ROWS):
        line = to + 2 * ROWS * (row // ROWS) * k + 64 * (row % ROWS)
        if row < rows:
            for i in range(0, k, DEPTH):
                vst(0.0, line, 8 * i, vld_raw(x, row * xs + i))
        else:
            for i in range(0, k, DEPTH):
                vst(0.0, line, 8 * i, vsplat(np.float32(0.0)))


@inlined
def _many(w, k, n_out, bias, x, out, os, rows, sums):
    """A chunk of rows, x as tiles."""
    panel = 2 * ROWS * k
    half = n_out // (2 * ROWS)
    apart, far, advance = half * panel, 2 * ROWS * half, 1
    blocks = (rows + ROWS - 1) // ROWS
    passes = (blocks + 1) // 2
    if passes > FEW_PASSES:
        apart, far, advance = panel, 2 * ROWS, 2
    share = 64 * ((16 + passes - 1) // passes)
    for p in range(half):
        at = w + advance * p * panel
        ask = at + (AHEAD if passes == 1 else advance * panel)
        bias0 = bias + 2 * ROWS * advance * p if bias else 0
        bias1 = bias0 + far if bias else 0
        for block in range(0, blocks, 2):
            here = x + block * panel
            to = out + 2 * ROWS * (advance * p + block * os)
            count = min(ROWS, rows - ROWS * block)
            if block + 1 == blocks:
                _one(at, k, bias0, here, 64, 32, to, os, count, sums)
                _one(at + apart, k, bias1, here, 64, 32, to + far, os, count, sums)
                continue
            tile_zero4()
            for i in range(0, k, DEPTH):
                for line in range(0, share, 64):
                    prefetch(ask + line)
                    prefetch(ask + apart + line)
                ask += share
                tile_step22(here + 32 * i, here + panel + 32 * i, at + 32 * i, at + apart + 32 * i)
            tile_store4(sums)
            _emit(sums, count, to, os, bias0)
            _emit(sums + 1024, count, to + far, os, bias1)
            count = min(ROWS, rows - ROWS * (block + 1))
            to += 2 * ROWS * os
            _emit(sums + 2048, count, to, os, bias0)
            _emit(sums + 3072, count, to + far, os, bias1)
    if 2 * ROWS * half < n_out:
        last = 4 * ROWS * half
        for block in range(blocks):
            count = min(ROWS, rows - ROWS * block)
            to = out + last + 2 * ROWS * block * os
            here = x + block * panel
            _one(
                w + 2 * half * panel,
                k,
                bias + last if bias else 0,
                here,
                64,
                32,
                to,
                os,
                count,
                sums,
            )


@kernel
def tile_linear_kernel(tag, packed, scratch, x, xs, out, os, rows):
    """See `TileLinear`; `tag` is an int. Strides in elements."""
    k, n_out = ld_i64(packed, 0), ld_i64(packed, 1)
    w = packed + HEADER_BYTES
    bias = w + 2 * k * n_out if ld_i64(packed, 2) else 0
    config = (scratch + 63) // 64 * 64
    sums = config + 64
    if rows <= FEW_ROWS:
        _configure(config, rows)
        _few(w, k, n_out, bias, x, xs, out, os, rows, sums)
    else:
        _configure(config, ROWS)
        tiles = sums + 4096
        most = ld_i64(packed, 3)
        first = 0
        while first < rows:  # a range with a step that is not constant could raise
            count = min(most, rows - first)
            _copy_tiles(x + 2 * first * xs, xs, count, k, tiles)
            _many(w, k, n_out, bias, tiles, out + 2 * first * os, os, count, sums)
            first += count
    tile_release()
