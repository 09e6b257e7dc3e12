"""A slot layout as it travels, and back: checked against its fingerprint.

What it owns: the conversion, and the bounds on what a stranger may make a peer compute. Also the
chunk digests of packed images, which both ends reckon the same way.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import ModelError, RequestError, WireError
from ..gpu.lora.dims import ModelDims
from ..gpu.lora.layout import Elem, SlotLayout
from ..gpu.lora.source import RawAdapter
from .messages import CHUNK_BYTES, LayoutSpec

MAX_LAYERS: Final = 1024


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DigestedAdapter(RawAdapter):
    """Adapter bytes whose digest was already reckoned from these very bytes."""

    known: str = ""

    def digest(self) -> str:
        """See `RawAdapter.digest`."""
        return self.known


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class HeldSource:
    """An `AdapterSource` over bytes that were read before."""

    raw: RawAdapter

    def read(self, limits: object) -> RawAdapter:
        """The bytes."""
        return self.raw


def layout_spec(layout: SlotLayout) -> LayoutSpec:
    """The layout as its constructor takes it."""
    dims = {
        field.name: list(value) if isinstance(value, tuple) else value
        for field in dataclasses.fields(layout.dims)
        for value in (getattr(layout.dims, field.name),)
    }
    return LayoutSpec(dims, layout.max_rank, layout.elem.value, layout.overlay_rows)


def layout_of(spec: LayoutSpec, fingerprint: str, max_bytes: int) -> SlotLayout:
    """The layout rebuilt; a slot of it is at most ``max_bytes``.

    Raises:
        RequestError: bad-layout, when it is not one this version knows, or too large.
        WireError: fingerprint-mismatch, when the two ends would lay out a slot differently.
    """
    known = {field.name for field in dataclasses.fields(ModelDims)}
    try:
        if not set(spec.dims) <= known:
            raise ValueError(f"unknown dimensions {sorted(set(spec.dims) - known)[:4]}")
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in spec.dims.items()
        }
        dims = ModelDims(**values)
        if dims.num_layers > MAX_LAYERS:
            raise ValueError(f"more than {MAX_LAYERS} layers")
        layout = SlotLayout(dims, spec.max_rank, Elem(spec.elem), spec.overlay_rows)
        slot_bytes = layout.slot_bytes
    except (ModelError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise RequestError(
            "not a slot layout", code="bad-layout", found=str(error)[:200]
        ) from error
    if slot_bytes > max_bytes:
        raise RequestError(
            "a slot of this layout is too large to pack here",
            code="bad-layout",
            expected=f"at most {max_bytes} bytes",
            found=slot_bytes,
        )
    if layout.fingerprint() != fingerprint:
        raise WireError(
            "the two ends lay out a slot differently; run the same version on both",
            code="fingerprint-mismatch",
            expected=layout.fingerprint(),
            found=fingerprint,
        )
    return layout


def chunk_digests(image: npt.NDArray[np.uint8]) -> bytes:
    """SHA-256 of each `CHUNK_BYTES` of a uint8 ``[n]`` image, joined (32 bytes a chunk)."""
    return b"".join(
        hashlib.sha256(image[start : start + CHUNK_BYTES].data).digest()
        for start in range(0, image.nbytes, CHUNK_BYTES)
    )
