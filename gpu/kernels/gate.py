"""Sigmoid gates: torch reference and numba kernel.

Rounding points are those of transformers' `Qwen3_5Attention` and `Qwen3_5MoeSparseMoeBlock`: the
sigmoid in fp32 rounded to the element type, then the product rounded. A row's result depends on
that row alone.
"""

from __future__ import annotations

import numpy as np
import torch

from .bf16 import kernel, ld, vadd, vdiv, vexp, vld_upto, vmul, vround, vsplat, vst_upto, vsub


def sigmoid_mul_reference(x: torch.Tensor, gate: torch.Tensor) -> None:
    """Multiply `x` by sigmoid(gate) in place.

    Args:
        x: [n, heads, width], any row stride, heads contiguous.
        gate: [n, heads, width] or [n, heads, 1] of the same dtype, any row and head stride.
    """
    # Row by row: torch computes the last few of many elements another way than those before, so
    # that a row's bits would depend on how many rows there are.
    for row, own in zip(x, gate, strict=True):
        row.mul_(torch.sigmoid(own))


@kernel
def sigmoid_mul_kernel(  # type: ignore[no-untyped-def]  # numba types it
    tag, x, xs, gate, gs, head_stride, single, n, heads, width
):
    """`sigmoid_mul_reference` over raw addresses; strides in elements, `single` 1 = one gate."""
    one, zero = vsplat(np.float32(1.0)), vsplat(np.float32(0.0))
    for row in range(n):
        for head in range(heads):
            at = row * xs + head * width
            gate_at = row * gs + head * head_stride
            for i in range(0, width, 16):
                count = width - i
                if single:
                    g = vsplat(ld(tag, gate, gate_at))
                else:
                    g = vld_upto(tag, gate, gate_at + i, count)
                g = vround(tag, vdiv(one, vadd(one, vexp(vsub(zero, g)))))
                vst_upto(tag, x, at + i, vmul(vld_upto(tag, x, at + i, count), g), count)
