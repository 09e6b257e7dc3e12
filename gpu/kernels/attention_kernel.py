"""The numba kernel of paged attention: one arithmetic for decode rows and prefill rows.

Rows of one sequence go in tiles of up to `ROW_TILE` that share the conversion of keys and values.
Per tile and key/value head: scores block by block against the transposed keys, softmax over the
whole row, then the weighted sum of the values block by block. Three query heads at a time share
loads; a single row of a narrow group reads the cache directly instead of through scratch memory.
None of that changes the order of a row's operations: a score adds head_dim / 4 products in each of
four sums, the softmax sums sixteen keys side by side, an output adds its keys one by one.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import numpy as np

from .bf16 import (
    inlined,
    kernel,
    ld,
    ld_i32,
    prefetch,
    st,
    vadd,
    vexp,
    vfirst,
    vfma,
    vld,
    vld_columns,
    vld_pairs,
    vld_upto,
    vmax,
    vmaximum,
    vmul,
    vsplat,
    vst,
    vst_pairs,
    vst_upto,
    vsub,
    vsum,
    width,
)

ROW_TILE = 16


def scratch_bytes(heads: int, kv_heads: int, head_dim: int, max_blocks: int) -> int:
    """Bytes the kernel needs for sequences of up to `max_blocks` blocks."""
    queries = ROW_TILE * (heads // kv_heads)
    wide = head_dim + 16
    return 4 * (2 * 16 * wide + 2 * queries * wide + queries * max_blocks * 16) + 64


@inlined
def _step(query, f, c0, c1, c2, c3, sums):
    """Four more products in the four sums of one head's scores."""
    s0, s1, s2, s3 = sums
    return (
        vfma(vsplat(ld(0.0, query, f)), c0, s0),
        vfma(vsplat(ld(0.0, query, f + 1)), c1, s1),
        vfma(vsplat(ld(0.0, query, f + 2)), c2, s2),
        vfma(vsplat(ld(0.0, query, f + 3)), c3, s3),
    )


@inlined
def _total(sums):
    return vadd(vadd(sums[0], sums[1]), vadd(sums[2], sums[3]))


@inlined
def _store_columns(tag, cache, at, head_dim, keys):
    """A block's keys, transposed: sixteen keys side by side for each dimension."""
    for d in range(0, head_dim, 8):
        c = vld_columns(tag, cache, at + d, head_dim)
        vst(0.0, keys, 16 * d, c[0])
        vst(0.0, keys, 16 * d + 16, c[1])
        vst(0.0, keys, 16 * d + 32, c[2])
        vst(0.0, keys, 16 * d + 48, c[3])
        vst(0.0, keys, 16 * d + 64, c[4])
        vst(0.0, keys, 16 * d + 80, c[5])
        vst(0.0, keys, 16 * d + 96, c[6])
        vst(0.0, keys, 16 * d + 112, c[7])


@inlined
def _store_values(tag, cache, at, head_dim, wide, count, values):
    """A block's first `count` values, ordered as `vld_pairs` orders them."""
    for key in range(count):
        source, to = at + key * head_dim, key * wide
        paired = head_dim - head_dim % 32
        for d in range(0, paired, 32):
            low, high = vld_pairs(tag, cache, source + d)
            vst(0.0, values, to + d, low)
            vst(0.0, values, to + d + 16, high)
        for d in range(paired, head_dim, 16):
            vst(0.0, values, to + d, vld_upto(tag, cache, source + d, head_dim - d))


@inlined
def _weigh(p, v0, v1, v2, v3, sums):
    """One more key in 64 dimensions of one head's output."""
    s0, s1, s2, s3 = sums
    return vfma(p, v0, s0), vfma(p, v1, s1), vfma(p, v2, s2), vfma(p, v3, s3)


@inlined
def _load4(base, at):
    return (
        vld(0.0, base, at),
        vld(0.0, base, at + 16),
        vld(0.0, base, at + 32),
        vld(0.0, base, at + 48),
    )


@inlined
def _store4(base, at, four):
    vst(0.0, base, at, four[0])
    vst(0.0, base, at + 16, four[1])
    vst(0.0, base, at + 32, four[2])
    vst(0.0, base, at + 48, four[3])


@inlined
def _ask(tag, cache, tables, entry, kv_heads, kv_head, head_dim):
    """Ask for the block of table cell `entry`: blocks lie anywhere, no hardware foresees them."""
    size = 16 * head_dim * width(tag)
    at = cache + (ld_i32(tables, entry) * kv_heads + kv_head) * size
    for line in range(0, size, 64):
        prefetch(at + line)


@inlined
def _softmax(scores, at, seen):
    """Turn scores into exp(score - largest) in place; the return value is 1 / their sum."""
    top = vsplat(np.float32(-np.inf))
    for i in range(0, seen, 16):
        top = vmax(top, vld(0.0, scores, at + i))
    top = vsplat(vmaximum(top))
    total = vsplat(np.float32(0.0))
    for i in range(0, seen, 16):
        p = vexp(vsub(vld(0.0, scores, at + i), top))
        vst(0.0, scores, at + i, p)
        total = vadd(total, p)
    return np.float32(1.0) / vsum(total)


@kernel
def paged_attention_kernel(
    tag,
    q,
    qs,
    heads,
    head_dim,
    k_cache,
    v_cache,
    kv_heads,
    tables,
    ts,
    row_seq,
    lens,
    scale,
    out,
    os,
    n,
    scratch,
):
    """`paged_attention_reference` over raw addresses; head_dim is a multiple of 8."""
    minus_inf = vsplat(np.float32(-np.inf))
    zero = vsplat(np.float32(0.0))
    zeros = (zero, zero, zero, zero)
    group = heads // kv_heads
    wide = (head_dim + 15) // 16 * 16
    factor = vsplat(np.float32(scale))
    keys = (scratch + 63) // 64 * 64
    values = keys + 4 * 16 * wide
    query = values + 4 * 16 * wide
    sums = query + 4 * ROW_TILE * group * wide
    scores = sums + 4 * ROW_TILE * group * wide
    first = 0
    while first < n:
        seq = ld_i32(row_seq, first)
        tile = 1
        longest = ld_i32(lens, first)
        while first + tile < n and tile < ROW_TILE and ld_i32(row_seq, first + tile) == seq:
            longest = max(longest, ld_i32(lens, first + tile))
            tile += 1
        blocks = (longest + 15) // 16
        span = blocks * 16
        direct = tile == 1 and group <= 3 and head_dim % 64 == 0
        for kv_head in range(kv_heads):
            for u in range(tile * group):
                at = (first + u // group) * qs + (kv_head * group + u % group) * head_dim
                for d in range(0, head_dim, 16):
                    vst(0.0, query, u * wide + d, vld_upto(tag, q, at + d, head_dim - d))
                    vst(0.0, sums, u * wide + d, zero)
            for b in range(blocks):
                at = (ld_i32(tables, seq * ts + b) * kv_heads + kv_head) * 16 * head_dim
                if b + 1 < blocks:
                    _ask(tag, k_cache, tables, seq * ts + b + 1, kv_heads, kv_head, head_dim)
                if not direct:
                    _store_columns(tag, k_cache, at, head_dim, keys)
                for t in range(tile):
                    seen = ld_i32(lens, first + t) - b * 16
                    if seen <= 0:
                        continue
                    for g in range(0, group, 3):
                        # A group that three does not divide repeats its last head.
                        u0 = t * group + g
                        u1 = t * group + min(g + 1, group - 1)
                        u2 = t * group + min(g + 2, group - 1)
                        f0, f1, f2 = u0 * wide, u1 * wide, u2 * wide
                        s0, s1, s2 = zeros, zeros, zeros
                        if direct:
                            for d in range(0, head_dim, 8):
                                c = vld_columns(tag, k_cache, at + d, head_dim)
                                s0 = _step(query, f0 + d, c[0], c[1], c[2], c[3], s0)
                                s1 = _step(query, f1 + d, c[0], c[1], c[2], c[3], s1)
                                s2 = _step(query, f2 + d, c[0], c[1], c[2], c[3], s2)
                                s0 = _step(query, f0 + d + 4, c[4], c[5], c[6], c[7], s0)
                                s1 = _step(query, f1 + d + 4, c[4], c[5], c[6], c[7], s1)
                                s2 = _step(query, f2 + d + 4, c[4], c[5], c[6], c[7], s2)
                        else:
                            for d in range(0, head_dim, 4):
                                c0, c1, c2, c3 = _load4(keys, 16 * d)
                                s0 = _step(query, f0 + d, c0, c1, c2, c3, s0)
                                s1 = _step(query, f1 + d, c0, c1, c2, c3, s1)
                                s2 = _step(query, f2 + d, c0, c1, c2, c3, s2)
                        to = b * 16
                        score = vfirst(vmul(_total(s0), factor), seen, minus_inf)
                        vst(0.0, scores, u0 * span + to, score)
                        score = vfirst(vmul(_total(s1), factor), seen, minus_inf)
                        vst(0.0, scores, u1 * span + to, score)
                        score = vfirst(vmul(_total(s2), factor), seen, minus_inf)
                        vst(0.0, scores, u2 * span + to, score)
            for u in range(tile * group):
                # The query is done with: its first element keeps 1 / sum.
                seen = ld_i32(lens, first + u // group)
                st(0.0, query, u * wide, _softmax(scores, u * span, seen))
            if direct:
                w0 = 0
                w1 = min(1, group - 1) * span
                w2 = min(2, group - 1) * span
                for d in range(0, head_dim, 64):
                    s0, s1, s2 = zeros, zeros, zeros
                    for b in range(blocks):
                        at = (ld_i32(tables, seq * ts + b) * kv_heads + kv_head) * 16 * head_dim + d
                        if b + 1 < blocks:
                            entry = seq * ts + b + 1
                            _ask(tag, v_cache, tables, entry, kv_heads, kv_head, head_dim)
                        for key in range(min(16, longest - b * 16)):
                            v0, v1 = vld_pairs(tag, v_cache, at + key * head_dim)
                            v2, v3 = vld_pairs(tag, v_cache, at + key * head_dim + 32)
                            to = b * 16 + key
                            s0 = _weigh(vsplat(ld(0.0, scores, w0 + to)), v0, v1, v2, v3, s0)
                            s1 = _weigh(vsplat(ld(0.0, scores, w1 + to)), v0, v1, v2, v3, s1)
                            s2 = _weigh(vsplat(ld(0.0, scores, w2 + to)), v0, v1, v2, v3, s2)
                    _store4(sums, d, s0)
                    if group > 1:
                        _store4(sums, wide + d, s1)
                    if group > 2:
                        _store4(sums, 2 * wide + d, s2)
            else:
                for b in range(blocks):
                    at = (ld_i32(tables, seq * ts + b) * kv_heads + kv_head) * 16 * head_dim
                    count = min(16, longest - b * 16)
                    _store_values(tag, v_cache, at, head_dim, wide, count, values)
                    for t in range(tile):
                        seen = min(16, ld_i32(lens, first + t) - b * 16)
                        if seen <= 0:
                            continue
                        for g in range(group):
                            u = t * group + g
                            weight = u * span + b * 16
                            whole = wide - wide % 64
                            for d in range(0, whole, 64):
                                s0 = _load4(sums, u * wide + d)
                                for key in range(seen):
                                    p = vsplat(ld(0.0, scores, weight + key))
                                    v0, v1, v2, v3 = _load4(values, key * wide + d)
                                    s0 = _weigh(p, v0, v1, v2, v3, s0)
                                _store4(sums, u * wide + d, s0)
                            for d in range(whole, wide, 16):
                                s = vld(0.0, sums, u * wide + d)
                                for key in range(seen):
                                    p = vsplat(ld(0.0, scores, weight + key))
                                    s = vfma(p, vld(0.0, values, key * wide + d), s)
                                vst(0.0, sums, u * wide + d, s)
            paired = head_dim - head_dim % 32
            for u in range(tile * group):
                inverse = vsplat(ld(0.0, query, u * wide))
                at = (first + u // group) * os + (kv_head * group + u % group) * head_dim
                for d in range(0, paired, 32):
                    low = vmul(vld(0.0, sums, u * wide + d), inverse)
                    high = vmul(vld(0.0, sums, u * wide + d + 16), inverse)
                    vst_pairs(tag, out, at + d, low, high)
                for d in range(paired, head_dim, 16):
                    v = vmul(vld(0.0, sums, u * wide + d), inverse)
                    vst_upto(tag, out, at + d, v, head_dim - d)
        first += tile
