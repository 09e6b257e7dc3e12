"""Tensors of modules that other checkpoints keep fused (qkv_proj, gate_up_proj), taken apart.

What it owns: nothing. Invariant: values are moved, never changed.
"""

from __future__ import annotations

import math

from ...errors import RejectError
from .keys import FusedKey, PairKey
from .layout import SlotLayout
from .safefile import ITEM_BYTES, Tensor


def split_fused(key: FusedKey, tensor: Tensor, layout: SlotLayout) -> list[tuple[PairKey, Tensor]]:
    """The parts of a fused tensor: A is every module's, the rows of all else are theirs in turn.

    Exact: rows of W + s B A depend on the same rows of B alone.

    Raises:
        RejectError: shape-mismatch.
    """
    heights = [layout.dims.shape(module)[0] for module in key.modules]
    if key.half != "A" and (not tensor.shape or tensor.shape[0] != sum(heights)):
        raise RejectError(
            "a fused tensor does not have the rows of the modules it stands for",
            code="shape-mismatch",
            subject=tensor.key,
            expected=f"{sum(heights)} rows: " + " + ".join(map(str, heights)),
            found=list(tensor.shape),
        )
    made, begin = [], tensor.begin
    for module, height in zip(key.modules, heights, strict=True):
        part = tensor
        if key.half != "A":
            width = ITEM_BYTES[tensor.dtype] * math.prod(tensor.shape[1:])
            part = Tensor(
                tensor.key,
                tensor.dtype,
                (height, *tensor.shape[1:]),
                tensor.block,
                begin,
                begin + height * width,
            )
            begin = part.end
        place = PairKey(key.layer, module, key.half, key.module_name, key.adapter_name)
        made.append((place, part))
    return made
