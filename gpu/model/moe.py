"""A mixture-of-experts block on the host: rows grouped by expert, each expert run once a step.

What it owns: nothing. Invariants: a row's experts and their results depend on the row alone; they
are added in the order of the experts' ids, each sum rounded to the element type, whatever other
rows the step has; the delta of a row's adapter is added to router, experts and shared expert alike.

Formulas and rounding points are those of transformers' `Qwen3_5MoeSparseMoeBlock`.
"""

from __future__ import annotations

import torch

from ..kernels.host import HostKernels
from ..kernels.memory import view_at
from .adapters import (
    FIRST_EXPERT,
    ROUTER,
    SHARED_DOWN,
    SHARED_GATE,
    SHARED_GATE_UP,
    LayerPlan,
)
from .groups import Delta
from .hybrid_config import MoeShape
from .hybrid_weights import DenseWeights, MoeWeights


class MoeBlock:
    """The block of every layer of one model.

    Args:
        shape: its sizes.
        rows: most tokens of a step.
    """

    def __init__(self, shape: MoeShape, kernels: HostKernels, rows: int) -> None:
        self._shape, self._kernels = shape, kernels
        self._weights = torch.zeros((rows, shape.top_k), dtype=kernels.dtype)
        self._ids = torch.zeros((rows, shape.top_k), dtype=torch.int32)
        # A linear wants its input contiguous, so a buffer for each width.
        self._acted = {
            width: torch.zeros((rows, width), dtype=kernels.dtype)
            for width in (shape.inner, shape.shared)
        }

    def run(
        self, layer: MoeWeights, x: torch.Tensor, plan: LayerPlan | None, row_slots: int
    ) -> torch.Tensor:
        """What the block adds to the residual stream.

        Args:
            x: ``[n, hidden]``, contiguous.
            plan: LoRA groups of the layer, or ``None``.
            row_slots: address of int32 ``[n]``.

        Returns:
            ``[n, hidden]``, newly allocated.
        """
        n, kernels = x.shape[0], self._kernels
        logits = layer.router(x)
        if plan is not None:
            _add(plan[ROUTER], x, logits, row_slots)
        weights, ids = self._weights[:n], self._ids[:n]
        kernels.route(logits, weights, ids)
        on_experts = None if plan is None else plan[FIRST_EXPERT:]
        out = self._routed(layer, x, weights, ids, on_experts, row_slots)
        gate = layer.shared_gate(x)
        if plan is None:
            shared = self._feed(layer.shared, x, None, None, row_slots)
        else:
            _add(plan[SHARED_GATE], x, gate, row_slots)
            on_up, on_down = plan[SHARED_GATE_UP], plan[SHARED_DOWN]
            shared = self._feed(layer.shared, x, on_up, on_down, row_slots)
        kernels.sigmoid_mul(shared[:, None, :], gate[:, :, None])
        return out.add_(shared)

    def _routed(
        self,
        layer: MoeWeights,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        groups: LayerPlan | None,
        row_slots: int,
    ) -> torch.Tensor:
        out, n_experts = torch.zeros_like(x), self._shape.experts
        slots = view_at(row_slots, (len(x),), torch.int32) if groups else None
        # Places of the table [n, k] by expert; stable, so that rows stay in order.
        chosen, order = ids.flatten().sort(stable=True)
        counts = torch.bincount(chosen, minlength=self._shape.experts)
        rows = order.div(ids.shape[1], rounding_mode="floor")
        shares = weights.flatten()[order, None]
        at = 0
        for expert, count in enumerate(counts.tolist()):
            if not count:
                continue
            mine = rows[at : at + count]
            taken = x.index_select(0, mine)
            weights_of = DenseWeights(layer.gate_up[expert], layer.down[expert])
            if groups and slots is not None:
                own = slots.index_select(0, mine)
                deltas = groups[expert], groups[n_experts + expert]
                y = self._feed(weights_of, taken, *deltas, own.data_ptr())
            else:
                y = self._feed(weights_of, taken, None, None, 0)
            out.index_add_(0, mine, y.mul_(shares[at : at + count]))
            at += count
        return out

    def _feed(
        self,
        weights: DenseWeights,
        x: torch.Tensor,
        on_gate_up: Delta | None,
        on_down: Delta | None,
        row_slots: int,
    ) -> torch.Tensor:
        gate_up = weights.gate_up(x)
        _add(on_gate_up, x, gate_up, row_slots)
        acted = self._acted[gate_up.shape[1] // 2][: x.shape[0]]
        self._kernels.silu_mul(gate_up, acted)
        y = weights.down(acted)
        _add(on_down, acted, y, row_slots)
        return y


def _add(group: Delta | None, x: torch.Tensor, y: torch.Tensor, row_slots: int) -> None:
    if group is not None:
        rows = x.shape[0]
        group.apply(x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0), row_slots, rows)
