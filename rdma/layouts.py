"""A slot layout as it travels, and back: checked against its fingerprint.

What it owns: the conversion, and the bounds on what a stranger may make a peer compute.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec
import numpy as np

from ..errors import ModelError, RequestError, StagingError, WireError
from ..gpu.lora.annex import check_annex
from ..gpu.lora.dims import ModelDims
from ..gpu.lora.image import SlotImage
from ..gpu.lora.layout import Elem, SlotLayout
from ..gpu.lora.source import RawAdapter
from ..gpu.lora.stage import laid_out
from .hashes import KNOWN, told_digest
from .messages import CHUNK_BYTES, LayoutSpec, Packed

MAX_LAYERS: Final = 1024
_REMEMBERED_BYTES: Final = 16 << 10
"""Of the largest ranks and scales that are remembered."""


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
    return LayoutSpec(
        dims,
        layout.max_rank,
        layout.elem.value,
        layout.overlay_rows,
        layout.affine,
        layout.expert_rank,
        layout.embedding_rank,
    )


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
        layout = SlotLayout(
            dims,
            spec.max_rank,
            Elem(spec.elem),
            spec.overlay_rows,
            spec.affine,
            spec.expert_rank,
            spec.embedding_rank,
        )
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


def check_packed(
    packed: Packed,
    digest: str,
    layout: SlotLayout,
    hashes: Sequence[str],
    annex_bytes: int | None = None,
) -> SlotImage:
    """Refuse what a peer says of an image when it cannot be one of ``digest`` for ``layout``, is
    hashed by none of ``hashes``, or has an annex of more than ``annex_bytes``; else the image,
    without its bytes.

    Raises:
        WireError: packed-mismatch.
        StagingError: digest-mismatch, of what is said.
        RejectError: annex-exceeds-arena.
    """
    _agree(
        ("digest", digest, packed.digest),
        ("fingerprint", layout.fingerprint(), packed.fingerprint),
        ("hash", True, packed.hash in hashes),
    )
    told = packed.ranks, packed.scales, packed.affine
    facts_of = _facts_once if sum(map(len, told)) <= _REMEMBERED_BYTES else _facts
    facts, present = facts_of(layout, *told, packed.embed_rows, packed.head_rows)
    _agree(("pairs", present, packed.report.pairs))
    nbytes, hash_ = layout.slot_bytes + facts.annex_bytes, KNOWN[packed.hash]
    count = -(-nbytes // CHUNK_BYTES)
    _agree(
        ("nbytes", nbytes, packed.nbytes),
        ("chunks", hash_.digest_bytes * (count + hash_.told), len(packed.chunks)),
    )
    if hash_.told:
        _check_told(packed, hash_.digest_bytes * count)
    check_annex(facts.annex_bytes, annex_bytes)
    return facts


def _facts(
    layout: SlotLayout,
    ranks_told: bytes,
    scales_told: bytes,
    affine: bytes,
    embed_rows: int,
    head_rows: int,
) -> tuple[SlotImage, int]:
    """The image of these facts, without bytes and digest, and how many pairs it has."""
    pairs = len(layout.pairs)
    _agree(
        ("ranks", 2 * pairs, len(ranks_told)),
        ("scales", 4 * pairs, len(scales_told)),
        ("affine", pairs if layout.affine else 0, len(affine)),
    )
    ranks, scales = np.frombuffer(ranks_told, "<u2"), np.frombuffer(scales_told, "<f4")
    present = int(np.count_nonzero(ranks))
    stray = 0 if present == len(ranks) else np.count_nonzero(scales[ranks == 0])
    _agree(
        ("largest rank is in the layout", True, int(ranks.max(initial=0)) <= layout.max_rank),
        ("scales are finite", True, bool(np.isfinite(scales).all())),
        ("scales are where pairs are", 0, stray),
        ("affine is yes or no", True, not affine or max(affine) <= 1),
        ("overlay", True, max(embed_rows, head_rows) <= layout.overlay_rows),
    )
    held = scales.astype(np.float32)
    held.flags.writeable = False  # many images may have it
    facts = laid_out(
        layout,
        held,
        tuple(ranks.tolist()),
        embed_rows=embed_rows,
        head_rows=head_rows,
        affine=tuple(map(bool, affine)),
    )
    return facts, present


_facts_once: Final = lru_cache(64)(_facts)
"""Adapters of one training script have the same; a refusal is not remembered."""


def _check_told(packed: Packed, end: int) -> None:
    """What is said against the digest of it, which is behind the ``end`` bytes of the chunks'."""
    chunks, wanted = packed.chunks[:end], packed.chunks[end:]
    found = told_digest(msgspec.structs.replace(packed, chunks=chunks))
    if found != wanted:
        raise StagingError(
            "what the peer says of its image is not what it meant",
            code="digest-mismatch",
            subject="image",
            expected=wanted.hex(),
            found=found.hex(),
        )


def _agree(*facts: tuple[str, object, object]) -> None:
    for name, expected, found in facts:
        if expected != found:
            raise WireError(
                "the peer's image does not fit the layout asked for",
                code="packed-mismatch",
                subject=name,
                expected=expected,
                found=found,
            )
