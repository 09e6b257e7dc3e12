"""The gated activation silu(gate) * up: torch reference and numba kernel.

Rounding points are those of transformers' `LlamaMLP`: silu in fp32 rounded to the element type,
then the product rounded. A row's result depends on that row alone.
"""

from __future__ import annotations

import torch


def silu_mul_reference(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """Write silu(gate_up[:, :I]) * gate_up[:, I:] into `out`.

    Args:
        gate_up: [n, 2 * I], any row stride.
        out: [n, I], any row stride.
    """
    inter = out.shape[1]
    out.copy_(torch.nn.functional.silu(gate_up[:, :inter]) * gate_up[:, inter:])
