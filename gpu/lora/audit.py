"""The audit: do config, keys, shapes and values together make an adapter this layout can serve?

What it owns: the order of the checks and their codes. Invariants: every tensor is accounted for;
config and tensors must agree (rank, targets, layers, token rows); one bad key refuses the whole
adapter, with the list of what is wrong; nothing that could turn into NaN, or into no change at all,
passes. Disk, memory and network adapters all come through here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ...errors import RejectError
from .affine import Vectors, plan_affine
from .config import PeftConfig, match_name
from .dims import LoraModule
from .experts import experts_too_wide, no_room, parameter_name, take_apart
from .fused import split_fused
from .keys import FUSED, ExpertsKey, Half, OverlayKey, PairKey, classify, fused_parts
from .layout import SlotLayout
from .overlay import BaseRows, OverlayPlan, plan_overlay
from .pack import PairTensors
from .safefile import Tensor
from .tokens import TOKEN_LEAVES, Key, check_factors, check_target, follows_embedding
from .values import check_finite

MAX_LISTED = 8
"""Offenders named in one refusal; the rest are counted."""
_EVERY_LEAF: Final = frozenset(m.leaf for m in LoraModule) | {leaf for _, leaf in FUSED}
_GDN_LEAVES: Final = frozenset(
    (
        "in_proj_qkvz",
        "in_proj_ba",
        "in_proj_qkv",
        "in_proj_z",
        "in_proj_a",
        "in_proj_b",
        "conv1d",
    )
)


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
    parts: dict[int, dict[Half, tuple[PairKey, Tensor]]] = {}
    overlays: dict[OverlayKey, Tensor] = {}
    wrapped: dict[ExpertsKey, Tensor] = {}
    names: set[str | None] = set()
    for key, tensor in zip(keys, tensors, strict=True):
        names.add(key.adapter_name)
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
        places = [(key, tensor)] if isinstance(key, PairKey) else split_fused(key, tensor, layout)
        _put(places, parts, layout)
    _put(take_apart(wrapped, config, layout), parts, layout)
    if len(names) > 1 and len(names - {None}) > 1:
        raise RejectError(
            "the keys name more than one adapter",
            code="mixed-adapter-names",
            expected="one adapter name inside the keys",
            found=", ".join(sorted(str(name)[:40] for name in names)),
        )
    if not parts and not overlays:
        raise RejectError("the file holds no adapter tensor", code="empty-adapter")
    factors = {i: found for i, found in parts.items() if found.keys() & {"A", "B"}}
    uniform = None if config.has_patterns or not factors else (config.r, config.scale("any module"))
    pairs = [
        _check_pair(index, factors[index], config, uniform, layout) for index in sorted(factors)
    ]
    notes = _check_matched(config, factors, layout)
    peaks = check_finite(tensors, layout.elem)
    overlay = plan_overlay(config, overlays, layout, base_rows, adapted)
    vectors = plan_affine(
        config,
        {i: {half: tensor for half, (_, tensor) in found.items()} for i, found in parts.items()},
        pairs,
        layout,
        base_rows,
    )
    _check_effect(pairs, overlay, vectors, peaks)
    return Audited(tuple(pairs), overlay, vectors, notes)


def _put(
    places: Sequence[tuple[PairKey, Tensor]],
    parts: dict[int, dict[Half, tuple[PairKey, Tensor]]],
    layout: SlotLayout,
) -> None:
    for place, tensor in places:
        first = layout.pair_index[place.layer, place.module]
        found = parts.setdefault(first + place.expert, {})
        if place.half in found:
            raise _duplicate(tensor)
        found[place.half] = (place, tensor)


def check_targets(config: PeftConfig, layout: SlotLayout) -> None:
    """Refuse a config before any tensor is looked at.

    Raises:
        RejectError: rank-exceeds-pool, embedding, gdn, unsupported-target, unknown_module.
    """
    ranks = [("r", config.r)] + [(p.key, int(p.value)) for p in config.rank_pattern]
    for subject, rank in ranks:
        if rank > layout.max_rank:
            raise RejectError(
                "the rank is larger than the pool's; raise max_lora_rank",
                code="rank-exceeds-pool",
                subject=subject,
                expected=f"at most {layout.max_rank}",
                found=rank,
            )
    modules = layout.dims.modules
    leaves = {m.leaf for m in modules}
    leaves |= {leaf for parent, leaf in FUSED if fused_parts(parent, leaf, layout.dims)}
    for target in config.target_modules or ():
        leaf = target.rpartition(".")[2]
        if leaf in TOKEN_LEAVES:
            check_target(target, config, layout)
            continue
        if leaf in leaves:
            continue
        code, why = "unknown_module", "the model has no module of this name"
        if leaf in _GDN_LEAVES:
            code, why = "gdn", "the model has no gated delta net module of this name"
        elif leaf in _EVERY_LEAF:
            code, why = "unsupported-target", "this model has no such module"
        raise RejectError(
            why,
            code=code,
            subject=target[:200],
            expected=" ".join(sorted(leaves)),
            found=leaf[:80],
        )


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
    halves: dict[Half, tuple[PairKey, Tensor]],
    config: PeftConfig,
    uniform: tuple[int, float] | None,
    layout: SlotLayout,
) -> PairTensors:
    """Both halves there, right shapes, the config's rank. ``uniform``: (rank, scale) of all."""
    place = layout.pairs[index]
    if "A" not in halves or "B" not in halves:
        half: Half = "A" if "A" in halves else "B"
        tensor = halves[half][1]
        raise RejectError(
            "one factor of a pair is missing",
            code="unpaired-tensor",
            subject=tensor.key,
            expected="lora_A and lora_B",
            found=f"lora_{half} only",
        )
    key, a = halves["A"]
    other, b = halves["B"]
    if key.module_name != other.module_name:
        raise RejectError(
            "the factors of one pair have different module paths",
            code="unpaired-tensor",
            subject=a.key,
            expected=key.module_name,
            found=other.module_name,
        )
    for tensor, axis, width, form in (
        (a, 1, place.k_in, f"[r, {place.k_in}]"),
        (b, 0, place.n_out, f"[{place.n_out}, r]"),
    ):
        shape = tensor.shape
        if len(shape) != 2 or shape[axis] != width or shape[1 - axis] == 0:
            raise RejectError(
                "a factor has the wrong shape",
                code="shape-mismatch",
                subject=tensor.key,
                expected=form,
                found=list(shape),
            )
    if uniform is not None:
        rank, scale = uniform
    else:
        rank, scale = config.rank(key.module_name), config.scale(key.module_name)
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


def _check_matched(
    config: PeftConfig,
    factors: dict[int, dict[Half, tuple[PairKey, Tensor]]],
    layout: SlotLayout,
) -> tuple[str, ...]:
    """Targets, excludes and layers of the config against the pairs that are there."""
    targets, excludes = config.target_modules, config.exclude_modules or ()
    parameters = config.target_parameters
    layers, matched, notes = config.layers_to_transform, set[str](), list[str]()
    leaf_only = targets is not None and all("." not in t for t in targets)
    for pair in factors.values():
        key, tensor = pair["A"]
        if layers is not None and key.layer not in layers:
            raise RejectError(
                "a tensor of a layer that layers_to_transform leaves out",
                code="untargeted-tensor",
                subject=tensor.key,
                expected=f"one of layers {sorted(layers)[:16]}",
                found=key.layer,
            )
        if (
            layers is not None
            and config.layers_pattern
            and not _in_list(key, config.layers_pattern)
        ):
            raise RejectError(
                "layers_pattern names another list of layers",
                code="layers_pattern",
                subject=tensor.key,
                expected=" or ".join(config.layers_pattern)[:300],
            )
        if excludes and (match := match_name(key.module_name, excludes)) is not None:
            raise RejectError(
                "a tensor of a module that exclude_modules leaves out",
                code="untargeted-tensor",
                subject=tensor.key,
                found=match,
            )
        named = match_name(parameter_name(key), parameters) if parameters else None
        if named is not None:
            matched.add(named)
            continue
        if parameters and match_name(key.module_name + ".weight", parameters) is not None:
            raise RejectError(
                "target_parameters is served for routers and routed experts",
                code="target_parameters",
                subject=tensor.key,
                expected="target_modules for this one",
                found=" ".join(parameters)[:200],
            )
        if targets is None:
            continue
        leaf = key.module_name.rpartition(".")[2]
        if leaf_only and leaf in targets:
            matched.add(leaf)
            continue
        hits = [t for t in targets if match_name(key.module_name, (t,)) is not None]
        if not hits and not follows_embedding(key, config, layout):
            raise RejectError(
                "a tensor of a module that target_modules does not name",
                code="untargeted-tensor",
                subject=tensor.key,
                expected=" ".join(targets)[:300],
                found=leaf,
            )
        matched.update(hits)
    if config.target_regex is not None:
        notes.append("target_modules is a pattern: the tensors alone say what is adapted")
        if not factors:
            raise _unmatched(config.target_regex, layout)
    for target in (*(targets or ()), *parameters):
        if target in matched:
            continue
        leaf = target.rpartition(".")[2]
        if leaf in config.modules_to_save:
            notes.append(f"target {target[:80]} is saved whole: it has no factors")
            continue
        excused = config.excludes_by_regex or any(
            e == target or e.rpartition(".")[2] == leaf for e in excludes
        )
        if not excused:
            raise _unmatched(target, layout)
        notes.append(f"target {target[:80]} matched nothing: excluded")
    return tuple(notes)


def _in_list(key: PairKey, patterns: tuple[str, ...]) -> bool:
    return any(f".{pattern}.{key.layer}." in f".{key.module_name}." for pattern in patterns)


def _unmatched(target: str, layout: SlotLayout) -> RejectError:
    return RejectError(
        "a target of the config matches no tensor of the file",
        code="unmatched-target",
        subject=target[:200],
        expected=f"at least one pair in {layout.dims.num_layers} layers",
        found="none",
    )


def _check_effect(
    pairs: Sequence[PairTensors],
    overlay: OverlayPlan,
    vectors: Sequence[Vectors],
    peaks: dict[int, int],
) -> None:
    for pair in pairs:
        # A part of a fused tensor has no peak of its own.
        if all(peaks[id(t)] if id(t) in peaks else t.data.any() for t in (pair.a, pair.b)):
            return
    if overlay.embed_count or overlay.head_count or any(v.changes for v in vectors):
        return
    raise RejectError(
        "the adapter would change nothing: a factor of every pair is zero", code="no-effect"
    )
