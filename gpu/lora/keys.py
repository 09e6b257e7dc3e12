"""Tensor keys: which place of the model each one names, or why it is refused.

What it owns: the accepted spellings of a key. Invariant: every key gets exactly one answer, a place
or a `RejectError`; none is skipped. What stands before ``layers.`` must be the text model's own
path, so that a vision tower's q_proj can never land in the decoder.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, get_args

import msgspec

from ...errors import RejectError
from .dims import TOKEN_MODULES, LoraModule, ModelDims
from .safefile import Tensor

Half = Literal["A", "B", "magnitude", "lora_bias", "bias"]
"""What a tensor is to its pair: a factor, DoRA's magnitude, the bias of B, or the module's own bias
as trained."""
HALVES: Final[tuple[Half, ...]] = get_args(Half)
PEFT_PREFIX: Final = "base_model.model."
_WRAPPERS: Final = ("_orig_mod", "_checkpoint_wrapped_module")
_ROOTS: Final = ("model", "language_model")
MAX_ROOTS = 4
MAX_INDEX_DIGITS = 6
_BY_PATH: Final = {m.path: m for m in LoraModule if m not in TOKEN_MODULES}
_TOKENS: Final = {m.leaf: m for m in TOKEN_MODULES}
_GDN_PARENT: Final = "linear_attn"
_EXPERT_LEAVES: Final = {
    m.leaf: m
    for m in (LoraModule.EXPERT_GATE_PROJ, LoraModule.EXPERT_UP_PROJ, LoraModule.EXPERT_DOWN_PROJ)
}
FUSED: Final = {
    ("self_attn", "qkv_proj"): (LoraModule.Q_PROJ, LoraModule.K_PROJ, LoraModule.V_PROJ),
    ("mlp", "gate_up_proj"): (LoraModule.GATE_PROJ, LoraModule.UP_PROJ),
    ("linear_attn", "in_proj_qkvz"): (LoraModule.IN_PROJ_QKV, LoraModule.IN_PROJ_Z),
    ("linear_attn", "in_proj_ba"): (LoraModule.IN_PROJ_B, LoraModule.IN_PROJ_A),
}
"""Modules of checkpoints whose projections are stacked row by row; a split base takes the parts."""
PARTS_OF_QKV: Final = {"in_proj_q": 0, "in_proj_k": 1, "in_proj_v": 2}
_OF_ALL_EXPERTS: Final = ("gate_up_proj", *_EXPERT_LEAVES)


class PairKey(msgspec.Struct, frozen=True, gc=False):
    """One tensor of a pair. ``module_name`` is the dotted name PEFT matches targets and patterns
    on; ``layer`` of a token matrix is the number of layers.

    In no cycle, as `Placed`: see `Tensor`.
    """

    layer: int
    module: LoraModule
    half: Half
    module_name: str
    adapter_name: str | None = None
    expert: int = 0
    parts: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the modules its rank is the sum over: its own, or those of its ``parts``."""
        return self.parts or (self.module_name,)


class Placed(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A tensor of a pair, and what its key says of it."""

    key: PairKey
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class PartKey:
    """A factor of in_proj_q, in_proj_k or in_proj_v (``part`` 0, 1, 2) of a split in_proj_qkv."""

    layer: int
    part: int
    half: Half
    module_name: str
    adapter_name: str | None = None


@dataclass(frozen=True, slots=True)
class ExpertsKey:
    """A factor of all experts in one tensor; ``inner`` where ``base_layer`` stands in the key.

    ``parameter``: its name where the key has it, as for factors ``[experts, ...]``; else ``None``.
    """

    layer: int
    half: Half
    inner: bool
    module_name: str
    adapter_name: str | None = None
    parameter: str | None = None


@dataclass(frozen=True, slots=True)
class FusedKey:
    """One tensor of a pair over several modules side by side (``qkv_proj``, ``gate_up_proj``).

    A is common to ``modules``; the rows of everything else are theirs, in this order.
    """

    layer: int
    modules: tuple[LoraModule, ...]
    half: Half
    module_name: str
    adapter_name: str | None = None


@dataclass(frozen=True, slots=True)
class OverlayKey:
    """A whole matrix (``kind`` "full") or replaced rows ("rows") of embed_tokens or lm_head.

    "base": the base's own matrix, which PEFT saves beside low-rank factors of it.
    """

    leaf: Literal["embed_tokens", "lm_head"]
    kind: Literal["full", "rows", "base"]
    adapter_name: str | None = None


Key = PairKey | PartKey | FusedKey | ExpertsKey | OverlayKey

# Parameter -> what follows it -> what that is. Longer endings first.
_PARAMETERS: Final[dict[str, dict[tuple[str, ...], Half]]] = {
    "lora_A": {("weight",): "A"},
    "lora_B": {("weight",): "B", ("bias",): "lora_bias"},
    "lora_embedding_A": {("weight",): "A", (): "A"},
    "lora_embedding_B": {("weight",): "B", (): "B"},
    "lora_magnitude_vector": {("weight",): "magnitude", (): "magnitude"},
}


def fused_parts(parent: str, leaf: str, dims: ModelDims) -> tuple[LoraModule, ...] | None:
    """The modules a fused one stands for in this model, or ``None`` where it is not known.

    A gated q is interleaved per head: no fused checkpoint has such rows. Those of a delta net are
    known only where the checkpoint itself has it fused.
    """
    parts = FUSED.get((parent, leaf))
    if parts is None or not all(part in dims.modules for part in parts):
        return None
    plain = parts[0] is not LoraModule.Q_PROJ or dims.q_out == dims.attn_in
    grouped = parent != _GDN_PARENT or dims.gdn_groups > 0
    return parts if plain and grouped else None


def canonical_keys(dims: ModelDims) -> Iterator[tuple[str, PairKey]]:
    """Every key as PEFT writes it for the text model and for its multimodal wrapper."""
    for root in ("model", "model.language_model"):
        for layer in range(dims.num_layers):
            for module in LoraModule:
                if not dims.applies_to_layer(layer, module) or module in _EXPERT_LEAVES.values():
                    continue
                name = f"{root}.layers.{layer}.{module.path}"
                for half in ("A", "B"):
                    key = f"{PEFT_PREFIX}{name}.lora_{half}.weight"
                    yield key, PairKey(layer, module, half, name)


def classify(key: str, dims: ModelDims) -> Key:
    """The place a tensor key names.

    Raises:
        RejectError: the codes of the "keys" section of docs/reject-codes.md; ``subject`` is the
            key.
    """
    parts = [part for part in key.split(".") if part not in _WRAPPERS]
    peft = parts[:2] == ["base_model", "model"]
    if peft:
        parts = parts[2:]
    overlay = _overlay(parts)
    if overlay is not None:
        return overlay
    if not peft and not any(part.startswith("lora_") for part in parts):
        raise _refuse("not-peft-key", "the key is not one a PEFT adapter has", key)
    half, adapter_name, module_parts = _half(parts, key)
    token = _token(module_parts)
    if any(part.startswith("lora_embedding_") for part in parts):
        if token is not LoraModule.EMBED_TOKENS:
            raise _refuse("embedding-lora", "factors of an embedding the model has not", key)
    if token is not None and half != "bias":
        return PairKey(dims.num_layers, token, half, ".".join(module_parts), adapter_name)
    if "layers" not in module_parts:
        raise _refuse("non-layer-module", "the module is not in a decoder layer", key)
    place = module_parts.index("layers")
    roots, tail = module_parts[:place], module_parts[place + 1 :]
    if len(roots) > MAX_ROOTS or any(root not in _ROOTS for root in roots):
        raise _refuse(
            "foreign-layer",
            "the layer is not the text model's",
            key,
            expected="a path of 'model' and 'language_model' before 'layers'",
            found=".".join(roots)[:80],
        )
    if len(tail) < 2:
        raise _refuse("malformed-key", "nothing follows the layer index", key)
    layer = _layer(tail[0], key)
    if layer >= dims.num_layers:
        raise _refuse(
            "layer-out-of-range",
            "the model has no such layer",
            key,
            expected=f"0..{dims.num_layers - 1}",
            found=layer,
        )
    path = tail[1:]
    if path[:2] == ["mlp", "switch_mlp"]:  # mlx-lm's name for them
        path[1] = "experts"
    if path[:2] == ["mlp", "experts"]:
        return _expert(path[2:], layer, half, ".".join(module_parts), adapter_name, key, dims)
    module = _BY_PATH.get(".".join(path))
    fused = fused_parts(path[0], path[1], dims) if len(path) == 2 else None
    if fused is not None and all(dims.applies_to_layer(layer, part) for part in fused):
        return FusedKey(layer, fused, half, ".".join(module_parts), adapter_name)
    if fused is not None and path[0] == _GDN_PARENT:
        module = fused[0]
    split = PARTS_OF_QKV.get(path[1]) if path[0] == _GDN_PARENT and len(path) == 2 else None
    if split is not None and dims.applies_to_layer(layer, LoraModule.IN_PROJ_QKV):
        if half not in ("A", "B"):
            raise _refuse("unsupported-module", "parts of a projection take plain factors", key)
        return PartKey(layer, split, half, ".".join(module_parts), adapter_name)
    if module is None or module not in dims.modules:
        if path[0] == _GDN_PARENT:
            raise _refuse("gdn-target", "the model has no such gated delta net module", key)
        raise _refuse(
            "unsupported-module",
            "the module takes no adapter here",
            key,
            expected=" ".join(m.path for m in dims.modules),
            found=".".join(path)[:80],
        )
    if not dims.applies_to_layer(layer, module):
        why = "this layer attends: it has no gated delta net"
        if module is LoraModule.OUT_PROJ:
            raise _refuse("gdn-out-on-attention-layer", why, key)
        if path[0] == _GDN_PARENT:
            raise _refuse("gdn-in-on-attention-layer", why, key)
        raise _refuse("non-full-attention-layer", "this layer has no such module", key)
    return PairKey(layer, module, half, ".".join(module_parts), adapter_name)


def _expert(
    path: list[str],
    layer: int,
    half: Half,
    name: str,
    adapter_name: str | None,
    key: str,
    dims: ModelDims,
) -> PairKey | ExpertsKey:
    """The place of a key behind ``mlp.experts``: one expert's module, or all of them at once."""
    if not dims.experts:
        raise _refuse("expert-lora-on-dense-model", "the model has no experts", key)
    if half not in ("A", "B") and not (len(path) == 2 and path[0].isdigit()):
        # PEFT makes none: its ParamWrapper refuses DoRA and biases.
        raise _refuse("unsupported-module", "a fused parameter has plain factors only", key)
    if not dims.expert_adapters:
        raise _refuse("expert-lora-no-room", "slots have no room for expert adapters", key)
    if path in ([], ["base_layer"]):
        return ExpertsKey(layer, half, bool(path), name.removesuffix(".base_layer"), adapter_name)
    if len(path) == 1 and path[0] in _OF_ALL_EXPERTS:
        stem = name.rpartition(".")[0].replace("switch_mlp", "experts")
        return ExpertsKey(layer, half, False, stem, adapter_name, path[0])
    module = _EXPERT_LEAVES.get(path[1]) if len(path) == 2 else None
    if module is None:
        raise _refuse(
            "unsupported-module",
            "not a module of an expert",
            key,
            expected="gate_up_proj, gate_proj, up_proj or down_proj, of all or of number N",
            found=".".join(path)[:80],
        )
    if not path[0].isascii() or not path[0].isdigit() or len(path[0]) > MAX_INDEX_DIGITS:
        raise _refuse("malformed-expert-index", "not an expert's number", key, found=path[0][:40])
    expert = int(path[0])
    if expert >= dims.experts:
        raise _refuse(
            "expert-out-of-range",
            "the model has no such expert",
            key,
            expected=f"0..{dims.experts - 1}",
            found=expert,
        )
    return PairKey(layer, module, half, name, adapter_name, expert)


def _without_roots(parts: list[str]) -> list[str]:
    rest = list(parts)
    while rest and rest[0] in _ROOTS and len(parts) - len(rest) < MAX_ROOTS:
        rest = rest[1:]
    return rest


def _token(module_parts: list[str]) -> LoraModule | None:
    """The token matrix a module path names, or ``None``."""
    rest = _without_roots(module_parts)
    return _TOKENS.get(rest[0]) if len(rest) == 1 else None


def _overlay(parts: list[str]) -> OverlayKey | None:
    """The overlay place of a key outside the layers, or ``None``."""
    rest = _without_roots(parts)
    if not rest:
        return None
    for leaf in ("embed_tokens", "lm_head"):
        if rest[0] != leaf:
            continue
        tail, name = rest[1:], None
        if len(tail) == 3 and tail[0] == "modules_to_save" and tail[2] == "weight":
            tail, name = ["modules_to_save", "weight"], tail[1]
        if tail in (["weight"], ["modules_to_save", "weight"]):
            return OverlayKey(leaf, "full", name)
        if tail == ["base_layer", "weight"]:
            return OverlayKey(leaf, "base")
        if tail[:2] == ["token_adapter", "trainable_tokens_delta"] and len(tail) <= 3:
            name = tail[2] if len(tail) == 3 else None
            return OverlayKey(leaf, "rows", name)
    return None


def _half(parts: list[str], key: str) -> tuple[Half, str | None, list[str]]:
    """(half, adapter name inside the key or None, module path) of a tensor of a pair."""
    for index in range(len(parts) - 1, 0, -1):
        found = _PARAMETERS.get(parts[index])
        if found is None:
            continue
        tail = tuple(parts[index + 1 :])
        for ending, half in found.items():
            # The adapter's name may stand between the parameter and its ending.
            if tail == ending:
                return half, None, parts[:index]
            if tail and tail[1:] == ending:
                return half, tail[0], parts[:index]
        break
    if len(parts) > 2 and parts[-1] == "bias" and not any(p.startswith("lora_") for p in parts):
        return "bias", None, parts[: -2 if parts[-2] == "base_layer" else -1]
    raise _refuse(
        "unrecognized-tensor",
        "the tensor is none an adapter has",
        key,
        expected="...lora_A.weight or ...lora_B.weight",
        found=".".join(parts[-2:])[:80],
    )


def _layer(text: str, key: str) -> int:
    plain = text.isascii() and text.isdigit() and len(text) <= MAX_INDEX_DIGITS
    if not plain or (len(text) > 1 and text[0] == "0"):
        raise _refuse(
            "malformed-layer-index",
            "the layer index is not a plain number",
            key,
            expected="0, 1, 2, ...",
            found=text[:40],
        )
    return int(text)


def _refuse(
    code: str, why: str, key: str, *, expected: object = None, found: object = None
) -> RejectError:
    return RejectError(why, code=code, subject=key[:300], expected=expected, found=found)
