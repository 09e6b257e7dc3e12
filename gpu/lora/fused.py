"""Tensors of modules that some checkpoints keep fused (qkv_proj, in_proj_qkvz), taken apart.

What it owns: the order of fused rows. Invariant: values are moved, never changed.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ...errors import RejectError
from .dims import LoraModule, ModelDims
from .keys import FusedKey, PairKey, Placed
from .layout import SlotLayout
from .pack import file_array
from .safefile import ITEM_BYTES, Tensor

Rows = dict[LoraModule, npt.NDArray[np.int64]]


def grouped_rows(dims: ModelDims) -> Rows:
    """Where the rows of in_proj_qkv and z lie in in_proj_qkvz, and those of b and a in in_proj_ba.

    Each key head has its q, its k, then v and z of the value heads it serves; likewise their b and
    a (transformers' `Qwen3NextGatedDeltaNet.fix_query_key_value_ordering`).
    """
    heads = dims.gdn_groups
    keys = (dims.gdn_channels - dims.gdn_value) // (2 * heads)
    values, each = dims.gdn_value // heads, dims.gdn_heads // heads

    def rows(begin: int, width: int, step: int) -> npt.NDArray[np.int64]:
        starts = np.arange(heads, dtype=np.int64)[:, None] * step + begin
        return (starts + np.arange(width)).reshape(-1)

    step = 2 * keys + 2 * values
    q, k = rows(0, keys, step), rows(keys, keys, step)
    return {
        LoraModule.IN_PROJ_QKV: np.concatenate((q, k, rows(2 * keys, values, step))),
        LoraModule.IN_PROJ_Z: rows(2 * keys + values, values, step),
        LoraModule.IN_PROJ_B: rows(0, each, 2 * each),
        LoraModule.IN_PROJ_A: rows(each, each, 2 * each),
    }


def split_fused(key: FusedKey, tensor: Tensor, layout: SlotLayout) -> list[Placed]:
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
    if key.half != "A" and key.modules[0] in (LoraModule.IN_PROJ_QKV, LoraModule.IN_PROJ_B):
        order, values = grouped_rows(layout.dims), file_array(tensor)
        parts = [(module, values[order[module]]) for module in key.modules]
        return [Placed(_place(key, module), _part(tensor, rows)) for module, rows in parts]
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
        made.append(Placed(_place(key, module), part))
    return made


def _place(key: FusedKey, module: LoraModule) -> PairKey:
    return PairKey(key.layer, module, key.half, key.module_name, key.adapter_name)


def _part(tensor: Tensor, values: npt.NDArray[np.generic]) -> Tensor:
    block = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
    return Tensor(tensor.key, tensor.dtype, tuple(values.shape), block, 0, block.size)
