"""config.json of a base checkpoint, read strictly into one frozen value.

What it owns: which families and which of their features are served, and a named refusal for each
that is not. Invariants: a field of the wrong type is refused under its own name, never read as a
default; what a missing field means is written here once.

Field semantics follow transformers 5 (`LlamaConfig`, `Qwen2Config`, `Qwen3Config`, and the text
configs of Qwen3.5), including the older spelling with ``rope_theta`` and ``rope_scaling`` at the
top level.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from ...errors import ModelError
from ..kernels.gdn import GdnShape
from ..lora.dims import ModelDims
from .fields import bad_field, flag, ids, integer, number
from .hybrid_config import (
    MAX_HEAD_DIM,
    MAX_WIDTH,
    NEXT,
    PARTIAL_ROTARY,
    MoeShape,
    check_next,
    gdn_shape,
    linear_layers,
    moe_shape,
    release_name,
    text_fields,
)
from .jsonfile import read_json_object

CONFIG_NAME: Final = "config.json"
GENERATION_NAME: Final = "generation_config.json"

Family = Literal["llama", "qwen2", "qwen3", "qwen3_5", "qwen3_5_moe"]
MODEL_TYPES: Final[dict[str, Family]] = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
    # The same layers, with the inputs of the delta net fused.
    "qwen3_next": "qwen3_5_moe",
}
"""``model_type`` of config.json -> family."""
HYBRID: Final = ("qwen3_5", "qwen3_5_moe")
DTYPES: Final = ("bfloat16", "float16", "float32")
MAX_LAYERS: Final = 1024
MAX_VOCAB: Final = 1 << 22
MAX_CONTEXT: Final = 1 << 24


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """The "llama3" change of the rotary frequencies (see `gpu.model.rope.rope_tables`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the runner needs to know about one checkpoint.

    Attributes:
        family: "llama", "qwen2", "qwen3", "qwen3_5" or "qwen3_5_moe".
        num_layers, hidden, vocab: sizes.
        intermediate: width of the dense feed-forward block, 0 where experts replace it.
        heads, kv_heads, head_dim: of attention; ``heads`` is a multiple of ``kv_heads``.
        rms_eps: added to the mean square in every norm.
        rope_theta: base of the rotary frequencies.
        rope_scaling: "llama3" scaling, or ``None`` for plain rope.
        context: ``max_position_embeddings``, in tokens.
        tied: lm_head is the embedding matrix.
        qkv_bias: q, k and v have a bias (qwen2).
        qk_norm: q and k are RMS-normed per head before rope (qwen3).
        eos_ids: ids that end a sequence, ascending: of config.json and generation_config.json.
        dtype: dtype name the config states, ``None`` when it states none.
        rotary_dim: leading dimensions of a head that are rotated; even.
        gated: hybrid family: attention is gated, norms multiply by 1 + w.
        linear_layers: layers with a gated delta net instead of attention.
        gdn: its sizes; ``None`` in families without.
        moe: sizes of the expert block that replaces the dense one; ``None`` in dense families.
        release: what the checkpoint is released as; the family, or a newer name for it.
    """

    family: Family
    num_layers: int
    hidden: int
    intermediate: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    context: int
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    eos_ids: tuple[int, ...]
    dtype: str | None
    rotary_dim: int
    gated: bool
    linear_layers: frozenset[int]
    gdn: GdnShape | None
    moe: MoeShape | None
    release: str

    @property
    def recurrent(self) -> bool:
        """Sequences carry a state that only a run from position 0 can restore."""
        return bool(self.linear_layers)

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """Layers that have keys and values, ascending."""
        return tuple(i for i in range(self.num_layers) if i not in self.linear_layers)

    @property
    def attn_out(self) -> int:
        """Width of all query heads: what attention gives and o_proj takes."""
        return self.heads * self.head_dim

    @property
    def q_out(self) -> int:
        """Output width of q_proj: the query heads, each followed by its gate where gated."""
        return self.attn_out * (2 if self.gated else 1)

    @property
    def kv_out(self) -> int:
        """Output width of k_proj and of v_proj."""
        return self.kv_heads * self.head_dim

    @property
    def qkv_out(self) -> int:
        """Width of q, k and v side by side."""
        return self.q_out + 2 * self.kv_out

    @property
    def gdn_groups(self) -> int:
        """Key heads by which fused inputs of the delta net are grouped; 0 where they are apart."""
        return self.gdn.key_heads if self.gdn and self.release == "qwen3_next" else 0

    def to_lora_dims(self, *, expert_adapters: bool = False) -> ModelDims:
        """The dimensions adapters are audited and packed against.

        ``expert_adapters``: with room for pairs of routed experts, where the model has any.
        """
        return ModelDims(
            num_layers=self.num_layers,
            hidden=self.hidden,
            q_out=self.q_out,
            kv_out=self.kv_out,
            attn_in=self.attn_out,
            intermediate=self.intermediate,
            vocab=self.vocab,
            tied=self.tied,
            linear_layers=tuple(sorted(self.linear_layers)),
            gdn_channels=self.gdn.channels if self.gdn else 0,
            gdn_value=self.gdn.value_width if self.gdn else 0,
            gdn_heads=self.gdn.value_heads if self.gdn else 0,
            gdn_groups=self.gdn_groups,
            experts=self.moe.experts if self.moe else 0,
            expert_inner=self.moe.inner if self.moe else 0,
            shared_inner=self.moe.shared if self.moe else 0,
            expert_adapters=expert_adapters and self.moe is not None,
        )


def load_config(model_dir: Path) -> ModelConfig:
    """Read ``config.json`` and, if there is one, ``generation_config.json`` of ``model_dir``.

    Raises:
        ModelError: unreadable-config, bad-config-field, and the codes of `parse_config`.
    """
    raw = read_json_object(model_dir / CONFIG_NAME, code="unreadable-config")
    generation_path = model_dir / GENERATION_NAME
    generation = (
        read_json_object(generation_path, code="unreadable-config")
        if generation_path.exists()
        else {}
    )
    return parse_config(raw, generation)


def parse_config(
    raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Check the two JSON objects and make a `ModelConfig`.

    Raises:
        ModelError: unvalidated-family; bad-config-field (missing, wrong type, out of range);
            unsupported-rope, unsupported-activation, unsupported-bias, unsupported-attention
            (sliding windows), unsupported-quantization.
    """
    family = _family(raw)
    hybrid = family in HYBRID
    text = text_fields(raw) if hybrid else raw
    _refuse_unserved(text, family)
    hidden = integer(text, "hidden_size", 1, MAX_WIDTH)
    heads = integer(text, "num_attention_heads", 1, MAX_WIDTH)
    kv_heads = integer(text, "num_key_value_heads", 1, MAX_WIDTH, default=heads)
    if heads % kv_heads:
        raise bad_field("num_key_value_heads", f"a divisor of {heads}", kv_heads)
    # What the config classes of Qwen say of an absent head_dim; the others divide.
    implied = {"qwen3": 128, "qwen3_5": 256, "qwen3_5_moe": 256}.get(family, hidden // heads)
    head_dim = integer(text, "head_dim", 2, MAX_HEAD_DIM, default=implied)
    if head_dim % 2:
        raise bad_field("head_dim", "an even number", head_dim)
    vocab = integer(text, "vocab_size", 1, MAX_VOCAB)
    num_layers = integer(text, "num_hidden_layers", 1, MAX_LAYERS)
    theta, scaling, rotary_dim = _rope(text, head_dim, hybrid=hybrid)
    eos = sorted({*ids(text, "eos_token_id"), *ids(generation or {}, "eos_token_id")})
    if eos and not 0 <= eos[0] <= eos[-1] < vocab:
        raise bad_field("eos_token_id", f"ids in 0..{vocab - 1}", eos)
    linear = linear_layers(text, num_layers) if hybrid else frozenset[int]()
    moe = moe_shape(text) if family == "qwen3_5_moe" else None
    if raw.get("model_type") == NEXT:
        check_next(text)
    if family == "qwen3_5" and text.get("num_experts"):
        raise bad_field("num_experts", "none in a dense model", text.get("num_experts"))
    return ModelConfig(
        family=family,
        num_layers=num_layers,
        hidden=hidden,
        intermediate=0 if moe else integer(text, "intermediate_size", 1, MAX_WIDTH),
        vocab=vocab,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=number(text, "rms_norm_eps", default=1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        context=integer(text, "max_position_embeddings", 1, MAX_CONTEXT),
        tied=flag(text, "tie_word_embeddings", default=False),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3" or hybrid,
        eos_ids=tuple(eos),
        dtype=_dtype(text),
        rotary_dim=rotary_dim,
        gated=hybrid,
        linear_layers=linear,
        gdn=gdn_shape(text) if linear else None,
        moe=moe,
        release=release_name(raw, text, family),
    )


def _family(raw: Mapping[str, Any]) -> Family:
    found = raw.get("model_type")
    if isinstance(found, str) and found in MODEL_TYPES:
        return MODEL_TYPES[found]
    raise ModelError(
        "this model family is not served",
        code="unvalidated-family",
        subject="model_type",
        expected=" or ".join(MODEL_TYPES),
        found=repr(found)[:200],
    )


def _refuse_unserved(raw: Mapping[str, Any], family: Family) -> None:
    if raw.get("quantization_config") is not None:
        raise ModelError(
            "quantized checkpoints are not served",
            code="unsupported-quantization",
            subject="quantization_config",
        )
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(
            "this activation is not served",
            code="unsupported-activation",
            subject="hidden_act",
            expected="silu",
            found=repr(activation)[:200],
        )
    # qwen2's q, k and v bias is fixed by the family and has no field of its own.
    for field in ("attention_bias", "mlp_bias"):
        if flag(raw, field, default=False) and not (family == "qwen2" and field[0] == "a"):
            raise ModelError(
                "this bias is not served",
                code="unsupported-bias",
                subject=field,
                expected=False,
                found=True,
            )
    if family in HYBRID:
        return
    layer_types = raw.get("layer_types")
    windowed = isinstance(layer_types, list) and any(t != "full_attention" for t in layer_types)
    if windowed or flag(raw, "use_sliding_window", default=False):
        raise ModelError(
            "only full attention is served",
            code="unsupported-attention",
            subject="layer_types" if windowed else "use_sliding_window",
            expected="full_attention in every layer",
        )


def _rope(
    raw: Mapping[str, Any], head_dim: int, *, hybrid: bool
) -> tuple[float, RopeScaling | None, int]:
    """Theta, scaling and rotated dimensions, from ``rope_parameters`` or the older fields."""
    new, old = raw.get("rope_parameters"), raw.get("rope_scaling")
    for name, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, dict):
            raise bad_field(name, "an object or null", value)
    given: Mapping[str, Any] = new if new is not None else (old or {})
    theta_from = given if "rope_theta" in given else raw
    theta = number(theta_from, "rope_theta", default=10000.0)
    if theta <= 1.0:
        raise bad_field("rope_theta", "a number > 1", theta)
    kind = given.get("rope_type", given.get("type", "default"))
    partial_from = given if "partial_rotary_factor" in given else raw
    partial = number(
        partial_from, "partial_rotary_factor", default=PARTIAL_ROTARY if hybrid else 1.0
    )
    if partial != 1.0 and not hybrid:
        raise ModelError(
            "partial rotary embeddings are not served in this family",
            code="unsupported-rope",
            subject="partial_rotary_factor",
            expected="1.0",
            found=repr(partial)[:200],
        )
    rotary_dim = int(head_dim * partial)
    if rotary_dim < 2 or rotary_dim > head_dim or rotary_dim % 2:
        raise bad_field("partial_rotary_factor", f"an even part of {head_dim}", partial)
    if kind in (("default", "mrope") if hybrid else ("default",)):
        return theta, None, rotary_dim
    if kind != "llama3":
        raise ModelError(
            "this rope scaling is not served",
            code="unsupported-rope",
            subject="rope_type",
            expected="default or llama3",
            found=repr(kind)[:200],
        )
    scaling = RopeScaling(
        factor=number(given, "factor"),
        low_freq_factor=number(given, "low_freq_factor"),
        high_freq_factor=number(given, "high_freq_factor"),
        original_context=integer(given, "original_max_position_embeddings", 1, MAX_CONTEXT),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise bad_field(
            "high_freq_factor", f"more than {scaling.low_freq_factor}", scaling.high_freq_factor
        )
    return theta, scaling, rotary_dim


def _dtype(raw: Mapping[str, Any]) -> str | None:
    field = "dtype" if raw.get("dtype") is not None else "torch_dtype"
    value = raw.get(field)
    if value is None:
        return None
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    if name not in DTYPES:
        raise bad_field(field, " or ".join(DTYPES), value)
    return str(name)
