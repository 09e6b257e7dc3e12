"""What every family's forward pass in torch shares: what it is told of a step, and its two ends.

What it owns: the embedding, the final norm, lm_head and the rotary tables on the device.
Invariants: nothing here, or in the families that build on it, reads a value on the host or makes a
shape from one, so a decode step can be captured; without `Deltas` no LoRA kernel is launched; the
delta of a row's adapter is added to the raw output of its linear.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch

from ..kernels.act import silu_mul_reference
from ..kernels.norm import rms_norm_reference
from ..tensors import TensorSpace
from .adapters import DOWN, GATE_UP
from .config import ModelConfig
from .rope import rope_tables
from .tensors import Linear
from .torch_gdn import StateStep
from .torch_ops import Attend, TorchLinear
from .weights import HybridWeights, Weights


@dataclass(frozen=True, slots=True)
class Places:
    """The experts that a step's tokens chose, sorted by expert; each choice is a place.

    Attributes:
        experts: int64 ``[n * top_k]``. tokens: int64, of the same shape, whose choice it is.
        order: int64, of the same shape: where the place was, token by token.
    """

    experts: torch.Tensor
    tokens: torch.Tensor
    order: torch.Tensor


class Deltas(Protocol):
    """Adds the adapters' deltas of one step."""

    def add(self, layer: int, group: int, x: torch.Tensor, out: torch.Tensor) -> None:
        """``out += delta(x)`` for the modules of ``adapters.GROUPS[group]`` side by side in out."""
        ...

    def add_experts(
        self, layer: int, half: int, x: torch.Tensor, out: torch.Tensor, places: Places
    ) -> None:
        """The same for ``adapters.OF_EXPERT[half]`` of each place's expert and token."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """What the layers need to know of a step's tokens; all on the device.

    ``positions``: int64 ``[n]``; ``mapping``: int64 ``[n]``, the cell each token's KV goes to;
    ``states``: which recurrent states move on, in families that have any.
    """

    positions: torch.Tensor
    mapping: torch.Tensor
    attend: Attend
    deltas: Deltas | None
    states: StateStep | None = None

    def add(self, layer: int, group: int, x: torch.Tensor, out: torch.Tensor) -> None:
        """See `Deltas.add`; nothing without adapters."""
        if self.deltas is not None:
            self.deltas.add(layer, group, x, out)

    def add_experts(
        self, layer: int, half: int, x: torch.Tensor, out: torch.Tensor, places: Places
    ) -> None:
        """See `Deltas.add_experts`; nothing without adapters."""
        if self.deltas is not None:
            self.deltas.add_experts(layer, half, x, out, places)


class TorchModel(ABC):
    """The two ends of one model on one tensor space; families add `layers`.

    Args:
        weights: packed by a `TorchPacker` of the same space.
        positions: positions the rotary tables cover.
    """

    one_plus = False
    """Norms multiply by 1 + w."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights | HybridWeights,
        space: TensorSpace,
        *,
        positions: int,
    ) -> None:
        self._config = config
        up = space.upload
        self._final_norm = up(weights.final_norm)
        self._head = weights.head
        # A tied matrix lies on the device once.
        if config.tied and isinstance(weights.head, TorchLinear):
            self._embed = weights.head.weight
        else:
            self._embed = up(weights.embed)
        cos, sin = rope_tables(config, positions)
        self._cos, self._sin = up(cos), up(sin)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[n, hidden]`` of int64 ``[n]``, newly made."""
        return self._embed.index_select(0, tokens)

    @abstractmethod
    def layers(self, h: torch.Tensor, step: Step) -> torch.Tensor:
        """Run every layer, writing the KV and states of all tokens.

        Args:
            h: what `embed` made; changed in place.

        Returns:
            The final residual stream ``[n, hidden]``.
        """

    def states(self, h: torch.Tensor) -> torch.Tensor:
        """The final norm: what lm_head is given. ``[m, hidden]`` to the same, newly made."""
        out = torch.empty_like(h)
        eps = self._config.rms_eps
        rms_norm_reference(h, self._final_norm, eps, out, one_plus=self.one_plus)
        return out

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """Logits ``[m, vocab]``, engine dtype, newly made."""
        return self._head(states)

    def _angles(self, step: Step, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of every token: ``[n, 1, rotary_dim / 2]`` each."""
        cos = self._cos.index_select(0, step.positions).to(dtype)
        sin = self._sin.index_select(0, step.positions).to(dtype)
        return cos[:, None], sin[:, None]


def feed_forward(
    gate_up: Linear,
    down: Linear,
    x: torch.Tensor,
    step: Step,
    layer: int,
    groups: tuple[int, int] = (GATE_UP, DOWN),
) -> torch.Tensor:
    """down(silu(gate) * up) with the deltas of both groups: ``[n, hidden]``, newly made."""
    wide = gate_up(x)
    step.add(layer, groups[0], x, wide)
    acted = wide.new_empty((x.shape[0], wide.shape[1] // 2))
    silu_mul_reference(wide, acted)
    out = down(acted)
    step.add(layer, groups[1], acted, out)
    return out
