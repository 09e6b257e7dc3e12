"""Causal attention over paged KV for decode rows and prefill rows alike.

One arithmetic for both: scores, softmax and the weighted sum in fp32, keys taken in the order of
their positions. So a row's result depends on its own query and its own `lens` keys alone: not on
other rows, their number, or on how a prefill was cut into chunks. Cache slots at or after `lens`
are never read.
"""

from __future__ import annotations

import torch

from .rope import BLOCK_TOKENS


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
