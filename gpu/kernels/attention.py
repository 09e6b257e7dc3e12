"""Causal attention over paged KV for decode rows and prefill rows alike.

One arithmetic for both: scores, softmax and the weighted sum in fp32, keys taken in the order of
their positions. So a row's result depends on its own query and its own `lens` keys alone: not on
other rows, their number, or on how a prefill was cut into chunks. Cache slots at or after `lens`
are never read.
"""

from __future__ import annotations

import numpy as np
import torch

from .bf16 import (
    kernel,
    ld,
    ld_i32,
    st,
    vadd,
    vexp,
    vfirst,
    vfma,
    vld,
    vld_columns,
    vld_upto,
    vmax,
    vmaximum,
    vmul,
    vsplat,
    vst,
    vst_upto,
    vsub,
    vsum,
)
from .rope import BLOCK_TOKENS

ROW_TILE = 16
"""Rows of one sequence that share the conversion of its keys and values."""


def paged_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    row_seq: torch.Tensor,
    lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Write softmax(scale * q k^T) v into `out`.

    Args:
        q: [n, heads, head_dim], any row stride, heads contiguous.
        k_cache: [blocks, kv_heads, 16, head_dim], contiguous.
        v_cache: as `k_cache`.
        block_tables: i32 [sequences, max_blocks]; only the first ceil(lens / 16) entries are read.
        row_seq: i32 [n], the row of `block_tables`. Rows of one sequence are best kept adjacent.
        lens: i32 [n] >= 1, keys visible to the row (its position + 1).
        scale: factor of the scores, usually head_dim ** -0.5.
        out: [n, heads * head_dim], any row stride.
    """
    rows, heads, head_dim = q.shape
    kv_heads = k_cache.shape[1]
    group = heads // kv_heads
    for row in range(rows):
        seen = int(lens[row])
        blocks = block_tables[int(row_seq[row]), : -(-seen // BLOCK_TOKENS)].long()
        k = k_cache[blocks].transpose(0, 1).reshape(kv_heads, -1, head_dim)[:, :seen].float()
        v = v_cache[blocks].transpose(0, 1).reshape(kv_heads, -1, head_dim)[:, :seen].float()
        query = q[row].float().view(kv_heads, group, head_dim)
        weights = torch.softmax(torch.matmul(query, k.transpose(1, 2)) * scale, dim=-1)
        out[row] = torch.matmul(weights, v).flatten().to(out.dtype)


def scratch_bytes(heads: int, kv_heads: int, head_dim: int, max_blocks: int) -> int:
    """Bytes `paged_attention_kernel` needs for sequences of up to `max_blocks` blocks."""
    queries = ROW_TILE * (heads // kv_heads)
    wide = head_dim + 16
    return 4 * (2 * 16 * wide + 2 * queries * wide + queries * max_blocks * BLOCK_TOKENS)


@kernel
def paged_attention_kernel(  # type: ignore[no-untyped-def]
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
    """`paged_attention_reference` over raw addresses; head_dim is a multiple of 8.

    Rows of one sequence go in tiles. Per tile and key/value head: scores block by block against the
    transposed keys, softmax over the whole row, then the weighted sum of the values block by block.
    """
    minus_inf = vsplat(np.float32(-np.inf))
    group = heads // kv_heads
    wide = (head_dim + 15) // 16 * 16
    factor = vsplat(np.float32(scale))
    keys = scratch
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
        for kv_head in range(kv_heads):
            for t in range(tile):
                for g in range(group):
                    u = t * group + g
                    at = (first + t) * qs + (kv_head * group + g) * head_dim
                    for d in range(0, head_dim, 16):
                        v = vld_upto(tag, q, at + d, head_dim - d)
                        vst(0.0, query, u * wide + d, v)
                        vst(0.0, sums, u * wide + d, vsplat(np.float32(0.0)))
            for b in range(blocks):
                block = ld_i32(tables, seq * ts + b)
                at = (block * kv_heads + kv_head) * 16 * head_dim
                for d in range(0, head_dim, 8):
                    c = vld_columns(tag, k_cache, at + d, head_dim)
                    vst(0.0, keys, 16 * d, c[0])
                    vst(0.0, keys, 16 * d + 16, c[1])
                    vst(0.0, keys, 16 * d + 32, c[2])
                    vst(0.0, keys, 16 * d + 48, c[3])
                    vst(0.0, keys, 16 * d + 64, c[4])
                    vst(0.0, keys, 16 * d + 80, c[5])
                    vst(0.0, keys, 16 * d + 96, c[6])
                    vst(0.0, keys, 16 * d + 112, c[7])
                for t in range(tile):
                    seen = ld_i32(lens, first + t) - b * 16
                    if seen <= 0:
                        continue
                    for g in range(group):
                        u = t * group + g
                        s0 = vsplat(np.float32(0.0))
                        s1, s2, s3 = s0, s0, s0
                        for d in range(0, head_dim, 4):
                            f = u * wide + d
                            s0 = vfma(vsplat(ld(0.0, query, f)), vld(0.0, keys, 16 * d), s0)
                            s1 = vfma(
                                vsplat(ld(0.0, query, f + 1)), vld(0.0, keys, 16 * d + 16), s1
                            )
                            s2 = vfma(
                                vsplat(ld(0.0, query, f + 2)), vld(0.0, keys, 16 * d + 32), s2
                            )
                            s3 = vfma(
                                vsplat(ld(0.0, query, f + 3)), vld(0.0, keys, 16 * d + 48), s3
                            )
                        score = vmul(vadd(vadd(s0, s1), vadd(s2, s3)), factor)
                        vst(0.0, scores, u * span + b * 16, vfirst(score, seen, minus_inf))
            for t in range(tile):
                seen = ld_i32(lens, first + t)
                for g in range(group):
                    at = (t * group + g) * span
                    top = minus_inf
                    for i in range(0, seen, 16):
                        top = vmax(top, vld(0.0, scores, at + i))
                    top = vsplat(vmaximum(top))
                    total = vsplat(np.float32(0.0))
                    for i in range(0, seen, 16):
                        p = vexp(vsub(vld(0.0, scores, at + i), top))
                        vst(0.0, scores, at + i, p)
                        total = vadd(total, p)
                    # The query is done with: its first element keeps 1 / sum.
                    inverse = np.float32(1.0) / vsum(total)
                    st(0.0, query, (t * group + g) * wide, inverse)
            for b in range(blocks):
                block = ld_i32(tables, seq * ts + b)
                at = (block * kv_heads + kv_head) * 16 * head_dim
                for key in range(min(16, longest - b * 16)):
                    for d in range(0, head_dim, 16):
                        v = vld_upto(tag, v_cache, at + key * head_dim + d, head_dim - d)
                        vst(0.0, values, key * wide + d, v)
                for t in range(tile):
                    seen = min(16, ld_i32(lens, first + t) - b * 16)
                    if seen <= 0:
                        continue
                    for g in range(group):
                        u = t * group + g
                        weight = u * span + b * 16
                        for d in range(0, wide, 64):
                            f = u * wide + d
                            if wide - d >= 64:
                                o0 = vld(0.0, sums, f)
                                o1 = vld(0.0, sums, f + 16)
                                o2 = vld(0.0, sums, f + 32)
                                o3 = vld(0.0, sums, f + 48)
                                for key in range(seen):
                                    p = vsplat(ld(0.0, scores, weight + key))
                                    v = key * wide + d
                                    o0 = vfma(p, vld(0.0, values, v), o0)
                                    o1 = vfma(p, vld(0.0, values, v + 16), o1)
                                    o2 = vfma(p, vld(0.0, values, v + 32), o2)
                                    o3 = vfma(p, vld(0.0, values, v + 48), o3)
                                vst(0.0, sums, f, o0)
                                vst(0.0, sums, f + 16, o1)
                                vst(0.0, sums, f + 32, o2)
                                vst(0.0, sums, f + 48, o3)
                            else:
                                for e in range(0, wide - d, 16):
                                    o = vld(0.0, sums, f + e)
                                    for key in range(seen):
                                        p = vsplat(ld(0.0, scores, weight + key))
                                        o = vfma(p, vld(0.0, values, key * wide + d + e), o)
                                    vst(0.0, sums, f + e, o)
            for t in range(tile):
                for g in range(group):
                    u = t * group + g
                    inverse = vsplat(ld(0.0, query, u * wide))
                    at = (first + t) * os + (kv_head * group + g) * head_dim
                    for d in range(0, head_dim, 16):
                        v = vmul(vld(0.0, sums, u * wide + d), inverse)
                        vst_upto(tag, out, at + d, v, head_dim - d)
        first += tile
