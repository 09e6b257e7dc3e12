"""The hybrid families (qwen3_5, qwen3_5_moe) in torch on any torch device; decode steps capture it.

What it owns: the layers' weights on the device. Invariants: those of `torch_model`; the delta of a
row's adapter is added before gates are split off, norms, rope and convolution; the states of the
linear layers move on by exactly the tokens of the step.

Layer (transformers' ``modeling_qwen3_5``): h += mixer(norm(h)); h += mlp(norm(h)), where the mixer
is gated attention or a gated delta net and every norm multiplies by 1 + w.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..kernels.norm import add_rms_norm_reference, rms_norm_reference
from ..tensors import TensorSpace
from .adapters import ATTN_OUT, GDN_OUT, IN_B_A, IN_QKV_Z, QKV
from .config import ModelConfig
from .hybrid_weights import AttentionWeights, DeltaNetWeights, DenseWeights, HybridLayer
from .states import StateArena
from .tensors import Linear
from .torch_gdn import TorchDeltaNet
from .torch_kv import TorchKv
from .torch_model import Step, TorchModel, feed_forward
from .torch_moe import TorchMoe
from .torch_ops import head_norm, rotate
from .weights import HybridWeights


@dataclass(frozen=True, slots=True, eq=False)
class _Attention:
    weights: AttentionWeights
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _DeltaNet:
    projection: Linear
    inner: TorchDeltaNet
    out: Linear
    conv: torch.Tensor
    memory: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    input_norm: torch.Tensor
    mixer: _Attention | _DeltaNet
    post_norm: torch.Tensor
    mlp: DenseWeights | TorchMoe


class TorchHybrid(TorchModel):
    """One model on one tensor space; see `TorchModel`.

    Args:
        states: of the linear layers, on the same space; ``None`` when there is no such layer.
    """

    one_plus = True

    def __init__(
        self,
        config: ModelConfig,
        weights: HybridWeights,
        space: TensorSpace,
        kv: TorchKv,
        states: StateArena | None,
        *,
        positions: int,
    ) -> None:
        super().__init__(config, weights, space, positions=positions)
        caches = iter(zip(kv.keys, kv.values, strict=True))
        arenas = iter(() if states is None else zip(states.conv, states.memory, strict=True))
        made = []
        for layer in weights.layers:
            mixer: _Attention | _DeltaNet
            if isinstance(layer.mixer, AttentionWeights):
                mixer = _attention(layer.mixer, space, *next(caches))
            else:
                mixer = _delta_net(config, layer.mixer, space, *next(arenas))
            made.append(_layer(config, layer, mixer, space))
        self._layers = tuple(made)

    def layers(self, h: torch.Tensor, step: Step) -> torch.Tensor:
        """See `TorchModel.layers`."""
        eps = self._config.rms_eps
        angles = self._angles(step, h.dtype)
        x = torch.empty_like(h)
        delta: torch.Tensor | None = None
        for index, layer in enumerate(self._layers):
            if delta is None:
                rms_norm_reference(h, layer.input_norm, eps, x, one_plus=True)
            else:
                add_rms_norm_reference(delta, h, layer.input_norm, eps, x, one_plus=True)
            if isinstance(layer.mixer, _Attention):
                delta = self._attend(index, layer.mixer, x, step, *angles)
            else:
                delta = self._delta_net(index, layer.mixer, x, step)
            add_rms_norm_reference(delta, h, layer.post_norm, eps, x, one_plus=True)
            if isinstance(layer.mlp, TorchMoe):
                delta = layer.mlp(x, step, index)
            else:
                delta = feed_forward(layer.mlp.gate_up, layer.mlp.down, x, step, index)
        assert delta is not None  # a config has at least one layer
        h.add_(delta)
        return h

    def _attend(
        self,
        layer: int,
        mixer: _Attention,
        x: torch.Tensor,
        step: Step,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        config, weights, n = self._config, mixer.weights, x.shape[0]
        heads, kv_heads, head_dim = config.heads, config.kv_heads, config.head_dim
        raw = weights.qkv(x)
        step.add(layer, QKV, x, raw)
        # Each head's query is followed by its gate.
        split = raw.view(n, 2 * heads + 2 * kv_heads, head_dim)
        pairs, k, v = torch.split(split, [2 * heads, kv_heads, kv_heads], dim=1)
        q, gate = pairs.reshape(n, heads, 2, head_dim).unbind(2)
        q = head_norm(q, weights.q_norm, config.rms_eps, one_plus=True)
        k = head_norm(k, weights.k_norm, config.rms_eps, one_plus=True)
        mixer.keys.index_copy_(0, step.mapping, rotate(k, cos, sin))
        mixer.values.index_copy_(0, step.mapping, v)
        mixed = step.attend(rotate(q, cos, sin), mixer.keys, mixer.values)
        # In one operation for all rows: the host's reference takes them one by one.
        mixed.view(n, heads, head_dim).mul_(torch.sigmoid(gate))
        delta = weights.o(mixed)
        step.add(layer, ATTN_OUT, mixed, delta)
        return delta

    def _delta_net(self, layer: int, mixer: _DeltaNet, x: torch.Tensor, step: Step) -> torch.Tensor:
        gdn = self._config.gdn
        assert gdn is not None and step.states is not None  # there is a linear layer
        projected = mixer.projection(x)
        step.add(layer, IN_QKV_Z, x, projected)
        step.add(layer, IN_B_A, x, projected[:, gdn.channels + gdn.value_width :])
        mixed = mixer.inner(projected, mixer.conv, mixer.memory, step.states)
        delta = mixer.out(mixed)
        step.add(layer, GDN_OUT, mixed, delta)
        return delta


def _attention(
    weights: AttentionWeights, space: TensorSpace, keys: torch.Tensor, values: torch.Tensor
) -> _Attention:
    q_norm, k_norm = space.upload(weights.q_norm), space.upload(weights.k_norm)
    return _Attention(AttentionWeights(weights.qkv, q_norm, k_norm, weights.o), keys, values)


def _delta_net(
    config: ModelConfig,
    weights: DeltaNetWeights,
    space: TensorSpace,
    conv: torch.Tensor,
    memory: torch.Tensor,
) -> _DeltaNet:
    assert config.gdn is not None
    inner = TorchDeltaNet(config.gdn, weights.inner, space)
    return _DeltaNet(weights.projection, inner, weights.out, conv, memory)


def _layer(
    config: ModelConfig,
    layer: HybridLayer,
    mixer: _Attention | _DeltaNet,
    space: TensorSpace,
) -> _Layer:
    up, mlp = space.upload, layer.mlp
    made: DenseWeights | TorchMoe
    if isinstance(mlp, DenseWeights):
        made = mlp
    else:
        assert config.moe is not None
        made = TorchMoe(config.moe, mlp, space)
    return _Layer(up(layer.input_norm), mixer, up(layer.post_norm), made)
