"""Per-output factors and offsets: DoRA magnitudes, biases of the B factors, trained biases.

What it owns: which vectors an adapter needs and their values. With W and b the base's weight and
bias, s the scale, m the magnitude, c the bias of B, b' the trained bias, PEFT computes
``y = m / |W + s B A| * (W + s B A) x + b' + s c`` (the norm is of each row; without DoRA the
factor is 1, without a trained bias b' is b). The kernels give ``y1 = (W + s B A) x + b``, so
``y = mul * y1 + add`` with ``mul = m / |W + s B A|`` and ``add = b' - mul * b + s c``.

Invariants: a config that promises vectors and a file that lacks them (or the reverse) is refused;
norms are float32, from the weights the engine serves and the factors as the file has them.

Formulas: PEFT 0.21, `peft/tuners/lora/dora.py` (`DoraLinearLayer`), `layer.py` (`Linear.forward`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from ...errors import RejectError
from .annex import Annex
from .config import PeftConfig
from .dims import LoraModule
from .keys import Half, Placed
from .layout import SlotLayout
from .pack import PairTensors, file_array, to_f32
from .safefile import Tensor

_VALUES_AT_ONCE: Final = 1 << 22
"""Values of a weight that are widened at a time (16 MiB)."""
_VECTORS: Final[tuple[Half, ...]] = ("magnitude", "lora_bias", "bias")
NO_CHANGE: Final = 2.0**-8
"""A factor this near to 1 is what rounding to BF16 leaves of 1."""

F32 = npt.NDArray[np.float32]
Parts = Mapping[Half, Tensor]


class BaseLinear(Protocol):
    """Access to the base model's linear weights."""

    def rows(self, layer: int, module: LoraModule, start: int, stop: int, expert: int = 0) -> F32:
        """Rows ``start..stop`` of the weight ``[out, in]``, as float32; of a routed expert's, its
        number says which."""
        ...

    def bias(self, layer: int, module: LoraModule) -> F32 | None:
        """The bias ``[out]``, or ``None``."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Vectors:
    """Factor and offset of one pair, float32 ``[out]`` each, and what they are made of."""

    index: int
    mul: F32
    add: F32
    kinds: tuple[str, ...]

    @property
    def changes(self) -> bool:
        """True unless they leave every output as it is."""
        return bool((np.abs(self.mul - 1) > NO_CHANGE).any() or self.add.any())


def plan_affine(
    config: PeftConfig,
    parts: Mapping[Half, Mapping[int, Placed]],
    pairs: Sequence[PairTensors],
    layout: SlotLayout,
    base: BaseLinear | None,
) -> tuple[Vectors, ...]:
    """The vectors of an adapter, in pair order. ``parts``: half -> pair index -> its tensor.

    Raises:
        RejectError: use_dora, lora_bias, bias (config, file and base disagree), shape-mismatch,
            affine-no-base, affine-no-room, non-finite.
    """
    promised = config.use_dora or config.lora_bias or config.bias != "none"
    if not promised and not any(parts[half] for half in _VECTORS):
        return ()
    by_index = {pair.index: pair for pair in pairs}
    for index in sorted(set[int]().union(*parts.values())):
        _agree(config, index, _tensors_of(parts, index), index in by_index, layout)
    needs_base = config.use_dora or config.bias != "none"
    wanted = set[int]().union(*(parts[half] for half in _VECTORS))
    if config.bias == "all":
        wanted = set(range(len(layout.pairs)))
    elif config.bias == "lora_only":
        wanted |= by_index.keys()
    if not wanted:
        return ()
    if needs_base and base is None:
        raise RejectError(
            "norms and biases are reckoned from the base model's own, which is not at hand",
            code="affine-no-base",
            subject="use_dora" if config.use_dora else "bias",
        )
    made = [
        vectors
        for index in sorted(wanted)
        if (
            vectors := _vectors(
                config, index, _tensors_of(parts, index), by_index.get(index), layout, base
            )
        )
    ]
    if made and not layout.affine:
        need = replace(layout, affine=True).slot_bytes - layout.slot_bytes
        raise RejectError(
            "the adapter scales or shifts outputs, and slots have no room for that",
            code="affine-no-room",
            subject=", ".join(sorted({kind for vectors in made for kind in vectors.kinds})),
            expected=f"an engine with affine=True, which takes {need} bytes more in each slot",
        )
    return tuple(made)


def _tensors_of(parts: Mapping[Half, Mapping[int, Placed]], index: int) -> Parts:
    """The tensors of one place."""
    return {half: found[index].tensor for half, found in parts.items() if index in found}


def _agree(config: PeftConfig, index: int, found: Parts, is_pair: bool, layout: SlotLayout) -> None:
    """What the config says against what the file has, for one place."""
    place = layout.pairs[index]
    name = f"layers.{place.layer}.{place.module.leaf}"
    promises: tuple[tuple[Half, str, bool], ...] = (
        ("magnitude", "use_dora", config.use_dora),
        ("lora_bias", "lora_bias", config.lora_bias),
    )
    for half, field, promised in promises:
        tensor = found.get(half)
        if tensor is not None and not (promised and is_pair):
            raise RejectError(
                f"a tensor that the config's {field} does not announce, or without its factors",
                code=field,
                subject=tensor.key,
            )
        if promised and is_pair and tensor is None:
            raise RejectError(
                f"{field} is true, and the file lacks the tensor of this module",
                code=field,
                subject=name,
            )
    bias = found.get("bias")
    if bias is not None and (config.bias == "none" or (config.bias == "lora_only" and not is_pair)):
        raise RejectError(
            "a bias that the config does not announce",
            code="bias",
            subject=bias.key,
            found=config.bias,
        )
    for half in _VECTORS:
        tensor = found.get(half)
        if tensor is not None and tensor.shape != (place.n_out,):
            raise RejectError(
                "a vector of outputs has the wrong shape",
                code="shape-mismatch",
                subject=tensor.key,
                expected=[place.n_out],
                found=list(tensor.shape),
            )


def _vectors(
    config: PeftConfig,
    index: int,
    found: Parts,
    pair: PairTensors | None,
    layout: SlotLayout,
    base: BaseLinear | None,
) -> Vectors | None:
    """Factor and offset of one place, or ``None`` where there is nothing to do."""
    place, kinds = layout.pairs[index], []
    mul, add = np.ones(place.n_out, np.float32), np.zeros(place.n_out, np.float32)
    magnitude, lora_bias, bias = found.get("magnitude"), found.get("lora_bias"), found.get("bias")
    if magnitude is not None and pair is not None and base is not None:
        kinds.append("dora")
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            norms = row_norms(pair, layout, base)
            mul = to_f32(file_array(magnitude)) / norms
        finite = np.isfinite(norms) & np.isfinite(mul)  # what is too large makes 0 of the factor
        if not finite.all():
            raise RejectError(
                "a row of the merged weight is zero or too large to scale",
                code="non-finite",
                subject=magnitude.key,
                expected="finite magnitude / norm",
                found=int(np.flatnonzero(~finite)[0]),
            )
    if lora_bias is not None and pair is not None:
        kinds.append("lora_bias")
        with np.errstate(over="ignore"):
            add += np.float32(pair.scale) * to_f32(file_array(lora_bias))
    reckon = base is not None and (magnitude is not None or config.bias != "none")
    old = base.bias(place.layer, place.module) if reckon and base is not None else None
    trained = config.bias == "all" or (config.bias == "lora_only" and pair is not None)
    if trained and (bias is None) != (old is None):
        raise RejectError(
            "the trained biases of the file are not those the base model has",
            code="bias",
            subject=f"layers.{place.layer}.{place.module.leaf}" if bias is None else bias.key,
            expected="a trained bias" if bias is None else "none: the module has no bias",
            found="none" if bias is None else list(bias.shape),
        )
    if old is not None:
        with np.errstate(invalid="ignore", over="ignore"):
            if bias is not None:
                kinds.append("bias")
                add += to_f32(file_array(bias)) - mul * old
            else:
                add += old - mul * old
    if not kinds:
        return None
    if not np.isfinite(add).all():
        raise RejectError(
            "an offset of an output is too large",
            code="non-finite",
            subject=next(t.key for t in (lora_bias, bias, magnitude) if t is not None),
            expected="finite offsets",
            found=int(np.flatnonzero(~np.isfinite(add))[0]),
        )
    return Vectors(index, mul, add, tuple(kinds))


def row_norms(pair: PairTensors, layout: SlotLayout, base: BaseLinear) -> F32:
    """|W + scale B A| of every row of the merged weight: float32 ``[out]``."""
    place = layout.pairs[pair.index]
    a, b = to_f32(file_array(pair.a)), to_f32(file_array(pair.b))
    norms = np.empty(place.n_out, np.float32)
    step = max(1, _VALUES_AT_ONCE // place.k_in)
    for start in range(0, place.n_out, step):
        stop = min(start + step, place.n_out)
        merged = base.rows(place.layer, place.module, start, stop, place.expert)
        merged = merged + np.float32(pair.scale) * (b[start:stop] @ a)
        norms[start:stop] = np.linalg.norm(merged, axis=1)
    return norms


def pack_affine(
    plan: Sequence[Vectors],
    layout: SlotLayout,
    buffer: npt.NDArray[np.uint8],
    annex: Annex | None = None,
) -> None:
    """Write the vectors into an image's zeroed buffer."""
    for vectors in plan:
        mul, add = layout.affine_views(buffer, vectors.index, annex)
        mul[:], add[:] = vectors.mul, vectors.add


def held_vectors(plan: Sequence[Vectors], layout: SlotLayout) -> tuple[bool, ...]:
    """True per pair that has vectors; ``()`` in a layout without room for any."""
    if not layout.affine:
        return ()
    held = [False] * len(layout.pairs)
    for vectors in plan:
        held[vectors.index] = True
    return tuple(held)
