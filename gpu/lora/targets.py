"""The config's targets: does the model have such modules, and does the file bear them out?

What it owns: nothing. Invariants: a target no module has is refused before any tensor is looked at;
a pair that the config leaves out, and a target without a pair, are refused by name.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from ...errors import RejectError
from .config import PeftConfig
from .dims import EXPERT_MODULES, LoraModule
from .experts import module_names, named_parameter
from .keys import FUSED, PARTS_OF_QKV, PairKey, Placed, fused_parts
from .layout import SlotLayout
from .patterns import match_name
from .tokens import TOKEN_LEAVES, check_target, follows_embedding

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
        *PARTS_OF_QKV,
    )
)


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
    if LoraModule.IN_PROJ_QKV in modules:
        leaves |= PARTS_OF_QKV.keys()
    if layout.dims.experts:
        leaves |= {m.leaf for m in EXPERT_MODULES} | {"gate_up_proj"}
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


def check_matched(
    config: PeftConfig, factors: Collection[Placed], layout: SlotLayout
) -> tuple[str, ...]:
    """Targets, excludes and layers of the config against the pairs that are there; returns notes.

    ``factors``: A of each pair.

    Raises:
        RejectError: untargeted-tensor, layers_pattern, unmatched-target.
    """
    targets, excludes = config.target_modules, config.exclude_modules or ()
    parameters = config.target_parameters
    layers, matched, notes = config.layers_to_transform, set[str](), list[str]()
    leaf_only = targets is not None and all("." not in t for t in targets)
    for placed in factors:
        key, tensor = placed.key, placed.tensor
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
        name = named_parameter(key, config)
        if name is not None:
            matched.update(p for p in parameters if match_name(name, (p,)))
            continue
        if targets is None:
            continue
        leaf = key.module_name.rpartition(".")[2]
        if leaf_only and leaf in targets:
            matched.add(leaf)
            continue
        hits = [t for t in targets if any(match_name(n, (t,)) for n in module_names(key))]
        if match_name(key.module_name, targets) is None and any(
            match_name(part, targets) is None for part in key.parts
        ):
            hits = []
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
