"""The end of every family's forward pass: the last addition and the final norm.

Invariant: a row's states depend on that row alone.
"""

from __future__ import annotations

import torch

from ..kernels.host import HostKernels


def final_states(
    kernels: HostKernels,
    norm: torch.Tensor,
    eps: float,
    h: torch.Tensor,
    delta: torch.Tensor,
    rows: list[int] | None,
    *,
    one_plus: bool = False,
) -> torch.Tensor:
    """What lm_head is given: ``[m, hidden]``, engine dtype, newly made.

    Args:
        norm: ``[hidden]``, weight of the final norm; ``eps``, ``one_plus`` as of `rms_norm`.
        h, delta: the residual stream and its last addition, ``[n, hidden]``.
        rows: the ``m`` tokens wanted; ``None``: all, in order.
    """
    if rows is not None:
        picked = torch.tensor(rows, dtype=torch.int64)
        h, delta = h.index_select(0, picked), delta.index_select(0, picked)
    states = torch.empty_like(delta)
    kernels.add_rms_norm(delta, h, norm, eps, states, one_plus=one_plus)
    return states
