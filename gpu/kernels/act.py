"""The gated activation silu(gate) * up: torch reference and numba kernel.

Rounding points are those of transformers' `LlamaMLP`: silu in fp32 rounded to the element type,
then the product rounded. A row's result depends on that row alone.
"""

from __future__ import annotations

import numpy as np
import torch

from .bf16 import kernel, vadd, vdiv, vexp, vld_upto, vmul, vround, vsplat, vst_upto, vsub


def silu_mul_reference(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """Write silu(gate_up[:, :I]) * gate_up[:, I:] into `out`.

    Args:
        gate_up: [n, 2 * I], any row stride.
        out: [n, I], any row stride.
    """
    inter = out.shape[1]
    out.copy_(torch.nn.functional.silu(gate_up[:, :inter]) * gate_up[:, inter:])


@kernel
# Numba types it.
def silu_mul_kernel(tag, gate_up, gs, out, os, n, inter):  # type: ignore[no-untyped-def]
    """`silu_mul_reference` over raw addresses; strides in elements."""
    one, zero = vsplat(np.float32(1.0)), vsplat(np.float32(0.0))
    for row in range(n):
        at = row * gs
        for i in range(0, inter, 16):
            gate = vld_upto(tag, gate_up, at + i, inter - i)
            up = vld_upto(tag, gate_up, at + inter + i, inter - i)
            silu = vround(tag, vdiv(gate, vadd(one, vexp(vsub(zero, gate)))))
            vst_upto(tag, out, row * os + i, vmul(silu, up), inter - i)
