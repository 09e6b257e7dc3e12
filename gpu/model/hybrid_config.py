"""The fields only the hybrid families have (qwen3_5, qwen3_5_moe): layer kinds, delta net, experts.

What it owns: `MoeShape`, and how both shapes are read. Invariants: a checkpoint whose text
model lies inside a multimodal config is read from there; which layers attend is written once, in
`linear_layers`.

Field semantics follow transformers 5 (`Qwen3_5TextConfig`, `Qwen3_5MoeTextConfig`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ...errors import ModelError
from ..kernels.gdn import GdnShape
from .fields import bad_field, flag, integer

MAX_WIDTH: Final = 1 << 20
MAX_HEADS: Final = 4096
MAX_HEAD_DIM: Final = 1024
MAX_EXPERTS: Final = 4096
_KINDS: Final = ("linear_attention", "full_attention")
# transformers' default for these families when the config names none.
PARTIAL_ROTARY: Final = 0.25
_INTERVAL: Final = 4
_HOLO_IMAGE_TOKEN: Final = 248056
NEXT: Final = "qwen3_next"


@dataclass(frozen=True, slots=True)
class MoeShape:
    """Sizes of one mixture-of-experts block.

    Attributes:
        experts, top_k: routed experts, and how many each token takes.
        inner: feed-forward width of a routed expert.
        shared: feed-forward width of the shared expert.
    """

    experts: int
    top_k: int
    inner: int
    shared: int


def text_fields(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's fields: of ``text_config`` where there is one, else the object itself.

    Three fields of a multimodal config count for the text model where it does not state them.

    Raises:
        ModelError: bad-config-field.
    """
    nested = raw.get("text_config")
    if nested is None:
        return raw
    if not isinstance(nested, dict):
        raise bad_field("text_config", "an object", nested)
    fields = dict(nested)
    # transformers ties by the outer field.
    if raw.get("tie_word_embeddings") is not None:
        fields["tie_word_embeddings"] = raw["tie_word_embeddings"]
    for name in ("dtype", "torch_dtype", "quantization_config"):
        if fields.get(name) is None:
            fields[name] = raw.get(name)
    return fields


def linear_layers(text: Mapping[str, Any], num_layers: int) -> frozenset[int]:
    """Layers with a gated delta net; the others attend.

    Raises:
        ModelError: bad-config-field; unsupported-attention (no layer attends, or no gate).
    """
    kinds = text.get("layer_types")
    if kinds is None:
        interval = integer(text, "full_attention_interval", 1, num_layers, default=_INTERVAL)
        kinds = [_KINDS[(i + 1) % interval == 0] for i in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise bad_field("layer_types", f"a list of {num_layers} kinds", kinds)
    for kind in kinds:
        if kind not in _KINDS:
            raise bad_field("layer_types", " or ".join(_KINDS), kind)
    if not flag(text, "attn_output_gate", default=True):
        # transformers never looks at the field, so no such checkpoint could have been checked.
        raise ModelError(
            "attention of this family is always gated",
            code="unsupported-attention",
            subject="attn_output_gate",
            expected=True,
            found=False,
        )
    found = frozenset(i for i, kind in enumerate(kinds) if kind == _KINDS[0])
    if len(found) == num_layers:
        raise ModelError(
            "a model without any full attention is not served",
            code="unsupported-attention",
            subject="layer_types",
            expected="at least one full_attention",
        )
    return found


def gdn_shape(text: Mapping[str, Any]) -> GdnShape:
    """Raises ModelError bad-config-field."""
    keys = integer(text, "linear_num_key_heads", 1, MAX_HEADS)
    values = integer(text, "linear_num_value_heads", 1, MAX_HEADS)
    if values % keys:
        raise bad_field("linear_num_value_heads", f"a multiple of {keys}", values)
    return GdnShape(
        key_heads=keys,
        value_heads=values,
        key_dim=integer(text, "linear_key_head_dim", 1, MAX_HEAD_DIM),
        value_dim=integer(text, "linear_value_head_dim", 1, MAX_HEAD_DIM),
        conv=integer(text, "linear_conv_kernel_dim", 2, 16, default=4),
    )


def moe_shape(text: Mapping[str, Any]) -> MoeShape:
    """Raises ModelError bad-config-field."""
    experts = integer(text, "num_experts", 1, MAX_EXPERTS)
    return MoeShape(
        experts=experts,
        top_k=integer(text, "num_experts_per_tok", 1, experts),
        inner=integer(text, "moe_intermediate_size", 1, MAX_WIDTH),
        shared=integer(text, "shared_expert_intermediate_size", 1, MAX_WIDTH),
    )


def check_next(text: Mapping[str, Any]) -> None:
    """Fields only Qwen3-Next has, all of which must say what the family always does.

    Raises:
        ModelError: bad-config-field.
    """
    if not flag(text, "norm_topk_prob", default=True):
        raise bad_field("norm_topk_prob", "true", False)
    if (step := text.get("decoder_sparse_step", 1)) != 1:
        raise bad_field("decoder_sparse_step", "1: experts in every layer", step)
    if dense := text.get("mlp_only_layers"):
        raise bad_field("mlp_only_layers", "none: experts in every layer", dense)


def release_name(raw: Mapping[str, Any], text: Mapping[str, Any], family: str) -> str:
    """What the checkpoint is released as; the math is the family's in every case.

    Qwen3.6 and Holo 3.1 carry the ``qwen3_5_moe`` type: Holo has vision, no multi-token
    prediction layers and its own image token; Qwen3.6 interleaves its rotary sections.
    """
    if raw.get("model_type") == NEXT:
        return NEXT
    if family != "qwen3_5_moe":
        return family
    mtp = text.get("mtp_num_hidden_layers", raw.get("mtp_num_hidden_layers"))
    if raw.get("vision_config") and not mtp and raw.get("image_token_id") == _HOLO_IMAGE_TOKEN:
        return "holo3_1_moe"
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if isinstance(rope, dict) and rope.get("mrope_interleaved") and rope.get("mrope_section"):
        return "qwen3_6_moe"
    return family
