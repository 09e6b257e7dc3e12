"""Packing: tensors of a file into the bytes of a slot image.

What it owns: the conversions between file dtypes and the slot's element type, and where each factor
goes: A ``[r, in]`` at the head of its region, row i of B ``[out, r]`` at column 0 of row i of
``[out, R]``. Invariant: bytes that hold no value are zero.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from ...errors import InternalError
from .annex import Annex
from .layout import Elem, SlotLayout
from .safefile import ITEM_BYTES, Tensor

FILE_DTYPES: Final[dict[str, type[np.generic]]] = {
    "BF16": np.uint16,
    "F16": np.float16,
    "F32": np.float32,
}

_HIGH_HALF = 1 if sys.byteorder == "little" else 0
_CHUNK = 1 << 15
"""Elements converted at a time: the temporaries stay in the second-level cache."""


class PairTensors(msgspec.Struct, frozen=True, eq=False, gc=False):
    """An audited pair: its place, both factors, true rank and scale. In no cycle: see `Tensor`."""

    index: int
    a: Tensor
    b: Tensor
    rank: int
    scale: float


def to_bf16(source: npt.NDArray[np.generic], *, finite: bool = False) -> npt.NDArray[np.uint16]:
    """float32 or float16 to BF16 bit patterns (uint16), same shape, round to nearest even.

    A NaN stays a NaN (quiet bit set, sign and high payload kept); overflow rounds to infinity.
    ``finite``: the caller knows there is no NaN, which saves looking for one.
    """
    flat = np.ascontiguousarray(source).reshape(-1)
    target = np.empty(flat.size, np.uint16)
    scratch = np.empty(min(_CHUNK, flat.size), np.uint32)
    for start in range(0, flat.size, _CHUNK):
        piece = _wide(flat[start : start + _CHUNK]).view(np.uint32)
        work = scratch[: piece.size]
        np.right_shift(piece, 16, out=work)
        np.bitwise_and(work, 1, out=work)
        np.add(work, 0x7FFF, out=work)
        np.add(work, piece, out=work)
        out = target[start : start + _CHUNK]
        out[:] = work.view(np.uint16)[_HIGH_HALF::2]
        if not finite:
            nan = (piece & 0x7FFFFFFF) > 0x7F800000
            if nan.any():
                out[nan] = ((piece[nan] >> 16) | 0x40).astype(np.uint16)
    return target.reshape(source.shape)


def bf16_to_f32(source: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """BF16 bit patterns (uint16) to float32, exactly."""
    return (source.astype(np.uint32) << 16).view(np.float32)


def as_f32(values: npt.NDArray[np.generic]) -> npt.NDArray[np.float32]:
    """Slot values (uint16 = BF16 bits, or float32) as float32."""
    return (
        bf16_to_f32(values.astype(np.uint16))
        if values.dtype == np.uint16
        else values.astype(np.float32)
    )


def file_array(tensor: Tensor) -> npt.NDArray[np.generic]:
    """The tensor's values, shaped, as the file has them: uint16 for BF16, else float16/float32."""
    return tensor.data.view(FILE_DTYPES[tensor.dtype]).reshape(tensor.shape)


def to_elem(
    values: npt.NDArray[np.generic], elem: Elem, *, finite: bool = False
) -> npt.NDArray[np.generic]:
    """Convert file or base values (uint16 = BF16 bits, float16, float32) to ``elem``'s numpy form.

    No copy when they have it already. ``finite``: as in `to_bf16`.
    """
    if values.dtype == elem.numpy:
        return values
    if values.dtype == np.uint16:
        return bf16_to_f32(values.view(np.uint16))
    return _wide(values) if elem is Elem.F32 else to_bf16(values, finite=finite)


def _wide(values: npt.NDArray[np.generic]) -> npt.NDArray[np.float32]:
    """float16 or float32 as float32, exactly."""
    with np.errstate(invalid="ignore"):  # a signalling NaN, in bytes the audit did not cover
        return values.astype(np.float32, copy=False)


def to_f32(values: npt.NDArray[np.generic]) -> npt.NDArray[np.float32]:
    """Values of a file (uint16 = BF16 bits, float16, float32) as float32, exactly."""
    return bf16_to_f32(values.view(np.uint16)) if values.dtype == np.uint16 else _wide(values)


def reuse_buffer(
    buffer: npt.NDArray[np.uint8] | bytearray | memoryview, nbytes: int
) -> npt.NDArray[np.uint8]:
    """The first ``nbytes`` of a caller's buffer for an image; what is in it does not matter.

    Raises:
        InternalError: bad-buffer, when it is not a writable run of at least so many bytes.
    """
    made = buffer if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, np.uint8)
    flags = made.flags
    right = made.dtype == np.uint8 and made.ndim == 1 and made.nbytes >= nbytes
    if not (right and flags.writeable and flags.c_contiguous):
        raise InternalError(
            "not a usable buffer for a slot image",
            code="bad-buffer",
            expected=f"{nbytes} writable contiguous bytes",
            found=f"{made.dtype} {made.shape} writeable={flags.writeable}",
        )
    return made[:nbytes]


def pack_pairs(
    pairs: Sequence[PairTensors],
    layout: SlotLayout,
    buffer: npt.NDArray[np.uint8],
    annex: Annex | None = None,
) -> None:
    """Write audited (hence finite) pairs into an image's buffer (uint8 ``[nbytes]``), and zero into
    every other byte of it."""
    elem = layout.elem
    size = elem.size
    starts = [layout.a_start(pair.index, annex) for pair in pairs]
    filled = ((pair.index, pair.rank, start) for pair, start in zip(pairs, starts, strict=True))
    for begin, end in gaps(filled, layout, buffer.size):
        buffer[begin:end] = 0
    slot = buffer.view(elem.numpy)
    converted = _convert_blocks(pairs, elem)
    for pair, begin in zip(pairs, starts, strict=True):
        place, rank, a, b = layout.pairs[pair.index], pair.rank, pair.a, pair.b
        stride, start = place.stride, begin // size
        b_start = start + stride * place.k_in
        if rank == stride and a.end == b.begin and a.block is b.block and id(a.block) in converted:
            both = _values(a, elem, converted, b.end)  # side by side there and here
            slot[start : start + both.size] = both
            continue
        values = _values(a, elem, converted)
        slot[start : start + values.size] = values
        values = _values(b, elem, converted)
        region = slot[b_start : b_start + place.n_out * stride]
        if rank == stride:
            region[:] = values
        else:
            region.reshape(place.n_out, stride)[:, :rank] = values.reshape(place.n_out, rank)


def gaps(
    pairs: Iterable[tuple[int, int, int]], layout: SlotLayout, nbytes: int
) -> Iterator[tuple[int, int]]:
    """(begin, end) bytes of an image of ``nbytes`` that no pair fills, to be zeroed. Most adapters
    fill nearly all; clearing costs as much as packing. ``pairs``: index, rank and
    `SlotLayout.a_start` of each.

    Rows of B shorter than the stride leave holes, so that whole region is one.
    """
    size, begins, ends = layout.elem.size, [nbytes], [0]
    for index, rank, start in pairs:
        place = layout.pairs[index]
        begins.append(start)
        ends.append(start + rank * place.k_in * size)
        if rank == place.stride:
            b_start = start + place.stride * place.k_in * size
            begins.append(b_start)
            ends.append(b_start + place.n_out * place.stride * size)
    # What is filled does not overlap: in order, each end is followed by the next begin.
    runs = zip(sorted(ends), sorted(begins), strict=True)
    return ((end, begin) for end, begin in runs if end < begin)


def _convert_blocks(pairs: Sequence[PairTensors], elem: Elem) -> dict[int, npt.NDArray[np.generic]]:
    """id(block) -> the whole block in ``elem``, where its pairs share one dtype.

    One long conversion instead of hundreds of short ones.
    """
    found: dict[int, tuple[npt.NDArray[np.uint8], set[str]]] = {}
    for tensor in (t for pair in pairs for t in (pair.a, pair.b)):
        block, dtype = tensor.block, tensor.dtype
        if id(block) not in found:
            found[id(block)] = block, set()
        found[id(block)][1].add(dtype if tensor.begin % ITEM_BYTES[dtype] == 0 else "unaligned")
    converted: dict[int, npt.NDArray[np.generic]] = {}
    for key, (block, dtypes) in found.items():
        if len(dtypes) == 1 and (dtype := dtypes.pop()) in ITEM_BYTES:
            view = block[: block.nbytes // ITEM_BYTES[dtype] * ITEM_BYTES[dtype]]
            converted[key] = to_elem(view.view(FILE_DTYPES[dtype]), elem, finite=True)
    return converted


def _values(
    tensor: Tensor,
    elem: Elem,
    converted: dict[int, npt.NDArray[np.generic]],
    end: int | None = None,
) -> npt.NDArray[np.generic]:
    """The tensor's elements, flat, in ``elem``; of a converted block up to byte ``end``."""
    block = converted.get(id(tensor.block))
    if block is not None:
        item = ITEM_BYTES[tensor.dtype]
        return block[tensor.begin // item : (tensor.end if end is None else end) // item]
    return to_elem(file_array(tensor), elem).reshape(-1)
