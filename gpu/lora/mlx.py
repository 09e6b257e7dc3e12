"""mlx-lm adapters in PEFT's terms: the same factors, transposed, under other names.

What it owns: the translation of config and tensors. mlx-lm computes ``scale * (x a) b`` with a
``[in, r]`` and b ``[r, out]``; DoRA's ``m`` is PEFT's magnitude. Invariant: every tensor comes out
as one tensor with a PEFT key, so that the audit's answer covers all of them.

Format: mlx-lm, `mlx_lm/tuner/lora.py`, `dora.py`, `utils.py` (``adapters.safetensors`` beside
``adapter_config.json``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from ...errors import RejectError
from .pack import file_array
from .safefile import Tensor

_ENDINGS: Final = {
    "lora_a": "lora_A.weight",
    "lora_b": "lora_B.weight",
    "m": "lora_magnitude_vector",
}
_PREFIX: Final = "base_model.model."


def is_mlx(config: Mapping[str, Any]) -> bool:
    """True for a config that mlx-lm wrote."""
    return "peft_type" not in config and ("lora_parameters" in config or "fine_tune_type" in config)


def to_peft_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an mlx-lm config that say what the adapter is, as PEFT calls them.

    Raises:
        RejectError: mlx-adapter.
    """
    kind, parameters = config.get("fine_tune_type", "lora"), config.get("lora_parameters")
    if kind not in ("lora", "dora"):
        raise _not_lora("fine_tune_type", "lora or dora", kind)
    if type(parameters) is not dict:
        raise _not_lora("lora_parameters", "an object", parameters)
    rank, scale, keys = parameters.get("rank"), parameters.get("scale"), parameters.get("keys")
    if type(rank) is not int:
        raise _not_lora("rank", "an integer", rank)
    if not isinstance(scale, (int, float)) or isinstance(scale, bool):
        raise _not_lora("scale", "a number", scale)
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": float(scale) * rank,
        "use_rslora": False,
        "use_dora": kind == "dora",
        "target_modules": _names(keys),
    }


def to_peft_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors under PEFT's keys, factors transposed (a copy); others as they are."""
    made = []
    for tensor in tensors:
        stem, _, ending = tensor.key.rpartition(".")
        named = _ENDINGS.get(ending)
        if named is None:
            made.append(tensor)
            continue
        key, shape, block = f"{_PREFIX}{stem}.{named}", tensor.shape, tensor.data
        if len(shape) == 2:
            block = np.ascontiguousarray(file_array(tensor).T).reshape(-1).view(np.uint8)
            shape = shape[::-1]
        # Factors of experts are [experts, r, in] and [experts, out, r] there as well.
        made.append(Tensor(key, tensor.dtype, shape, block, 0, block.nbytes))
    return made


def _not_lora(field: str, expected: str, found: object) -> RejectError:
    return RejectError(
        "an mlx-lm config that cannot be read as LoRA",
        code="mlx-adapter",
        subject=field,
        expected=expected,
        found=repr(found)[:80],
    )


def _names(keys: Any) -> Any:
    """Its names of modules as checkpoints have them; what is no list is the config's to refuse."""
    if type(keys) is not list:
        return keys
    return [k.replace("switch_mlp", "experts") if isinstance(k, str) else k for k in keys]
