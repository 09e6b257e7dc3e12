"""Factors of in_proj_q, in_proj_k and in_proj_v, as some trainers split in_proj_qkv, made one pair.

What it owns: nothing. With A stacked and B block-diagonal the pair of in_proj_qkv adds to each part
of its rows what that part's own factors add; its rank is the sum of theirs. Invariant: values are
moved, never changed.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...errors import RejectError
from .config import PeftConfig
from .dims import LoraModule
from .keys import PairKey, PartKey, Placed
from .layout import SlotLayout
from .pack import file_array
from .safefile import Tensor


def fold_parts(
    found: Mapping[PartKey, Tensor], config: PeftConfig, layout: SlotLayout
) -> list[Placed]:
    """A pair of in_proj_qkv for each layer that has factors of its parts.

    Raises:
        RejectError: unpaired-tensor, shape-mismatch, rank-mismatch, lora_alpha (parts of different
            scales), gdn-fused-rank-exceeds-pool.
    """
    layers: dict[int, list[PartKey]] = {}
    for key in found:
        layers.setdefault(key.layer, []).append(key)
    made = []
    for keys in layers.values():
        made += _fold(sorted(keys, key=lambda k: (k.part, k.half)), found, config, layout)
    return made


def _fold(
    keys: list[PartKey], found: Mapping[PartKey, Tensor], config: PeftConfig, layout: SlotLayout
) -> list[Placed]:
    dims = layout.dims
    keyed, width = dims.gdn_channels - dims.gdn_value, dims.hidden
    heights = (keyed // 2, keyed // 2, dims.gdn_value)
    halves = {(key.part, key.half): (key, found[key]) for key in keys}
    parts = sorted({part for part, _ in halves})
    for part, half in halves:
        if (part, "B" if half == "A" else "A") not in halves:
            raise RejectError(
                "one factor of a pair is missing",
                code="unpaired-tensor",
                subject=halves[part, half][1].key,
                expected="lora_A and lora_B",
                found=f"lora_{half} only",
            )
    names = [halves[part, "A"][0].module_name for part in parts]
    ranks, scales = [config.rank(name) for name in names], {config.scale(name) for name in names}
    first = halves[parts[0], "A"][1]
    if len(scales) > 1:
        raise RejectError(
            "parts of one projection have different scales",
            code="lora_alpha",
            subject=first.key,
            expected="one alpha and rank for in_proj_q, in_proj_k and in_proj_v",
            found=" ".join(f"{scale:g}" for scale in sorted(scales)),
        )
    if sum(ranks) > layout.max_rank:
        raise RejectError(
            "the parts of in_proj_qkv have more rank together than the pool; raise max_lora_rank",
            code="gdn-fused-rank-exceeds-pool",
            subject=first.key,
            expected=f"at most {layout.max_rank}",
            found=sum(ranks),
        )
    for part, rank in zip(parts, ranks, strict=True):
        for half, shape in (("A", (rank, width)), ("B", (heights[part], rank))):
            tensor = halves[part, half][1]
            if tensor.shape != shape:
                raise RejectError(
                    "a factor has the wrong shape",
                    code="shape-mismatch",
                    subject=tensor.key,
                    expected=list(shape),
                    found=list(tensor.shape),
                )
    dtypes = {tensor.dtype for _, tensor in halves.values()}
    if len(dtypes) > 1:
        raise RejectError(
            "parts of one projection have different dtypes",
            code="unsupported-dtype",
            subject=first.key,
            found=" ".join(sorted(dtypes)),
        )
    a = np.concatenate([file_array(halves[part, "A"][1]) for part in parts])
    b = np.zeros((dims.gdn_channels, sum(ranks)), a.dtype)
    column = 0
    for part, rank in zip(parts, ranks, strict=True):
        row = sum(heights[:part])
        values = file_array(halves[part, "B"][1])
        b[row : row + heights[part], column : column + rank] = values
        column += rank
    key = keys[0]
    stem = key.module_name.rpartition(".")[0]
    made = []
    for half, values in (("A", a), ("B", b)):
        place = PairKey(
            key.layer,
            LoraModule.IN_PROJ_QKV,
            "A" if half == "A" else "B",
            f"{stem}.in_proj_qkv",
            key.adapter_name,
            parts=tuple(names),
        )
        block = values.view(np.uint8).reshape(-1)
        tensor = Tensor(first.key, first.dtype, values.shape, block, 0, block.size)
        made.append(Placed(place, tensor))
    return made
