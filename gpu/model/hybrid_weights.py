"""Layers of the hybrid families: names, shapes and loading.

What it owns: the spellings of a checkpoint's tensor names that are served, and which tensors are
left aside and why. Invariants: as in `weights`; experts are taken fused or one by one, whichever
the checkpoint has, and never a mix in one layer.

Names are those of transformers' ``Qwen3_5ForCausalLM``, ``Qwen3_5MoeForCausalLM`` and
``Qwen3NextForCausalLM``, and of the same models inside ``...ForConditionalGeneration``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from ..kernels.gdn import GdnShape, GdnWeights
from ..lora.dims import LoraModule
from ..lora.fused import grouped_rows
from .checkpoint import Checkpoint
from .config import ModelConfig
from .hybrid_config import MoeShape
from .tensors import Linear, TensorLoader

Shapes = dict[str, tuple[int, ...]]
# Longest first. All stand for the text model's own "model." (transformers renames them alike).
_ROOTS: Final = (
    "model.language_model.model.",
    "language_model.model.",
    "model.language_model.",
)
_HEADS: Final = ("language_model.lm_head.", "model.language_model.lm_head.")
_ASIDE: Final = (
    ("model.visual.", "vision tower: text is served"),
    ("visual.", "vision tower: text is served"),
    ("mtp.", "multi-token prediction is not used"),
    ("model.mtp.", "multi-token prediction is not used"),
)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionWeights:
    """``qkv``: q with each head's gate behind it, k and v rows stacked."""

    qkv: Linear
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    o: Linear


@dataclass(frozen=True, slots=True, eq=False)
class DeltaNetWeights:
    """``projection``: in_proj_qkv, z, b and a rows stacked."""

    projection: Linear
    inner: GdnWeights
    out: Linear


@dataclass(frozen=True, slots=True, eq=False)
class DenseWeights:
    """``gate_up``: gate rows, then up rows."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True, eq=False)
class MoeWeights:
    """``shared_gate``: one row. ``gate_up``, ``down``: of the experts, in order of their ids."""

    router: Linear
    gate_up: Sequence[Linear]
    down: Sequence[Linear]
    shared: DenseWeights
    shared_gate: Linear


@dataclass(frozen=True, slots=True, eq=False)
class HybridLayer:
    """One decoder layer."""

    input_norm: torch.Tensor
    mixer: AttentionWeights | DeltaNetWeights
    post_norm: torch.Tensor
    mlp: DenseWeights | MoeWeights


def text_name(name: str) -> str:
    """A tensor's name as the text model alone would have it."""
    for head in _HEADS:
        if name.startswith(head):
            return "lm_head." + name.removeprefix(head)
    for root in _ROOTS:
        if name.startswith(root):
            return "model." + name.removeprefix(root)
    return name


def left_aside(name: str) -> str | None:
    """Why a tensor is not used, or ``None`` when it is not one that may be left aside."""
    return next((why for start, why in _ASIDE if name.startswith(start)), None)


def hybrid_shapes(checkpoint: Checkpoint, config: ModelConfig, layer: int) -> Shapes:
    """Name -> shape of every tensor of a layer, experts as the checkpoint has them."""
    at, hidden = f"model.layers.{layer}.", config.hidden
    shapes: Shapes = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if layer in config.linear_layers:
        assert config.gdn is not None
        shapes |= _gdn_shapes(config.gdn, hidden, fused=config.gdn_groups > 0)
    else:
        shapes |= {
            "self_attn.q_proj.weight": (config.q_out, hidden),
            "self_attn.k_proj.weight": (config.kv_out, hidden),
            "self_attn.v_proj.weight": (config.kv_out, hidden),
            "self_attn.o_proj.weight": (hidden, config.attn_out),
            "self_attn.q_norm.weight": (config.head_dim,),
            "self_attn.k_norm.weight": (config.head_dim,),
        }
    if config.moe is None:
        shapes |= _mlp_shapes("mlp.", config.intermediate, hidden)
    else:
        shapes |= _moe_shapes(config.moe, hidden, fused=_fused(checkpoint, at))
    return {at + name: shape for name, shape in shapes.items()}


def _gdn_shapes(gdn: GdnShape, hidden: int, *, fused: bool) -> Shapes:
    heights = {
        "qkv": gdn.channels,
        "z": gdn.value_width,
        "b": gdn.value_heads,
        "a": gdn.value_heads,
    }
    if fused:
        heights = {"qkvz": gdn.channels + gdn.value_width, "ba": 2 * gdn.value_heads}
    return {
        **{f"linear_attn.in_proj_{name}.weight": (n, hidden) for name, n in heights.items()},
        "linear_attn.conv1d.weight": (gdn.channels, 1, gdn.conv),
        "linear_attn.A_log": (gdn.value_heads,),
        "linear_attn.dt_bias": (gdn.value_heads,),
        "linear_attn.norm.weight": (gdn.value_dim,),
        "linear_attn.out_proj.weight": (hidden, gdn.value_width),
    }


def _mlp_shapes(at: str, inner: int, hidden: int) -> Shapes:
    return {
        at + "gate_proj.weight": (inner, hidden),
        at + "up_proj.weight": (inner, hidden),
        at + "down_proj.weight": (hidden, inner),
    }


def _moe_shapes(moe: MoeShape, hidden: int, *, fused: bool) -> Shapes:
    shapes: Shapes = {
        "mlp.gate.weight": (moe.experts, hidden),
        "mlp.shared_expert_gate.weight": (1, hidden),
        **_mlp_shapes("mlp.shared_expert.", moe.shared, hidden),
    }
    if fused:
        shapes["mlp.experts.gate_up_proj"] = (moe.experts, 2 * moe.inner, hidden)
        shapes["mlp.experts.down_proj"] = (moe.experts, hidden, moe.inner)
        return shapes
    for expert in range(moe.experts):
        shapes |= _mlp_shapes(f"mlp.experts.{expert}.", moe.inner, hidden)
    return shapes


def _fused(checkpoint: Checkpoint, at: str) -> bool:
    return at + "mlp.experts.gate_up_proj" in checkpoint.names()


def hybrid_layer(loader: TensorLoader, config: ModelConfig, layer: int) -> HybridLayer:
    """Load one layer, whose tensors were checked against `hybrid_shapes`."""
    at = f"model.layers.{layer}."
    linear = layer in config.linear_layers
    return HybridLayer(
        input_norm=loader.tensor(at + "input_layernorm.weight"),
        mixer=_delta_net(loader, config, at) if linear else _attention(loader, at),
        post_norm=loader.tensor(at + "post_attention_layernorm.weight"),
        mlp=_mlp(loader, at + "mlp.") if config.moe is None else _moe(loader, config.moe, at),
    )


def _attention(loader: TensorLoader, at: str) -> AttentionWeights:
    at += "self_attn."
    return AttentionWeights(
        qkv=loader.linear([f"{at}{name}_proj.weight" for name in "qkv"]),
        q_norm=loader.tensor(at + "q_norm.weight"),
        k_norm=loader.tensor(at + "k_norm.weight"),
        o=loader.linear([at + "o_proj.weight"]),
    )


def _delta_net(loader: TensorLoader, config: ModelConfig, at: str) -> DeltaNetWeights:
    at += "linear_attn."
    return DeltaNetWeights(
        projection=_inputs(loader, config, at),
        inner=GdnWeights(
            conv=loader.tensor(at + "conv1d.weight")[:, 0].T.contiguous(),
            decay=-loader.wide(at + "A_log").exp(),
            dt_bias=loader.wide(at + "dt_bias"),
            norm=loader.tensor(at + "norm.weight"),
            eps=config.rms_eps,
        ),
        out=loader.linear([at + "out_proj.weight"]),
    )


def _inputs(loader: TensorLoader, config: ModelConfig, at: str) -> Linear:
    """in_proj_qkv, z, b and a stacked, whatever the checkpoint has."""
    if not config.gdn_groups:
        return loader.linear([f"{at}in_proj_{name}.weight" for name in ("qkv", "z", "b", "a")])
    dims = config.to_lora_dims()
    rows, fused = grouped_rows(dims), dims.gdn_channels + dims.gdn_value
    order = np.concatenate(
        (
            rows[LoraModule.IN_PROJ_QKV],
            rows[LoraModule.IN_PROJ_Z],
            rows[LoraModule.IN_PROJ_B] + fused,
            rows[LoraModule.IN_PROJ_A] + fused,
        )
    )
    names = [f"{at}in_proj_{name}.weight" for name in ("qkvz", "ba")]
    return loader.linear(names, order=torch.from_numpy(order))


def _mlp(loader: TensorLoader, at: str) -> DenseWeights:
    return DenseWeights(
        gate_up=loader.linear([at + "gate_proj.weight", at + "up_proj.weight"]),
        down=loader.linear([at + "down_proj.weight"]),
    )


def _moe(loader: TensorLoader, moe: MoeShape, at: str) -> MoeWeights:
    fused = _fused(loader.checkpoint, at)
    at += "mlp."
    if fused:
        gate_up = loader.experts(at + "experts.gate_up_proj")
        down = loader.experts(at + "experts.down_proj")
    else:
        each = [f"{at}experts.{e}." for e in range(moe.experts)]
        gate_up = loader.experts_of(
            [[one + "gate_proj.weight", one + "up_proj.weight"] for one in each]
        )
        down = loader.experts_of([[one + "down_proj.weight"] for one in each])
    return MoeWeights(
        router=loader.linear([at + "gate.weight"]),
        gate_up=gate_up,
        down=down,
        shared=_mlp(loader, at + "shared_expert."),
        shared_gate=loader.linear([at + "shared_expert_gate.weight"]),
    )
