"""Choosing each token's experts: torch reference and numba kernel.

Rounding points are those of transformers' `Qwen3_5MoeTopKRouter`: softmax over all experts in fp32,
the largest k divided by their sum in fp32, then rounded to the element type. The lowest id wins a
tie. A row's result depends on that row alone.
"""

from __future__ import annotations

import numpy as np
import torch

from .bf16 import (
    kernel,
    ld,
    st,
    st_i32,
    vdiv,
    vexp,
    vfirst,
    vld_upto,
    vmaximum,
    vsplat,
    vst_upto,
    vsub,
    vsum,
)

_MINUS_INF = np.float32(-np.inf)


def route_reference(logits: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
    """Write the top experts of every row, likeliest first.

    Args:
        logits: [n, experts].
        weights: [n, k] of the logits' dtype, contiguous; a row sums to 1.
        ids: i32 [n, k], contiguous.
    """
    k = ids.shape[1]
    chances = torch.softmax(logits.float(), dim=-1)
    # Stable, so that of equal chances the lowest id comes first.
    order = torch.sort(chances, dim=-1, descending=True, stable=True).indices[:, :k]
    top = chances.gather(1, order)
    weights.copy_(top / top.sum(-1, keepdim=True))
    ids.copy_(order)


@kernel
def route_kernel(  # type: ignore[no-untyped-def]  # numba types it
    tag, logits, stride, weights, ids, scratch, n, experts, k
):
    """`route_reference` over raw addresses; `scratch`: `scratch_bytes` bytes."""
    for row in range(n):
        at = row * stride
        largest = _MINUS_INF
        for i in range(0, experts, 16):
            v = vld_upto(tag, logits, at + i, experts - i)
            if experts - i < 16:
                v = vfirst(v, experts - i, vsplat(_MINUS_INF))
            largest = max(largest, vmaximum(v))
        total = np.float32(0.0)
        for i in range(0, experts, 16):
            v = vexp(vsub(vld_upto(tag, logits, at + i, experts - i), vsplat(largest)))
            if experts - i < 16:
                v = vfirst(v, experts - i, vsplat(np.float32(0.0)))
            total += vsum(v)
            vst_upto(0.0, scratch, i, v, experts - i)
        for i in range(0, experts, 16):
            v = vdiv(vld_upto(0.0, scratch, i, experts - i), vsplat(total))
            vst_upto(0.0, scratch, i, v, experts - i)
        kept = np.float32(0.0)
        for place in range(k):
            best = -1
            chance = np.float32(0.0)
            for expert in range(experts):
                p = ld(0.0, scratch, expert)
                # Chosen ones are marked -1; a row of NaN still gets k different experts.
                if p != np.float32(-1.0) and (best < 0 or p > chance):
                    best, chance = expert, p
            st(0.0, scratch, best, np.float32(-1.0))
            st(0.0, scratch, experts + place, chance)
            st_i32(ids, row * k + place, best)
            kept += chance
        for place in range(k):
            st(tag, weights, row * k + place, ld(0.0, scratch, experts + place) / kept)


def scratch_bytes(experts: int, k: int) -> int:
    """Bytes `route_kernel` needs."""
    return 4 * (experts + k + 16)
