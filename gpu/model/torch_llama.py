"""The llama family (llama, qwen2, qwen3) in torch on any torch device; decode steps capture it.

What it owns: the layers' weights on the device. Invariants: those of `torch_model`; the delta of a
row's adapter is added before qk-norm and rope. Unlike on the host, a BLAS may round a row
differently in another batch.

Layer (transformers' ``modeling_llama``): h += o(attention(norm(h))); h += down(silu(gate) * up).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..kernels.norm import add_rms_norm_reference, rms_norm_reference
from ..tensors import TensorSpace
from .adapters import ATTN_OUT, QKV
from .config import ModelConfig
from .torch_kv import TorchKv
from .torch_model import Step, TorchModel, feed_forward
from .torch_ops import head_norm, rotate
from .weights import LayerWeights, Weights


class TorchLlama(TorchModel):
    """One model on one tensor space; see `TorchModel`."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        space: TensorSpace,
        kv: TorchKv,
        *,
        positions: int,
    ) -> None:
        super().__init__(config, weights, space, positions=positions)
        self._kv = kv
        self._layers = tuple(_uploaded(layer, space) for layer in weights.layers)

    def layers(self, h: torch.Tensor, step: Step) -> torch.Tensor:
        """See `TorchModel.layers`."""
        config, eps = self._config, self._config.rms_eps
        n, heads, kv_heads = h.shape[0], config.heads, config.kv_heads
        cos, sin = self._angles(step, h.dtype)
        x = torch.empty_like(h)
        delta: torch.Tensor | None = None
        for index, layer in enumerate(self._layers):
            keys, values = self._kv.keys[index], self._kv.values[index]
            if delta is None:
                rms_norm_reference(h, layer.input_norm, eps, x)
            else:
                add_rms_norm_reference(delta, h, layer.input_norm, eps, x)
            qkv = layer.qkv(x)
            step.add(index, QKV, x, qkv)
            split = qkv.view(n, heads + 2 * kv_heads, config.head_dim)
            q, k, v = torch.split(split, [heads, kv_heads, kv_heads], dim=1)
            keys.index_copy_(0, step.mapping, rotate(head_norm(k, layer.k_norm, eps), cos, sin))
            values.index_copy_(0, step.mapping, v)
            query = rotate(head_norm(q, layer.q_norm, eps), cos, sin)
            attended = step.attend(query, keys, values)
            delta = layer.o(attended)
            step.add(index, ATTN_OUT, attended, delta)
            add_rms_norm_reference(delta, h, layer.post_norm, eps, x)
            delta = feed_forward(layer.gate_up, layer.down, x, step, index)
        assert delta is not None  # a config has at least one layer
        h.add_(delta)
        return h


def _uploaded(layer: LayerWeights, space: TensorSpace) -> LayerWeights:
    up = space.upload
    return replace(
        layer,
        input_norm=up(layer.input_norm),
        q_norm=None if layer.q_norm is None else up(layer.q_norm),
        k_norm=None if layer.k_norm is None else up(layer.k_norm),
        post_norm=up(layer.post_norm),
    )
