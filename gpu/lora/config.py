"""adapter_config.json, parsed strictly into a frozen value.

What it owns: the meaning of every config field, and a named refusal for each feature that is not
served. Invariants: a field of the wrong type is refused under the field's own name, never read as a
default; what a missing field means is written here once; a scale of 0 cannot come out.

Field semantics follow PEFT 0.21 (`peft/tuners/lora/config.py`, `get_pattern_key`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from ...errors import RejectError
from .mlx import is_mlx, to_peft_config
from .patterns import ValuePattern, first_match, parse_patterns
from .safefile import CONFIG_NAME
from .strictjson import loads_object

BIASES: Final = ("none", "all", "lora_only")
OVERLAY_LEAVES: Final = ("embed_tokens", "lm_head")
MAX_LIST = 65_536
MAX_NAME_CHARS = 512
MAX_REGEX_CHARS = 65_536
MAX_RANK = 1 << 20
MAX_TOKENS = 1 << 20
U32_MAX = (1 << 32) - 1

# Truthy value = a variant of the math that is not served; the code is the field's name.
_UNSERVED_FLAGS: Final = (
    "use_qalora",
    "fan_in_fan_out",
)
_UNSERVED_OBJECTS: Final = (
    "layer_replication",
    "kasa_config",
    "use_bdlora",
    "velora_config",
    "monteclora_config",
    "arrow_config",
    "alora_invocation_tokens",
)
# Plain LoRA once trained: only the starting point differed.
_PLAIN_INITS: Final = ("gaussian", "eva", "orthogonal", "mica")
# The adapter is relative to a base these inits changed, unless converted when saved.
_MUTATING_INITS: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Read by trainers or loaders only; nothing in a forward pass depends on them.
_NEUTRAL: Final = frozenset(
    (
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    )
)


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """One adapter's config.

    Attributes:
        r: rank before patterns.
        lora_alpha: alpha before patterns; finite, > 0.
        use_rslora: scale is alpha / sqrt(r) instead of alpha / r.
        rank_pattern, alpha_pattern: compiled, in file order; the first that matches wins.
        target_modules: the list form, or ``None``.
        target_regex: the string form (a regex or ``"all-linear"``), stored and never evaluated.
        exclude_modules: the list form, or ``None``; ``excludes_by_regex`` for the string form.
        layers_to_transform: decoder layers, or ``None`` for all.
        layers_pattern: names of the list of layers that layers_to_transform counts in; empty: any.
        use_dora: rows of the merged weight are scaled by trained magnitudes.
        lora_bias: the B factors have biases.
        bias: which of the base's biases were trained: "none", "all" or "lora_only".
        modules_to_save: leaves out of `OVERLAY_LEAVES`, sorted.
        target_parameters: parameters of the base that are adapted by name (experts, router).
        token_indices: leaf -> token ids, in the order of the delta's rows.
        ensure_weight_tying: as in the file.
        peft_version: as in the file, or ``None``.
        mlx: written by mlx-lm; tensors need `mlx.to_peft_tensors`.
        notes, ignored: for the report.
    """

    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: tuple[ValuePattern, ...]
    alpha_pattern: tuple[ValuePattern, ...]
    target_modules: tuple[str, ...] | None
    target_regex: str | None
    exclude_modules: tuple[str, ...] | None
    excludes_by_regex: bool
    layers_to_transform: frozenset[int] | None
    layers_pattern: tuple[str, ...]
    use_dora: bool
    lora_bias: bool
    bias: str
    modules_to_save: tuple[str, ...]
    target_parameters: tuple[str, ...]
    token_indices: Mapping[str, tuple[int, ...]]
    ensure_weight_tying: bool
    peft_version: str | None
    mlx: bool
    notes: tuple[str, ...]
    ignored: tuple[tuple[str, str], ...]

    @property
    def has_patterns(self) -> bool:
        """True when ranks or scales may differ between modules."""
        return bool(self.rank_pattern or self.alpha_pattern)

    def rank(self, module_name: str) -> int:
        """Rank of one module (its dotted name without the PEFT prefix), after rank_pattern."""
        found = first_match(self.rank_pattern, module_name)
        return self.r if found is None else int(found)

    def scale(self, module_name: str) -> float:
        """alpha / r, or alpha / sqrt(r) with rsLoRA: float64 division, rounded to float32.

        Raises:
            RejectError: lora_alpha, when the result is 0 or infinite in float32.
        """
        found = first_match(self.alpha_pattern, module_name)
        alpha = self.lora_alpha if found is None else float(found)
        rank = self.rank(module_name)
        exact = alpha / math.sqrt(rank) if self.use_rslora else alpha / rank
        with np.errstate(over="ignore", under="ignore"):
            scale = float(np.float32(exact))
        if not 0.0 < scale < math.inf:
            raise _bad("lora_alpha", f"a scale float32 can hold for {module_name}", exact)
        return scale


def parse_config(raw: bytes, *, max_bytes: int = 1 << 20) -> PeftConfig:
    """Parse the bytes of adapter_config.json.

    Raises:
        RejectError: config-too-large, bad-config (not strict JSON), duplicate-json-key, or the
            name of the field at fault (docs/reject-codes.md).
    """
    if len(raw) > max_bytes:
        raise RejectError(
            "larger than the limit",
            code="config-too-large",
            subject=CONFIG_NAME,
            expected=f"at most {max_bytes} bytes",
            found=len(raw),
        )
    config = loads_object(raw, code="bad-config", subject=CONFIG_NAME, constants=True)
    mlx = is_mlx(config)
    if mlx:
        config = to_peft_config(config)
    notes: list[str] = ["written by mlx-lm: factors are transposed"] if mlx else []
    _check_type(config, notes)
    for name in _UNSERVED_FLAGS:
        if _flag(config, name):
            raise _unserved(name)
    use_dora, lora_bias = _flag(config, "use_dora"), _flag(config, "lora_bias")
    if use_dora and lora_bias:
        raise _bad("lora_bias", "false where use_dora is true", lora_bias)
    bias = config.get("bias") if config.get("bias") is not None else "none"
    if bias not in BIASES:
        raise _bad("bias", " or ".join(BIASES), bias)
    rank_pattern = parse_patterns(config.get("rank_pattern"), "rank_pattern", _rank)
    alpha_pattern = parse_patterns(config.get("alpha_pattern"), "alpha_pattern", _alpha)
    modules_to_save = _modules_to_save(config.get("modules_to_save"))
    for name in _UNSERVED_OBJECTS:
        if config.get(name) not in (None, False, [], {}):
            raise _unserved(name)
    _check_init(config.get("init_lora_weights"), config)
    if config.get("use_rslora") is None:
        notes.append("use_rslora is absent: scale is alpha / r")
    use_rslora = _flag(config, "use_rslora")
    layers = _layers(config.get("layers_to_transform"))
    r = _rank(config.get("r"), "r")
    alpha = _alpha(config.get("lora_alpha"), "lora_alpha")
    tokens = _tokens(config.get("trainable_token_indices"))
    targets, regex = _names(config.get("target_modules"), "target_modules")
    excludes, exclude_regex = _names(config.get("exclude_modules"), "exclude_modules")
    parameters, _ = _names(config.get("target_parameters"), "target_parameters")
    if targets == () and not tokens and not modules_to_save and not parameters:
        raise _bad("target_modules", "at least one module", "[]")
    ignored = tuple(
        (name[:80], "config field not known to this version")
        for name in sorted(config)
        if name not in _KNOWN
    )
    return PeftConfig(
        r=r,
        lora_alpha=alpha,
        use_rslora=use_rslora,
        rank_pattern=rank_pattern,
        alpha_pattern=alpha_pattern,
        target_modules=targets,
        target_regex=regex,
        exclude_modules=excludes,
        excludes_by_regex=exclude_regex is not None,
        layers_to_transform=layers,
        layers_pattern=_layers_pattern(config.get("layers_pattern")),
        use_dora=use_dora,
        lora_bias=lora_bias,
        bias=bias,
        modules_to_save=modules_to_save,
        target_parameters=parameters or (),
        token_indices=MappingProxyType(tokens),
        ensure_weight_tying=_flag(config, "ensure_weight_tying"),
        peft_version=config["peft_version"] if type(config.get("peft_version")) is str else None,
        mlx=mlx,
        notes=tuple(notes),
        ignored=ignored[:64],
    )


_KNOWN: Final = _NEUTRAL | {
    "peft_type",
    "bias",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "init_lora_weights",
    "use_rslora",
    "layers_to_transform",
    "layers_pattern",
    "use_dora",
    "lora_bias",
    "r",
    "lora_alpha",
    "trainable_token_indices",
    "target_modules",
    "exclude_modules",
    "ensure_weight_tying",
    *_UNSERVED_FLAGS,
    "target_parameters",
    *_UNSERVED_OBJECTS,
}


def _bad(field: str, expected: str, found: object) -> RejectError:
    text = found if isinstance(found, str) else repr(found)
    return RejectError(
        "a config field has a value that is not accepted",
        code=field,
        subject=field,
        expected=expected,
        found=text[:80],
    )


def _unserved(field: str) -> RejectError:
    return RejectError(
        f"adapters with {field} are not served by this version", code=field, subject=field
    )


def _flag(config: Mapping[str, Any], name: str) -> bool:
    value = config.get(name)
    if value is None:
        return False
    if type(value) is not bool:
        raise _bad(name, "true or false", value)
    return value


def _check_type(config: Mapping[str, Any], notes: list[str]) -> None:
    value = config.get("peft_type")
    if value is None:
        notes.append("peft_type is absent: read as LORA")
    elif not isinstance(value, str) or value.upper() != "LORA":
        raise _bad("peft_type", "LORA", value)


def _check_init(value: Any, config: Mapping[str, Any]) -> None:
    if value is None or type(value) is bool:
        return
    if not isinstance(value, str):
        raise _bad("init_lora_weights", "true, false or a name", value)
    name = value.lower()
    for mutating in _MUTATING_INITS:
        if name == mutating or name.startswith(mutating + "_niter_"):
            raise RejectError(
                f"{mutating} trains against a changed base: convert the adapter when saving it"
                " (path_initial_model_for_weight_conversion)",
                code=mutating,
                subject="init_lora_weights",
            )
    if name not in _PLAIN_INITS:
        raise _bad("init_lora_weights", "an init this version knows", value)


def _rank(value: Any, field: str) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise _bad(field, f"an integer in 1..{MAX_RANK}", value)
    return value


def _alpha(value: Any, field: str) -> float:
    if type(value) not in (int, float):
        raise _bad(field, "a number > 0", value)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not 0.0 < number < math.inf:
        raise _bad(field, "a finite number > 0", value)
    return number


def _names(value: Any, field: str) -> tuple[tuple[str, ...] | None, str | None]:
    """(list form, string form) of a module selector; both ``None`` for null."""
    if value is None:
        return None, None
    if isinstance(value, str):
        if not 0 < len(value) <= MAX_REGEX_CHARS:
            raise _bad(field, f"1..{MAX_REGEX_CHARS} characters", f"{len(value)} characters")
        return None, value
    if type(value) is not list or len(value) > MAX_LIST:
        raise _bad(field, "a list of names, a regex, or null", value)
    for name in value:
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
            raise _bad(field, f"names of 1..{MAX_NAME_CHARS} characters", name)
    return tuple(dict.fromkeys(value)), None


def _modules_to_save(value: Any) -> tuple[str, ...]:
    names, regex = _names(value, "modules_to_save")
    if regex is not None:
        raise _bad("modules_to_save", "a list of names", value)
    leaves = {name.rpartition(".")[2] for name in names or ()}
    for leaf in sorted(leaves):
        if leaf not in OVERLAY_LEAVES:
            raise _bad("modules_to_save", " or ".join(OVERLAY_LEAVES), leaf)
    return tuple(sorted(leaves))


def _layers(value: Any) -> frozenset[int] | None:
    if value is None:
        return None
    layers = [value] if type(value) is int else value
    if type(layers) is not list or len(layers) > MAX_LIST:
        raise _bad("layers_to_transform", "an integer, a list of integers, or null", value)
    for layer in layers:
        if type(layer) is not int or layer < 0:
            raise _bad("layers_to_transform", "non-negative integers", layer)
    # PEFT treats an empty list like null.
    return frozenset(layers) if layers else None


def _layers_pattern(value: Any) -> tuple[str, ...]:
    """Plain dotted names only: PEFT reads them as regexes, and nobody writes others."""
    names, single = _names(value or None, "layers_pattern")
    patterns = names or ((single,) if single is not None else ())
    for pattern in patterns:
        if not pattern.replace(".", "_").isidentifier():
            raise _bad("layers_pattern", "dotted names", pattern)
    return patterns


def _tokens(value: Any) -> dict[str, tuple[int, ...]]:
    field = "trainable_token_indices"
    if value is None:
        return {}
    groups = {"embed_tokens": value} if type(value) is list else value
    if type(groups) is not dict:
        raise _bad(field, "a list, a map of lists, or null", value)
    tokens: dict[str, tuple[int, ...]] = {}
    for name, ids in groups.items():
        leaf = name.rpartition(".")[2]
        if leaf not in OVERLAY_LEAVES or leaf in tokens:
            raise _bad(field, "one entry each for " + " and ".join(OVERLAY_LEAVES), name)
        if ids is None:
            continue
        if type(ids) is not list or len(ids) > MAX_TOKENS:
            raise _bad(field, f"at most {MAX_TOKENS} token ids", ids)
        for token in ids:
            if type(token) is not int or not 0 <= token <= U32_MAX:
                raise _bad(field, f"token ids in 0..{U32_MAX}", token)
        if ids:
            tokens[leaf] = tuple(dict.fromkeys(ids))
    return tokens
