"""RMS norm, alone and fused with the residual add: torch reference and numba kernel.

Rounding points are those of transformers' `LlamaRMSNorm`: the sum with the residual is rounded to
the element type, the row is normalised in fp32, x^ is rounded, and the product with w is rounded
again. With `one_plus` (transformers' `Qwen3_5RMSNorm`) the product x^ * (1 + w) is taken in fp32
and rounded once. A row's result depends on that row alone.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from .bf16 import kernel, vadd, vfma, vld_upto, vmul, vround, vsplat, vst_upto, vsum


def rms_norm_reference(
    x: torch.Tensor, w: torch.Tensor, eps: float, out: torch.Tensor, *, one_plus: bool = False
) -> None:
    """Write norm(x) * w into `out`.

    Args:
        x: [n, h], any row stride.
        w: [h], same dtype.
        eps: added to the mean square.
        out: [n, h], any row stride; may be `x`.
        one_plus: multiply by 1 + w in fp32 instead of by w.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    out.copy_(wide * (1.0 + w.float()) if one_plus else w * wide.to(x.dtype))


def add_rms_norm_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    w: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    *,
    one_plus: bool = False,
) -> None:
    """Add `x` to `residual` in place, rounded, then write norm(residual) * w into `out`.

    Shapes as in `rms_norm_reference`; `residual` is [n, h], any row stride; `out` may be `x`.
    """
    residual.add_(x)
    rms_norm_reference(residual, w, eps, out, one_plus=one_plus)


@kernel
def rms_norm_kernel(  # type: ignore[no-untyped-def]  # numba types it
    tag, add, one_plus, x, xs, res, rs, w, eps, out, os, n, h
):
    """Both functions above over raw addresses; strides in elements, `add` and `one_plus` 0 or 1."""
    one = vsplat(np.float32(1.0))
    for row in range(n):
        at = row * rs if add else row * xs
        source = res if add else x
        total = vsplat(np.float32(0.0))
        for i in range(0, h, 16):
            v = vld_upto(tag, source, at + i, h - i)
            if add:
                v = vround(tag, vadd(v, vld_upto(tag, x, row * xs + i, h - i)))
                vst_upto(tag, res, at + i, v, h - i)
            total = vfma(v, v, total)
        mean = vsum(total) / np.float32(h)
        factor = vsplat(np.float32(1.0) / np.float32(math.sqrt(mean + np.float32(eps))))
        for i in range(0, h, 16):
            v = vmul(vld_upto(tag, source, at + i, h - i), factor)
            k = vld_upto(tag, w, i, h - i)
            v = vmul(v, vadd(one, k)) if one_plus else vmul(vround(tag, v), k)
            vst_upto(tag, out, row * os + i, v, h - i)
