"""RMS norm, alone and fused with the residual add: torch reference and numba kernel.

Rounding points are those of transformers' `LlamaRMSNorm`: the sum with the residual is rounded to
the element type, the row is normalised in fp32, x^ is rounded, and the product with w is rounded
again. With `one_plus` (transformers' `Qwen3_5RMSNorm`) the product x^ * (1 + w) is taken in fp32
and rounded once. A row's result depends on that row alone.
"""

from __future__ import annotations

import torch


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
