"""The llama family (llama, qwen2, qwen3) in torch on any torch device; decode steps capture it.

What it owns: the weights on the device and the rotary tables. Invariants: nothing here reads a
value on the host; the delta of a row's adapter is added before qk-norm and rope; without a `Deltas`
no LoRA kernel is launched. Unlike on the host, a BLAS may round a row differently in another batch.

Layer (transformers' ``modeling_llama``): h += o(attention(norm(h))); h += down(silu(gate) * up).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import torch

from ...errors import ModelError
from ..kernels.act import silu_mul_reference
from ..kernels.norm import add_rms_norm_reference, rms_norm_reference
from ..tensors import TensorSpace
from .config import ModelConfig
from .rope import rope_tables
from .tensors import Linear
from .torch_kv import TorchKv
from .torch_ops import Attend, TorchLinear, head_norm, rotate
from .weights import Weights

FAMILIES: Final = ("llama", "qwen2", "qwen3")


class Deltas(Protocol):
    """Adds the adapters' deltas of one step."""

    def add(self, layer: int, group: int, x: torch.Tensor, out: torch.Tensor) -> None:
        """``out += delta(x)`` for the modules of ``adapters.GROUPS[group]`` side by side in out."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """What the layers need to know of a step's tokens; all on the device.

    ``positions``: int64 ``[n]``; ``mapping``: int64 ``[n]``, the cell each token's KV goes to.
    """

    positions: torch.Tensor
    mapping: torch.Tensor
    attend: Attend
    deltas: Deltas | None


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


def check_family(family: str) -> None:
    """Refuse what this path does not run.

    Raises:
        ModelError: family-not-on-device.
    """
    if family not in FAMILIES:
        raise ModelError(
            "this model family does not run on an accelerator yet; the host serves it",
            code="family-not-on-device",
            subject=family,
            expected=" or ".join(FAMILIES),
            found=family,
        )


class TorchLlama:
    """One model on one tensor space.

    Args:
        weights: packed by a `TorchPacker` of the same space.
        positions: positions the rotary tables cover.

    Raises:
        ModelError: family-not-on-device.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        space: TensorSpace,
        kv: TorchKv,
        *,
        positions: int,
    ) -> None:
        check_family(config.family)
        self._config, self._kv = config, kv
        up = space.upload
        self._layers = tuple(
            _Layer(
                up(layer.input_norm),
                layer.qkv,
                None if layer.q_norm is None else up(layer.q_norm),
                None if layer.k_norm is None else up(layer.k_norm),
                layer.o,
                up(layer.post_norm),
                layer.gate_up,
                layer.down,
            )
            for layer in weights.layers
        )
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

    def layers(self, h: torch.Tensor, step: Step) -> torch.Tensor:
        """Run every layer, writing the KV of all tokens.

        Args:
            h: what `embed` made; changed in place.

        Returns:
            The final residual stream ``[n, hidden]``.
        """
        config, deltas = self._config, step.deltas
        n, eps = h.shape[0], config.rms_eps
        heads, kv_heads, inter = config.heads, config.kv_heads, config.intermediate
        cos = self._cos.index_select(0, step.positions).to(h.dtype)[:, None]
        sin = self._sin.index_select(0, step.positions).to(h.dtype)[:, None]
        x = torch.empty_like(h)
        delta: torch.Tensor | None = None
        for index, layer in enumerate(self._layers):
            keys, values = self._kv.keys[index], self._kv.values[index]
            if delta is None:
                rms_norm_reference(h, layer.input_norm, eps, x)
            else:
                add_rms_norm_reference(delta, h, layer.input_norm, eps, x)
            qkv = layer.qkv(x)
            if deltas is not None:
                deltas.add(index, 0, x, qkv)
            split = qkv.view(n, heads + 2 * kv_heads, config.head_dim)
            q, k, v = torch.split(split, [heads, kv_heads, kv_heads], dim=1)
            keys.index_copy_(0, step.mapping, rotate(head_norm(k, layer.k_norm, eps), cos, sin))
            values.index_copy_(0, step.mapping, v)
            query = rotate(head_norm(q, layer.q_norm, eps), cos, sin)
            attended = step.attend(query, keys, values)
            delta = layer.o(attended)
            if deltas is not None:
                deltas.add(index, 1, attended, delta)
            add_rms_norm_reference(delta, h, layer.post_norm, eps, x)
            gate_up = layer.gate_up(x)
            if deltas is not None:
                deltas.add(index, 2, x, gate_up)
            acted = gate_up.new_empty((n, inter))
            silu_mul_reference(gate_up, acted)
            delta = layer.down(acted)
            if deltas is not None:
                deltas.add(index, 3, acted, delta)
        assert delta is not None  # a config has at least one layer
        h.add_(delta)
        return h

    def states(self, h: torch.Tensor) -> torch.Tensor:
        """The final norm: what lm_head is given. ``[m, hidden]`` to the same, newly made."""
        out = torch.empty_like(h)
        rms_norm_reference(h, self._final_norm, self._config.rms_eps, out)
        return out

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """Logits ``[m, vocab]``, engine dtype, newly made."""
        return self._head(states)
