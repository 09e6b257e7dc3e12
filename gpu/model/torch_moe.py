"""A mixture-of-experts block in torch on any torch device; decode steps capture it.

What it owns: nothing. Every (token, expert) choice is a place of its own; places are sorted by
expert and each of the experts' linears runs once over all of them, so shapes follow from the number
of tokens alone. Invariants: those of `torch_model`; a row's experts are added in the order of their
ids, each sum rounded to the element type; the delta of a row's adapter is added to router, experts
and shared expert alike.

Cost: with grouped_mm (bfloat16, where the space has it) only the weights of chosen experts are
read; else every expert multiplies a row of every token, ``experts / top_k`` times the work.

Formulas and rounding points are those of transformers' `Qwen3_5MoeSparseMoeBlock`.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from ..kernels.act import silu_mul_reference
from ..kernels.route import route_reference
from ..tensors import TensorSpace
from .adapters import ROUTER, SHARED_DOWN, SHARED_GATE, SHARED_GATE_UP
from .hybrid_config import MoeShape
from .hybrid_weights import MoeWeights
from .torch_model import Places, Step, feed_forward
from .torch_ops import TorchExperts


class TorchMoe:
    """The block of one layer.

    Args:
        weights: packed by a `TorchPacker` of the same space.
    """

    def __init__(self, shape: MoeShape, weights: MoeWeights, space: TensorSpace) -> None:
        assert isinstance(weights.gate_up, TorchExperts) and isinstance(weights.down, TorchExperts)
        self._shape, self._weights = shape, weights
        self._gate_up, self._down = weights.gate_up.weight, weights.down.weight
        grouped = space.grouped and self._down.dtype is torch.bfloat16
        # Rows of matrices must start on 16 bytes for it.
        self._grouped = grouped and not (self._gate_up.shape[2] % 8 or self._down.shape[2] % 8)

    def __call__(self, x: torch.Tensor, step: Step, layer: int) -> torch.Tensor:
        """What the block adds to the residual stream.

        Args:
            x: ``[n, hidden]``, contiguous.

        Returns:
            ``[n, hidden]``, newly made.
        """
        weights, (n, hidden), k = self._weights, x.shape, self._shape.top_k
        logits = weights.router(x)
        step.add(layer, ROUTER, x, logits)
        shares, chosen = logits.new_empty((n, k)), logits.new_empty((n, k), dtype=torch.int32)
        route_reference(logits, shares, chosen)
        ids, at = chosen.long().sort(1)
        shares = shares.gather(1, at)
        experts, order = ids.flatten().sort(stable=True)
        places = Places(experts, order.div(k, rounding_mode="floor"), order)
        y = self._routed(x, step, layer, places)
        parts = torch.empty_like(y).index_copy_(0, order, y).view(n, k, hidden) * shares[..., None]
        out = parts[:, 0]
        for turn in range(1, k):
            out = out + parts[:, turn]
        gate = weights.shared_gate(x)
        step.add(layer, SHARED_GATE, x, gate)
        mlp, groups = weights.shared, (SHARED_GATE_UP, SHARED_DOWN)
        shared = feed_forward(mlp.gate_up, mlp.down, x, step, layer, groups)
        return out + shared * torch.sigmoid(gate)

    def _routed(self, x: torch.Tensor, step: Step, layer: int, places: Places) -> torch.Tensor:
        """Each place's expert on its token: ``[n * top_k, hidden]``, sorted by expert."""
        n, ends = x.shape[0], None
        if self._grouped:
            every = torch.arange(self._shape.experts, device=x.device)
            ends = torch.searchsorted(places.experts, every, right=True).to(torch.int32)
        taken = x.index_select(0, places.tokens)
        wide = self._multiply(taken, self._gate_up, places, n, ends)
        step.add_experts(layer, 0, taken, wide, places)
        acted = wide.new_empty((wide.shape[0], self._shape.inner))
        silu_mul_reference(wide, acted)
        y = self._multiply(acted, self._down, places, n, ends)
        step.add_experts(layer, 1, acted, y, places)
        return y

    @staticmethod
    def _multiply(
        x: torch.Tensor,
        matrices: torch.Tensor,
        places: Places,
        n: int,
        ends: torch.Tensor | None,
    ) -> torch.Tensor:
        """``[places, k_in]`` by ``[experts, n_out, k_in]`` to ``[places, n_out]``."""
        if ends is not None:
            return functional.grouped_mm(x, matrices.transpose(1, 2), offs=ends)
        spread = x.new_zeros((matrices.shape[0], n, x.shape[1]))
        spread.index_put_((places.experts, places.tokens), x)
        return (spread @ matrices.transpose(1, 2))[places.experts, places.tokens]
