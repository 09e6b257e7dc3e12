"""Rotary embedding of q and k, optional head norm before it, and the write into paged KV.

Half-split rotation with transformers' rounding (`apply_rotary_pos_emb`): cos and sin rounded to the
element type, then q * cos, rotate_half(q) * sin and their sum each rounded. A table narrower than
head_dim rotates only the leading dimensions (partial rotary). A row's result depends on that row
alone.
"""

from __future__ import annotations

import torch

from .bf16 import (
    inlined,
    kernel,
    ld_i32,
    ld_i64,
    vadd,
    vld_upto,
    vmul,
    vround,
    vst_upto,
    vsub,
    width,
)
from .norm import rms_norm_kernel, rms_norm_reference

_norm_rows = rms_norm_kernel.device

BLOCK_TOKENS = 16


def rope_and_cache_reference(
    qkv: torch.Tensor,
    heads: int,
    kv_heads: int,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    q_norm_w: torch.Tensor | None = None,
    k_norm_w: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    one_plus: bool = False,
) -> None:
    """Rotate q in place; write rotated k and plain v into the caches.

    Args:
        qkv: [n, (heads + 2 * kv_heads) * head_dim], q heads then k heads then v heads; any row
            stride. The k columns may be overwritten.
        heads: query heads.
        kv_heads: key/value heads.
        positions: i32 [n], the row of the tables to use.
        cos: f32 [max_positions, rotary_dim / 2].
        sin: as `cos`.
        k_cache: [blocks, kv_heads, 16, head_dim], contiguous.
        v_cache: as `k_cache`.
        slot_mapping: i64 [n], block * 16 + offset in the block.
        q_norm_w: [head_dim], RMS norm of every q head before the rotation, or None.
        k_norm_w: the same for k heads.
        eps: of those norms.
        one_plus: those norms multiply by 1 + w in fp32.
    """
    rows = qkv.shape[0]
    head_dim = k_cache.shape[3]
    split = qkv.view(qkv.shape[0], heads + 2 * kv_heads, head_dim)
    q, k, v = split[:, :heads], split[:, heads : heads + kv_heads], split[:, heads + kv_heads :]
    index = positions.long()
    c = cos[index].to(qkv.dtype).unsqueeze(1)
    s = sin[index].to(qkv.dtype).unsqueeze(1)
    half = cos.shape[1]
    for part, weight in ((q, q_norm_w), (k, k_norm_w)):
        if weight is not None:
            flat = part.reshape(-1, head_dim).clone()
            rms_norm_reference(flat, weight, eps, flat, one_plus=one_plus)
            part.copy_(flat.view(part.shape))
        low, high = part[..., :half].clone(), part[..., half : 2 * half].clone()
        part[..., :half] = low * c + (-high) * s
        part[..., half : 2 * half] = high * c + low * s
    for row in range(rows):
        block, offset = divmod(int(slot_mapping[row]), BLOCK_TOKENS)
        k_cache[block, :, offset] = k[row]
        v_cache[block, :, offset] = v[row]


@inlined
def _turn(tag, x, at, half, cos, sin, table_at):  # type: ignore[no-untyped-def]  # numba types it
    """Rotate one head in place."""
    for i in range(0, half, 16):
        count = half - i
        c = vround(tag, vld_upto(0.0, cos, table_at + i, count))
        s = vround(tag, vld_upto(0.0, sin, table_at + i, count))
        low = vld_upto(tag, x, at + i, count)
        high = vld_upto(tag, x, at + half + i, count)
        turned = vsub(vround(tag, vmul(low, c)), vround(tag, vmul(high, s)))
        vst_upto(tag, x, at + i, turned, count)
        turned = vadd(vround(tag, vmul(high, c)), vround(tag, vmul(low, s)))
        vst_upto(tag, x, at + half + i, turned, count)


@inlined
def _copy(tag, source, at, target, to, count):  # type: ignore[no-untyped-def]  # numba types it
    for i in range(0, count, 16):
        vst_upto(tag, target, to + i, vld_upto(tag, source, at + i, count - i), count - i)


@kernel
def rope_and_cache_kernel(  # type: ignore[no-untyped-def]  # numba types it
    tag,
    qkv,
    stride,
    n,
    heads,
    kv_heads,
    head_dim,
    half,
    positions,
    cos,
    sin,
    k_cache,
    v_cache,
    slots,
    q_norm,
    k_norm,
    eps,
    one_plus,
):
    """`rope_and_cache_reference` over raw addresses; `half` = rotary_dim / 2, norm 0 = none."""
    for row in range(n):
        base = row * stride
        table_at = ld_i32(positions, row) * half
        for head in range(heads + kv_heads):
            at = base + head * head_dim
            weight = q_norm if head < heads else k_norm
            if weight:
                here = qkv + at * width(tag)
                _norm_rows(tag, 0, one_plus, here, 0, 0, 0, weight, eps, here, 0, 1, head_dim)
            _turn(tag, qkv, at, half, cos, sin, table_at)
        slot = ld_i64(slots, row)
        block, offset = slot // BLOCK_TOKENS, slot % BLOCK_TOKENS
        for head in range(kv_heads):
            to = ((block * kv_heads + head) * BLOCK_TOKENS + offset) * head_dim
            _copy(tag, qkv, base + (heads + head) * head_dim, k_cache, to, head_dim)
            _copy(tag, qkv, base + (heads + kv_heads + head) * head_dim, v_cache, to, head_dim)
