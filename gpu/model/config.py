"""config.json of a base checkpoint, read strictly into one frozen value.

What it owns: which families and which of their features are served, and a named refusal for each
that is not. Invariants: a field of the wrong type is refused under its own name, never read as a
default; what a missing field means is written here once.

Field semantics follow transformers 5 (`LlamaConfig`, `Qwen2Config`, `Qwen3Config`), including the
older spelling with ``rope_theta`` and ``rope_scaling`` at the top level.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from ...errors import ModelError
from ..lora.dims import ModelDims
from .jsonfile import read_json_object

CONFIG_NAME: Final = "config.json"
GENERATION_NAME: Final = "generation_config.json"

Family = Literal["llama", "qwen2", "qwen3"]
FAMILIES: Final[tuple[Family, ...]] = ("llama", "qwen2", "qwen3")
DTYPES: Final = ("bfloat16", "float16", "float32")
MAX_LAYERS: Final = 1024
MAX_WIDTH: Final = 1 << 20
MAX_VOCAB: Final = 1 << 22
MAX_CONTEXT: Final = 1 << 24
MAX_HEAD_DIM: Final = 1024
MAX_EOS: Final = 1024
MAX_NUMBER: Final = 1e30


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
        family: "llama", "qwen2" or "qwen3".
        num_layers, hidden, intermediate, vocab: sizes.
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

    @property
    def q_out(self) -> int:
        """Output width of q_proj."""
        return self.heads * self.head_dim

    @property
    def kv_out(self) -> int:
        """Output width of k_proj and of v_proj."""
        return self.kv_heads * self.head_dim

    @property
    def qkv_out(self) -> int:
        """Width of q, k and v side by side."""
        return self.q_out + 2 * self.kv_out

    def to_lora_dims(self) -> ModelDims:
        """The dimensions adapters are audited and packed against."""
        return ModelDims(
            num_layers=self.num_layers,
            hidden=self.hidden,
            q_out=self.q_out,
            kv_out=self.kv_out,
            attn_in=self.q_out,
            intermediate=self.intermediate,
            vocab=self.vocab,
            tied=self.tied,
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
    _refuse_unserved(raw, family)
    hidden = _integer(raw, "hidden_size", 1, MAX_WIDTH)
    heads = _integer(raw, "num_attention_heads", 1, MAX_WIDTH)
    kv_heads = _integer(raw, "num_key_value_heads", 1, MAX_WIDTH, default=heads)
    if heads % kv_heads:
        raise _bad("num_key_value_heads", f"a divisor of {heads}", kv_heads)
    # Qwen3Config's own default is 128; the others divide.
    implied = 128 if family == "qwen3" else hidden // heads
    head_dim = _integer(raw, "head_dim", 2, MAX_HEAD_DIM, default=implied)
    if head_dim % 2:
        raise _bad("head_dim", "an even number", head_dim)
    vocab = _integer(raw, "vocab_size", 1, MAX_VOCAB)
    theta, scaling = _rope(raw)
    eos = sorted({*_ids(raw, "eos_token_id"), *_ids(generation or {}, "eos_token_id")})
    if eos and not 0 <= eos[0] <= eos[-1] < vocab:
        raise _bad("eos_token_id", f"ids in 0..{vocab - 1}", eos)
    return ModelConfig(
        family=family,
        num_layers=_integer(raw, "num_hidden_layers", 1, MAX_LAYERS),
        hidden=hidden,
        intermediate=_integer(raw, "intermediate_size", 1, MAX_WIDTH),
        vocab=vocab,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=_number(raw, "rms_norm_eps", default=1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        context=_integer(raw, "max_position_embeddings", 1, MAX_CONTEXT),
        tied=_flag(raw, "tie_word_embeddings", default=False),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        eos_ids=tuple(eos),
        dtype=_dtype(raw),
    )


def _family(raw: Mapping[str, Any]) -> Family:
    found = raw.get("model_type")
    for family in FAMILIES:
        if found == family:
            return family
    raise ModelError(
        "this model family is not served",
        code="unvalidated-family",
        subject="model_type",
        expected=" or ".join(FAMILIES),
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
        if _flag(raw, field, default=False) and not (family == "qwen2" and field[0] == "a"):
            raise ModelError(
                "this bias is not served",
                code="unsupported-bias",
                subject=field,
                expected=False,
                found=True,
            )
    layer_types = raw.get("layer_types")
    windowed = isinstance(layer_types, list) and any(t != "full_attention" for t in layer_types)
    if windowed or _flag(raw, "use_sliding_window", default=False):
        raise ModelError(
            "only full attention is served",
            code="unsupported-attention",
            subject="layer_types" if windowed else "use_sliding_window",
            expected="full_attention in every layer",
        )


def _rope(raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Theta and scaling, from ``rope_parameters`` or from the older top-level fields."""
    new, old = raw.get("rope_parameters"), raw.get("rope_scaling")
    for name, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, dict):
            raise _bad(name, "an object or null", value)
    given: Mapping[str, Any] = new if new is not None else (old or {})
    theta_from = given if "rope_theta" in given else raw
    theta = _number(theta_from, "rope_theta", default=10000.0)
    if theta <= 1.0:
        raise _bad("rope_theta", "a number > 1", theta)
    kind = given.get("rope_type", given.get("type", "default"))
    partial = given.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ModelError(
            "partial rotary embeddings are not served in this family",
            code="unsupported-rope",
            subject="partial_rotary_factor",
            expected="1.0",
            found=repr(partial)[:200],
        )
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ModelError(
            "this rope scaling is not served",
            code="unsupported-rope",
            subject="rope_type",
            expected="default or llama3",
            found=repr(kind)[:200],
        )
    scaling = RopeScaling(
        factor=_number(given, "factor"),
        low_freq_factor=_number(given, "low_freq_factor"),
        high_freq_factor=_number(given, "high_freq_factor"),
        original_context=_integer(given, "original_max_position_embeddings", 1, MAX_CONTEXT),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise _bad(
            "high_freq_factor", f"more than {scaling.low_freq_factor}", scaling.high_freq_factor
        )
    return theta, scaling


def _dtype(raw: Mapping[str, Any]) -> str | None:
    field = "dtype" if raw.get("dtype") is not None else "torch_dtype"
    value = raw.get(field)
    if value is None:
        return None
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    if name not in DTYPES:
        raise _bad(field, " or ".join(DTYPES), value)
    return str(name)


def _ids(raw: Mapping[str, Any], field: str) -> list[int]:
    value = raw.get(field)
    if value is None:
        return []
    values = value if isinstance(value, list) else [value]
    if len(values) > MAX_EOS or any(type(v) is not int for v in values):
        raise _bad(field, f"an integer or a list of at most {MAX_EOS}", value)
    return values


def _integer(
    raw: Mapping[str, Any], field: str, low: int, high: int, *, default: int | None = None
) -> int:
    value = raw.get(field)
    if value is None:
        value = default
    if type(value) is not int or not low <= value <= high:
        raise _bad(field, f"an integer in {low}..{high}", value)
    return value


def _number(raw: Mapping[str, Any], field: str, *, default: float | None = None) -> float:
    value = raw.get(field)
    if value is None:
        value = default
    # Compared before it is converted: JSON integers have no bound, and NaN fails both.
    if isinstance(value, (int, float)) and type(value) is not bool and 0 < value < MAX_NUMBER:
        return float(value)
    raise _bad(field, "a positive number", value)


def _flag(raw: Mapping[str, Any], field: str, *, default: bool) -> bool:
    value = raw.get(field)
    if value is None:
        return default
    if type(value) is not bool:
        raise _bad(field, "true or false", value)
    return value


def _bad(field: str, expected: str, found: object) -> ModelError:
    return ModelError(
        "a config field is missing or out of range",
        code="bad-config-field",
        subject=field,
        expected=expected,
        found=repr(found)[:200],
    )
