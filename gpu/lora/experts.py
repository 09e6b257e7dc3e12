"""Expert factors as PEFT writes them for fused parameters, taken apart into one pair an expert.

What it owns: nothing. Invariant: values are moved, never changed. Layouts (PEFT
`tuners/lora/layer.py`, ParamWrapper): A ``[E * r, in]`` with the expert slowest, B ``[out, r * E]``
with the expert fastest; files of PEFT before 0.19.1 have in and out of both swapped, which is the
same delta with the factors' roles exchanged. Where two parameters of one module are wrapped, the
first (gate_up_proj) has ``base_layer`` in its key; a single one has not. Megatron-Bridge and mlx-lm
write 3-D factors under the parameter's own name, which need no such reading.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from ...errors import RejectError
from .config import PeftConfig
from .dims import EXPERT_MODULES, LoraModule
from .keys import ExpertsKey, Half, PairKey, Placed
from .layout import SlotLayout
from .pack import file_array
from .patterns import match_name
from .safefile import Tensor

_VERSION: Final = re.compile(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})")
_SWAPPED_UNTIL: Final = (0, 19, 1)
"""The version of PEFT from which in and out are no longer swapped."""
_GATE_UP: Final = "gate_up_proj"
_DOWN: Final = "down_proj"
_PARTS: Final = {
    _GATE_UP: (LoraModule.EXPERT_GATE_PROJ, LoraModule.EXPERT_UP_PROJ),
    _DOWN: (LoraModule.EXPERT_DOWN_PROJ,),
    "gate_proj": (LoraModule.EXPERT_GATE_PROJ,),
    "up_proj": (LoraModule.EXPERT_UP_PROJ,),
}


def named_parameter(key: PairKey, config: PeftConfig) -> str | None:
    """The name by which target_parameters selects a place, or ``None`` where it does not.

    Of the embedding it never does: factors of its weight have another layout than those of
    embed_tokens as a module.
    """
    if not config.target_parameters or key.module is LoraModule.EMBED_TOKENS:
        return None
    name = key.module_name if key.module in EXPERT_MODULES else key.module_name + ".weight"
    return name if match_name(name, config.target_parameters) is not None else None


def module_names(key: PairKey) -> tuple[str, ...]:
    """The names target_modules may select a place by."""
    if key.module not in EXPERT_MODULES:
        return (*key.names, key.module_name)
    # Trainers name an expert's modules also where their files have all experts in one tensor.
    stem = key.module_name.rpartition(".")[0]
    return key.module_name, f"{stem}.{key.module.leaf}"


def take_apart(
    wrapped: Mapping[ExpertsKey, Tensor], config: PeftConfig, layout: SlotLayout
) -> list[Placed]:
    """Both factors of every expert of every wrapped parameter.

    Raises:
        RejectError: unpaired-tensor, target_parameters, shape-mismatch, rank-mismatch.
    """
    made: list[Placed] = []
    for key, a in wrapped.items():
        if key.half != "A":
            continue
        other = replace(key, half="B")
        b = wrapped.get(other)
        if b is None:
            raise _unpaired(a, "A")
        if key.parameter is not None:
            made += _stacked(key, key.parameter, a, b, config, layout)
            continue
        parameter = _parameter(key, config, wrapped, a)
        made += _split(key, parameter, a, b, config, layout)
    halves = {(key.layer, key.inner, key.parameter, key.half) for key in wrapped}
    for key, tensor in wrapped.items():
        if (key.layer, key.inner, key.parameter, "A") not in halves:
            raise _unpaired(tensor, "B")
    return made


def _parameter(
    key: ExpertsKey, config: PeftConfig, wrapped: Mapping[ExpertsKey, Tensor], a: Tensor
) -> str:
    """Which parameter a key stands for, from the config and from what else is wrapped."""
    named = [
        name
        for name in (_GATE_UP, _DOWN)
        if match_name(f"{key.module_name}.{name}", config.target_parameters)
    ]
    both = any(k.layer == key.layer and k.inner for k in wrapped)
    if both and len(named) == 2:
        return named[0] if key.inner else named[1]
    if not key.inner and not both and len(named) == 1:
        return named[0]
    raise RejectError(
        "target_parameters does not say which parameter of the experts this is",
        code="target_parameters",
        subject=a.key,
        expected="gate_up_proj and down_proj, or the one that is there",
        found=" ".join(config.target_parameters)[:200] or "none",
    )


def _split(
    key: ExpertsKey,
    parameter: str,
    a: Tensor,
    b: Tensor,
    config: PeftConfig,
    layout: SlotLayout,
) -> list[Placed]:
    modules, experts = _PARTS[parameter], layout.dims.experts
    name = f"{key.module_name}.{parameter}"
    heights = [layout.dims.shape(module)[0] for module in modules]
    n_out, n_in = sum(heights), layout.dims.shape(modules[0])[1]
    rank = config.rank(name)
    flat = experts * rank
    as_now = (a.shape, b.shape) == ((flat, n_in), (n_out, flat))
    swapped = (a.shape, b.shape) == ((flat, n_out), (n_in, flat))
    if not as_now and not swapped:
        raise RejectError(
            "a factor of the experts has the wrong shape",
            code="shape-mismatch",
            subject=a.key,
            expected=f"A [{experts} x {rank}, {n_in}] and B [{n_out}, {rank} x {experts}]",
            found=f"A {list(a.shape)} and B {list(b.shape)}",
        )
    if as_now and swapped:
        as_now = _as_now(config, a)
    by_expert = file_array(a).reshape(experts, rank, -1)
    last = np.ascontiguousarray(file_array(b).reshape(-1, rank, experts).transpose(2, 0, 1))
    if as_now:
        first, second = by_expert, last  # [E, r, in], [E, out, r]
    else:
        first = np.ascontiguousarray(last.transpose(0, 2, 1))
        second = np.ascontiguousarray(by_expert.transpose(0, 2, 1))
    return _each(key, name, modules, (a, first), (b, second), layout)


def _as_now(config: PeftConfig, a: Tensor) -> bool:
    """Which of the two layouts factors have whose shapes fit both: by the version that wrote them.

    Raises:
        RejectError: target_parameters, when the config does not name one.
    """
    found = _VERSION.match(config.peft_version or "")
    if found is None:
        raise RejectError(
            "shapes alone do not tell which way round the experts' factors are",
            code="target_parameters",
            subject=a.key,
            expected="peft_version in the config",
            found=repr(config.peft_version)[:80],
        )
    return tuple(map(int, found.groups())) >= _SWAPPED_UNTIL


def _stacked(
    key: ExpertsKey, parameter: str, a: Tensor, b: Tensor, config: PeftConfig, layout: SlotLayout
) -> list[Placed]:
    """Factors ``[experts, r, in]`` and ``[experts, out, r]``; a leading 1 is common to all."""
    modules, experts = _PARTS[parameter], layout.dims.experts
    name = f"{key.module_name}.{parameter}"
    n_out, n_in = sum(layout.dims.shape(m)[0] for m in modules), layout.dims.shape(modules[0])[1]
    rank = config.rank(name)
    for tensor, shape in ((a, (rank, n_in)), (b, (n_out, rank))):
        if tensor.shape not in ((experts, *shape), (1, *shape)):
            raise RejectError(
                "a factor of the experts has the wrong shape",
                code="shape-mismatch",
                subject=tensor.key,
                expected=[f"{experts} or 1", *shape],
                found=list(tensor.shape),
            )
    first, second = (
        np.broadcast_to(file_array(tensor), (experts, *tensor.shape[1:])) for tensor in (a, b)
    )
    return _each(key, name, modules, (a, first), (b, second), layout)


def _each(
    key: ExpertsKey,
    name: str,
    modules: tuple[LoraModule, ...],
    a: tuple[Tensor, npt.NDArray[np.generic]],
    b: tuple[Tensor, npt.NDArray[np.generic]],
    layout: SlotLayout,
) -> list[Placed]:
    """A pair a module and expert. ``a``, ``b``: the file's tensor, and values by expert."""
    made: list[Placed] = []
    for expert in range(layout.dims.experts):
        row = 0
        for module in modules:
            height = layout.dims.shape(module)[0]
            part = b[1][expert, row : row + height]
            row += height
            for half, like, values in (("A", a[0], a[1][expert]), ("B", b[0], part)):
                place = _place(key, module, half, name, expert)
                made.append(Placed(place, _tensor(like, values)))
    return made


def _place(key: ExpertsKey, module: LoraModule, half: str, name: str, expert: int) -> PairKey:
    kind: Half = "A" if half == "A" else "B"
    return PairKey(key.layer, module, kind, name, key.adapter_name, expert)


def _tensor(like: Tensor, values: npt.NDArray[np.generic]) -> Tensor:
    block = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
    return Tensor(like.key, like.dtype, tuple(values.shape), block, 0, block.size)


def _unpaired(tensor: Tensor, half: str) -> RejectError:
    return RejectError(
        "one factor of a pair is missing",
        code="unpaired-tensor",
        subject=tensor.key,
        expected="lora_A and lora_B",
        found=f"lora_{half} only",
    )


def experts_too_wide(tensor: Tensor, rank: int, layout: SlotLayout) -> RejectError:
    """The refusal of expert factors of a higher rank than there is room for."""
    room = layout.rank_of(LoraModule.EXPERT_DOWN_PROJ)
    need = layout.bytes_for(EXPERT_MODULES, rank) - layout.bytes_for(EXPERT_MODULES, room)
    return RejectError(
        "there is no room for expert factors of this rank",
        code="expert-lora-no-room",
        subject=tensor.key,
        expected=f"a max_expert_rank of at least {rank}, which takes up to {need} bytes more of "
        "the arena",
        found=f"max_expert_rank {room}",
    )


def no_room(refusal: RejectError, layout: SlotLayout) -> RejectError:
    """A refusal of expert factors with the bytes they would need."""
    if refusal.code != "expert-lora-no-room":
        return refusal
    need = layout.bytes_for(EXPERT_MODULES, layout.max_rank)
    return RejectError(
        refusal.message,
        code="expert-lora-no-room",
        subject=refusal.subject,
        expected=f"expert_adapters, which takes up to {need} bytes of the arena",
    )
