"""Expert factors as PEFT writes them for fused parameters, taken apart into one pair an expert.

What it owns: nothing. Invariant: values are moved, never changed. Layouts (PEFT
`tuners/lora/layer.py`, ParamWrapper): A ``[E * r, in]`` with the expert slowest, B ``[out, r * E]``
with the expert fastest; files of PEFT before 0.19.1 have in and out of both swapped, which is the
same delta with the factors' roles exchanged. Where two parameters of one module are wrapped, the
first (gate_up_proj) has ``base_layer`` in its key; a single one has not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from ...errors import RejectError
from .config import PeftConfig, match_name
from .dims import EXPERT_MODULES, LoraModule
from .keys import ExpertsKey, Half, PairKey
from .layout import SlotLayout
from .pack import file_array
from .safefile import Tensor

Placed = tuple[PairKey, Tensor]
_GATE_UP: Final = "gate_up_proj"
_DOWN: Final = "down_proj"
_PARTS: Final = {
    _GATE_UP: (LoraModule.EXPERT_GATE_PROJ, LoraModule.EXPERT_UP_PROJ),
    _DOWN: (LoraModule.EXPERT_DOWN_PROJ,),
}


def parameter_name(key: PairKey) -> str:
    """The name PEFT matches target_parameters on, of a place that a parameter may be."""
    if key.module is LoraModule.ROUTER:
        return key.module_name + ".weight"
    return key.module_name


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
        other = ExpertsKey(key.layer, "B", key.inner, key.module_name, key.adapter_name)
        b = wrapped.get(other)
        if b is None:
            raise _unpaired(a, "A")
        parameter = _parameter(key, config, wrapped, a)
        made += _split(key, parameter, a, b, config, layout)
    halves = {(key.layer, key.inner, key.half) for key in wrapped}
    for key, tensor in wrapped.items():
        if (key.layer, key.inner, "A") not in halves:
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
    by_expert = file_array(a).reshape(experts, rank, -1)
    last = np.ascontiguousarray(file_array(b).reshape(-1, rank, experts).transpose(2, 0, 1))
    if as_now:
        first, second = by_expert, last  # [E, r, in], [E, out, r]
    else:
        first = np.ascontiguousarray(last.transpose(0, 2, 1))
        second = np.ascontiguousarray(by_expert.transpose(0, 2, 1))
    made: list[Placed] = []
    for expert in range(experts):
        row = 0
        for module, height in zip(modules, heights, strict=True):
            part = second[expert, row : row + height]
            row += height
            for half, like, values in (("A", a, first[expert]), ("B", b, part)):
                made.append((_place(key, module, half, name, expert), _tensor(like, values)))
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
    """The refusal of expert factors of a higher rank than slots have room for."""
    room = layout.rank_of(LoraModule.EXPERT_DOWN_PROJ)
    need = layout.bytes_for(EXPERT_MODULES, rank) - layout.bytes_for(EXPERT_MODULES, room)
    return RejectError(
        "slots have no room for expert factors of this rank",
        code="expert-lora-no-room",
        subject=tensor.key,
        expected=f"a max_expert_rank of at least {rank}, which takes {need} bytes more in each "
        "slot",
        found=f"max_expert_rank {room}",
    )


def no_room(refusal: RejectError, layout: SlotLayout) -> RejectError:
    """A refusal of expert factors with the bytes a slot would need for them."""
    if refusal.code != "expert-lora-no-room":
        return refusal
    need = layout.bytes_for(EXPERT_MODULES, layout.max_rank)
    return RejectError(
        refusal.message,
        code="expert-lora-no-room",
        subject=refusal.subject,
        expected=f"expert_adapters, which takes {need} bytes more in each slot",
    )
