"""Which bytes of a pool's arena hold whose annex, as the pool was told.

What it owns: each slot's extent on the device. Where an annex goes is decided elsewhere; here it is
only refused where it would lie over another one, or over the arena's end.
"""

from __future__ import annotations

from ...errors import DeviceError
from .annex import ANNEX_ALIGN
from .image import SlotImage


class Extents:
    """Of ``max_loras`` slots in an arena of ``arena_bytes``."""

    def __init__(self, arena_bytes: int, max_loras: int) -> None:
        self._total = arena_bytes
        #: First byte and end.
        self._held: list[tuple[int, int]] = [(0, 0)] * max_loras

    def clear(self, slot: int) -> None:
        """Nothing of ``slot`` lies there any more."""
        self._held[slot] = (0, 0)

    def put(self, slot: int, image: SlotImage, extent: int | None) -> int:
        """Note the annex of ``image`` for ``slot``; returns its offset, ``extent``.

        Raises:
            DeviceError: bad-extent.
        """
        begin = -1 if extent is None else extent
        end = begin + image.annex_bytes
        over = [s for s, (a, b) in enumerate(self._held) if a < b and a < end and begin < b]
        if begin < 0 or begin % ANNEX_ALIGN or end > self._total or over:
            raise DeviceError(
                "the annex has no place of its own in the arena",
                code="bad-extent",
                subject=image.digest,
                expected=f"{image.annex_bytes} of {self._total} bytes, nobody else's",
                found=f"from {extent}, in slots {over}",
            )
        self._held[slot] = begin, end
        return begin
