"""The audit: do config, keys, shapes and values together make an adapter this layout can serve?

What it owns: the order of the checks and their codes. Invariants: every tensor is accounted for;
config and tensors must agree (rank, targets, layers, token rows); one bad key refuses the whole
adapter, with the list of what is wrong; nothing that could turn into NaN, or into no change at all,
passes. Disk, memory and network adapters all come through here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import RejectError
from .affine import Vectors, plan_affine
from .config import PeftConfig
from .experts import experts_too_wide, named_parameter, no_room, take_apart
from .fused import split_fused
from .gdn import fold_parts
from .keys import (
    HALVES,
    ExpertsKey,
    Half,
    Key,
    OverlayKey,
    PairKey,
    PartKey,
    Placed,
    classify,
)
from .layout import SlotLayout
from .overlay import BaseRows, OverlayPlan, plan_overlay
from .pack import PairTensors
from .safefile import Tensor
from .targets import check_matched, check_targets
from .tokens import check_factors
from .values import check_finite, tensor_peak

_Parts = dict[Half, dict[int, Placed]]
"""What there is for each pair index, by what it is to its pair."""

MAX_LISTED = 8
"""Offenders named in one refusal; the rest are counted."""


@dataclass(frozen=True, slots=True)
class Audited:
    """What passed: pairs in pair order, the overlay, vectors, and notes for the report."""

    pairs: tuple[PairTensors, ...]
    overlay: OverlayPlan
    vectors: tuple[Vectors, ...]
    notes: tuple[str, ...]


def audit(
    config: PeftConfig,
    tensors: Sequence[Tensor],
    layout: SlotLayout,
    base_rows: BaseRows | None = None,
) -> Audited:
    """Check everything, in a fixed order; see docs/reject-codes.md for the order and the codes.

    ``tensors`` are in file order, as `safefile.parse_shards` returns them.

    Raises:
        RejectError: the first refusal; where several tensors share it, ``found`` lists them.
    """
    check_targets(config, layout)
    keys = _classify_all(tensors, layout)
    adapted = check_factors(keys, tensors, config, layout)
    parts: _Parts = {half: {} for half in HALVES}
    overlays: dict[OverlayKey, Tensor] = {}
    wrapped: dict[ExpertsKey, Tensor] = {}
    split: dict[PartKey, Tensor] = {}
    names: set[str | None] = set()
    for key, tensor in zip(keys, tensors, strict=True):
        names.add(key.adapter_name)
        if isinstance(key, PairKey):
            _put(Placed(key, tensor), parts, layout)
            continue
        if isinstance(key, OverlayKey):
            if any((o.leaf, o.kind) == (key.leaf, key.kind) for o in overlays):
                raise _duplicate(tensor)
            overlays[key] = tensor
            continue
        if isinstance(key, ExpertsKey):
            if key in wrapped:
                raise _duplicate(tensor)
            wrapped[key] = tensor
            continue
        if isinstance(key, PartKey):
            if key in split:
                raise _duplicate(tensor)
            split[key] = tensor
            continue
        _put_all(split_fused(key, tensor, layout), parts, layout)
    _put_all(take_apart(wrapped, config, layout), parts, layout)
    _put_all(fold_parts(split, config, layout), parts, layout)
    if len(names) > 1 and len(names - {None}) > 1:
        raise RejectError(
            "the keys name more than one adapter",
            code="mixed-adapter-names",
            expected="one adapter name inside the keys",
            found=", ".join(sorted(str(name)[:40] for name in names)),
        )
    if not any(parts.values()) and not overlays:
        raise RejectError("the file holds no adapter tensor", code="empty-adapter")
    places = sorted(parts["A"].keys() | parts["B"].keys())
    uniform = None if config.has_patterns or not places else (config.r, config.scale("any module"))
    pairs = [_check_pair(index, parts, config, uniform, layout) for index in places]
    notes = check_matched(config, parts["A"].values(), layout)
    check_finite(tensors, layout.elem)
    overlay = plan_overlay(config, overlays, layout, base_rows, adapted)
    vectors = plan_affine(config, parts, pairs, layout, base_rows)
    _check_effect(pairs, overlay, vectors)
    return Audited(tuple(pairs), overlay, vectors, notes)


def _put(placed: Placed, parts: _Parts, layout: SlotLayout) -> None:
    key = placed.key
    index = layout.pair_index[key.layer, key.module] + key.expert
    if index in parts[key.half]:
        raise _duplicate(placed.tensor)
    parts[key.half][index] = placed


def _put_all(found: Sequence[Placed], parts: _Parts, layout: SlotLayout) -> None:
    for placed in found:
        _put(placed, parts, layout)


def _classify_all(tensors: Sequence[Tensor], layout: SlotLayout) -> list[Key]:
    known, keys = layout.known_keys, list[Key]()
    refusals: list[RejectError] = []
    for tensor in tensors:
        key: Key | None = known.get(tensor.key)
        if key is None:
            try:
                key = classify(tensor.key, layout.dims)
            except RejectError as refusal:
                refusals.append(no_room(refusal, layout))
                continue
        keys.append(key)
    if refusals:
        raise _with_list(refusals)
    return keys


def _with_list(refusals: list[RejectError]) -> RejectError:
    """The first refusal, naming the others in ``found``."""
    first = refusals[0]
    if len(refusals) == 1:
        return first
    listed = [f"{r.subject} [{r.code}]" for r in refusals[:MAX_LISTED]]
    more = len(refusals) - len(listed)
    return RejectError(
        f"{first.message} ({len(refusals)} tensors refused)",
        code=first.code,
        subject=first.subject,
        expected=first.expected,
        found="; ".join(listed) + (f"; and {more} more" if more else ""),
    )


def _duplicate(tensor: Tensor) -> RejectError:
    return RejectError(
        "two keys name the same place", code="duplicate-tensor", subject=tensor.key[:300]
    )


def _check_pair(
    index: int,
    parts: _Parts,
    config: PeftConfig,
    uniform: tuple[int, float] | None,
    layout: SlotLayout,
) -> PairTensors:
    """Both halves there, right shapes, the config's rank. ``uniform``: (rank, scale) of all."""
    place = layout.pairs[index]
    first, second = parts["A"].get(index), parts["B"].get(index)
    if first is None or second is None:
        half: Half = "B" if first is None else "A"
        raise RejectError(
            "one factor of a pair is missing",
            code="unpaired-tensor",
            subject=parts[half][index].tensor.key,
            expected="lora_A and lora_B",
            found=f"lora_{half} only",
        )
    key, a, other, b = first.key, first.tensor, second.key, second.tensor
    if key.module_name != other.module_name:
        raise RejectError(
            "the factors of one pair have different module paths",
            code="unpaired-tensor",
            subject=a.key,
            expected=key.module_name,
            found=other.module_name,
        )
    for tensor, axis, width in ((a, 1, place.k_in), (b, 0, place.n_out)):
        shape = tensor.shape
        if len(shape) != 2 or shape[axis] != width or shape[1 - axis] == 0:
            raise RejectError(
                "a factor has the wrong shape",
                code="shape-mismatch",
                subject=tensor.key,
                expected=f"[r, {width}]" if axis else f"[{width}, r]",
                found=list(shape),
            )
    if uniform is not None:
        rank, scale = len(key.names) * uniform[0], uniform[1]
    else:
        names = [named_parameter(key, config) or name for name in key.names]
        rank, scale = sum(map(config.rank, names)), config.scale(names[0])
    if not a.shape[0] == b.shape[1] == rank:
        raise RejectError(
            "config and factors disagree on the rank",
            code="rank-mismatch",
            subject=a.key,
            expected=f"r = {rank}",
            found=f"A has {a.shape[0]} rows, B has {b.shape[1]} columns",
        )
    if rank > place.max_rank:  # below the pool's: only experts have less than others
        raise experts_too_wide(a, rank, layout)
    return PairTensors(index, a, b, rank, scale)


def _check_effect(
    pairs: Sequence[PairTensors],
    overlay: OverlayPlan,
    vectors: Sequence[Vectors],
) -> None:
    if any(tensor_peak(pair.a) and tensor_peak(pair.b) for pair in pairs):
        return
    if overlay.embed_count or overlay.head_count or any(v.changes for v in vectors):
        return
    raise RejectError(
        "the adapter would change nothing: a factor of every pair is zero", code="no-effect"
    )
