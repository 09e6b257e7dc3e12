"""The annex of one image: what its adapter has of experts, token matrices and token overlay.

What it owns: nothing; a frozen value that says where these lie in the image, behind the slot's
part. It is of exactly the size the adapter needs, so it has an extent of its own in the pool's
arena instead of room in every slot. Invariants: only pairs that are there take bytes, in pair
order, then their vectors, then the overlay's four arrays, each of the used rows alone; everything
begins on a 16-byte boundary, and the whole is a multiple of 256 bytes, like the arena, so that
every extent begins on such a boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from ...errors import CommandError, RejectError

ALIGN: Final = 16
ANNEX_ALIGN: Final = 256
"""Annexes, and hence the extents of an arena, are multiples of this many bytes."""
DEFAULT_ARENA_BYTES: Final = 1 << 30
"""An arena nobody gave a size has room for the largest annex in every slot, up to this; but always
for the largest once."""


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of ``multiple`` that is >= ``value``."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class OverlayOffsets:
    """Bytes from the image's start of the four overlay arrays (each 16-byte aligned).

    ``embed_ids``, ``head_ids``: int32 ``[rows]``, ascending. ``embed_rows``, ``head_rows``:
    ``[rows, hidden]`` elements.
    """

    embed_ids: int
    embed_rows: int
    head_ids: int
    head_rows: int


@dataclass(frozen=True, slots=True, eq=False)
class Annex:
    """Where one adapter's annex lies; made by `SlotLayout.annex_for`.

    Attributes:
        begin: bytes of the image before it (the layout's ``slot_bytes``).
        nbytes: of it, a multiple of 256.
        pairs: int64 ``[n_pairs]``, bytes from the image's start of A, or -1.
        vectors: int64 ``[n_pairs]``, bytes from the image's start of mul, or -1.
        overlay: of the replaced token rows, ``None`` without any.
    """

    begin: int
    nbytes: int
    pairs: npt.NDArray[np.int64]
    vectors: npt.NDArray[np.int64]
    overlay: OverlayOffsets | None = None


def arena_bytes(option: int | None, largest: int, max_loras: int) -> int:
    """Bytes of a pool's arena, a multiple of 256.

    Args:
        option: what was asked for; ``None`` for the default.
        largest: bytes of the largest annex the layout allows.
    """
    if option is None:
        option = max(largest, min(max_loras * largest, DEFAULT_ARENA_BYTES))
    return option // ANNEX_ALIGN * ANNEX_ALIGN


def check_annex(nbytes: int, limit: int | None) -> None:
    """Refuse an annex that fits no arena of ``limit`` bytes (``None``: any).

    Raises:
        RejectError: annex-exceeds-arena.
    """
    if limit is not None and nbytes > limit:
        raise RejectError(
            "the adapter's experts, token matrices and overlay need more bytes than the arena has",
            code="annex-exceeds-arena",
            expected=f"an adapter_arena_bytes of at least {nbytes}",
            found=f"{limit} bytes",
        )


class Resident(Protocol):
    """An adapter in a slot that is to come back in another pool."""

    @property
    def slot(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def pinned(self) -> bool: ...


def check_residents(residents: Sequence[Resident], needs: Sequence[int], limit: int) -> None:
    """Refuse an arena of ``limit`` bytes in which residents, who need this many bytes each, find no
    place: one alone, or all that are pinned together.

    Raises:
        CommandError: resident-annex-too-large, pinned-annexes-do-not-fit.
    """
    for resident, nbytes in zip(residents, needs, strict=True):
        if nbytes > limit:
            raise CommandError(
                "a resident adapter would not fit in the arena; unload it first",
                code="resident-annex-too-large",
                subject=resident.name,
                expected=f"an arena of at least {nbytes} bytes",
                found=f"{limit} bytes",
            )
    pinned = [(r.name, n) for r, n in zip(residents, needs, strict=True) if r.pinned and n]
    total = sum(nbytes for _, nbytes in pinned)
    if total > limit:
        raise CommandError(
            "the pinned adapters would not fit in the arena together",
            code="pinned-annexes-do-not-fit",
            subject=", ".join(f"{name}: {nbytes}" for name, nbytes in pinned)[:500],
            expected=f"an arena of at least {total} bytes",
            found=f"{limit} bytes",
        )
