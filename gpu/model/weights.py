"""Weights of one base model, in the engine's dtype, fused for serving.

What it owns: every weight tensor. Invariants: all names, shapes and dtypes are checked before the
first tensor is read; every tensor of the checkpoint is either used or named in ``ignored`` with
the reason; at most one layer is held twice while loading.

Names are those of transformers' ``LlamaForCausalLM``, ``Qwen2ForCausalLM``, ``Qwen3ForCausalLM``;
the hybrid families' layers are in `hybrid_weights`.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, Literal, TypeVar

import torch

from ...errors import ModelError
from ..kernels.host import HostKernels
from .checkpoint import Checkpoint
from .config import ModelConfig
from .hybrid_weights import HybridLayer, hybrid_layer, hybrid_shapes, left_aside, text_name
from .tensors import Linear, Packer, Progress, TensorLoader

logger = logging.getLogger("rota.gpu.model.weights")

DtypeName = Literal["auto", "bfloat16", "float32"]
_NAMES: Final = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_EMBED, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
# Old checkpoints carry the frequencies, which follow from the config.
_DERIVED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_LISTED: Final = 8


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One decoder layer. ``qkv``: q, k and v rows stacked; ``gate_up``: gate then up."""

    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


LayerT = TypeVar("LayerT")


@dataclass(frozen=True, slots=True, eq=False)
class ModelWeights(Generic[LayerT]):
    """A whole model.

    Attributes:
        embed: ``[vocab, hidden]``.
        head_rows: lm_head as a matrix ``[vocab, hidden]`` (``embed`` itself when tied).
        layers: in order; all `LayerWeights`, or all `HybridLayer`.
        final_norm: ``[hidden]``.
        head: lm_head, packed.
        nbytes: bytes of the parameters in the engine's dtype (a tied matrix counts once).
        ignored: tensors of the checkpoint that are not used, and why.
    """

    embed: torch.Tensor
    head_rows: torch.Tensor
    layers: tuple[LayerT, ...]
    final_norm: torch.Tensor
    head: Linear
    nbytes: int
    ignored: dict[str, str]


Weights = ModelWeights[LayerWeights]
HybridWeights = ModelWeights[HybridLayer]


def layer_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Name (as in the checkpoint) -> shape of every tensor of a layer."""
    hidden, inter = config.hidden, config.intermediate
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (config.q_out, hidden),
        "self_attn.k_proj.weight": (config.kv_out, hidden),
        "self_attn.v_proj.weight": (config.kv_out, hidden),
        "self_attn.o_proj.weight": (hidden, config.q_out),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inter, hidden),
        "mlp.up_proj.weight": (inter, hidden),
        "mlp.down_proj.weight": (hidden, inter),
    }
    if config.qkv_bias:
        shapes["self_attn.q_proj.bias"] = (config.q_out,)
        shapes["self_attn.k_proj.bias"] = shapes["self_attn.v_proj.bias"] = (config.kv_out,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = (config.head_dim,)
        shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    return {f"model.layers.{layer}.{name}": shape for name, shape in shapes.items()}


def engine_dtype(checkpoint: Checkpoint, dtype: DtypeName) -> torch.dtype:
    """The dtype to serve in; "auto" is the checkpoint's own (float16 is served as bfloat16).

    Raises:
        ModelError: unknown-dtype, missing-tensor.
    """
    if dtype in _NAMES:
        return _NAMES[dtype]
    if dtype != "auto":
        raise ModelError(
            "unknown dtype",
            code="unknown-dtype",
            expected="'auto', 'bfloat16' or 'float32'",
            found=repr(dtype)[:200],
        )
    found = checkpoint.dtype(_EMBED)
    if found is torch.float16:
        logger.info("float16 weights are served as bfloat16; ask for float32 to keep every bit")
        return torch.bfloat16
    return found


def load_weights(
    model_dir: Path,
    config: ModelConfig,
    dtype: DtypeName,
    *,
    use_numba: bool,
    told: Progress | None = None,
) -> tuple[Weights, HostKernels]:
    """Read, check, convert and pack the weights of a llama family.

    Returns:
        The weights, and the kernels they were packed for.

    Raises:
        ModelError: the codes of `Checkpoint`, missing-tensor, wrong-shape, wrong-dtype,
            unexpected-tensor, tied-head-differs, unknown-dtype.
    """
    with Checkpoint(model_dir) as checkpoint:
        kernels = HostKernels(engine_dtype(checkpoint, dtype), use_numba=use_numba)
        return _load(TensorLoader(checkpoint, kernels, told), config, _layer), kernels


PackerT = TypeVar("PackerT", bound=Packer)


def pack_weights(
    model_dir: Path,
    config: ModelConfig,
    dtype: DtypeName,
    packer: Callable[[torch.dtype], PackerT],
    told: Progress | None = None,
) -> tuple[Weights | HybridWeights, PackerT]:
    """The weights of any family for a packer that is made once the engine's dtype is known.

    Raises:
        ModelError: as `load_weights` and `load_hybrid_weights`.
    """
    with Checkpoint(model_dir) as checkpoint:
        if config.gated:
            checkpoint.rename(text_name)
        made = packer(engine_dtype(checkpoint, dtype))
        loader = TensorLoader(checkpoint, made, told)
        if config.gated:
            return _load(loader, config, hybrid_layer), made
        return _load(loader, config, _layer), made


def load_hybrid_weights(
    model_dir: Path,
    config: ModelConfig,
    dtype: DtypeName,
    *,
    use_numba: bool,
    told: Progress | None = None,
) -> tuple[HybridWeights, HostKernels]:
    """`load_weights` of a hybrid family. Raises also ModelError two-names."""
    with Checkpoint(model_dir) as checkpoint:
        checkpoint.rename(text_name)
        kernels = HostKernels(engine_dtype(checkpoint, dtype), use_numba=use_numba)
        return _load(TensorLoader(checkpoint, kernels, told), config, hybrid_layer), kernels


def _check_all(checkpoint: Checkpoint, config: ModelConfig) -> dict[str, str]:
    expected: dict[str, tuple[int, ...]] = {
        _EMBED: (config.vocab, config.hidden),
        _NORM: (config.hidden,),
    }
    if not config.tied:
        expected[_HEAD] = (config.vocab, config.hidden)
    for layer in range(config.num_layers):
        if config.gated:
            expected |= hybrid_shapes(checkpoint, config, layer)
        else:
            expected |= layer_shapes(config, layer)
    for name, shape in expected.items():
        checkpoint.check(name, shape)
    ignored: dict[str, str] = {}
    strangers = []
    for name in sorted(checkpoint.names() - expected.keys()):
        aside = left_aside(name) if config.gated else None
        if aside is not None:
            ignored[name] = aside
        elif _DERIVED.fullmatch(name):
            ignored[name] = "follows from the config"
        elif name == _HEAD:
            _check_tied_copy(checkpoint, config)
            ignored[name] = "a copy of the tied embedding"
        else:
            strangers.append(name)
    if strangers:
        raise ModelError(
            f"{len(strangers)} tensors of the checkpoint are not part of this model: "
            + ", ".join(strangers[:_LISTED]),
            code="unexpected-tensor",
            subject=strangers[0],
        )
    for reason, count in Counter(ignored.values()).items():
        first = next(name for name, why in ignored.items() if why == reason)
        logger.info("not used: %d tensors, %s first (%s)", count, first, reason)
    return ignored


def _check_tied_copy(checkpoint: Checkpoint, config: ModelConfig) -> None:
    checkpoint.check(_HEAD, (config.vocab, config.hidden))
    if not torch.equal(checkpoint.read(_HEAD).float(), checkpoint.read(_EMBED).float()):
        raise ModelError(
            "the config ties lm_head to the embedding, and the file holds another matrix for it",
            code="tied-head-differs",
            subject=_HEAD,
        )


def _load(
    loader: TensorLoader,
    config: ModelConfig,
    layer_of: Callable[[TensorLoader, ModelConfig, int], LayerT],
) -> ModelWeights[LayerT]:
    ignored = _check_all(loader.checkpoint, config)
    loader.total = len(loader.checkpoint.names()) - len(ignored)
    embed = loader.tensor(_EMBED)
    layers = tuple(layer_of(loader, config, layer) for layer in range(config.num_layers))
    final_norm = loader.tensor(_NORM)
    head_rows = embed if config.tied else loader.tensor(_HEAD)
    head = loader.kernels.linear(head_rows)
    return ModelWeights(embed, head_rows, layers, final_norm, head, loader.nbytes, ignored)


def _layer(loader: TensorLoader, config: ModelConfig, layer: int) -> LayerWeights:
    at = f"model.layers.{layer}."
    attention, mlp = at + "self_attn.", at + "mlp."
    qkv = [f"{attention}{name}_proj" for name in "qkv"]
    bias = loader.stacked([f"{name}.bias" for name in qkv]) if config.qkv_bias else None
    return LayerWeights(
        input_norm=loader.tensor(at + "input_layernorm.weight"),
        qkv=loader.linear([f"{name}.weight" for name in qkv], bias),
        q_norm=loader.tensor(attention + "q_norm.weight") if config.qk_norm else None,
        k_norm=loader.tensor(attention + "k_norm.weight") if config.qk_norm else None,
        o=loader.linear([attention + "o_proj.weight"]),
        post_norm=loader.tensor(at + "post_attention_layernorm.weight"),
        gate_up=loader.linear([mlp + "gate_proj.weight", mlp + "up_proj.weight"]),
        down=loader.linear([mlp + "down_proj.weight"]),
    )
