"""An adapter coming in: each piece of a known kind is hashed, checked and packed as it is read; of
another kind it is hashed.

What it owns: the window the pieces are read into, and the digest. All is done by the thread that
reads, while the piece is in the processor's cache: a file is read from memory once, and nobody
waits for another thread. Invariant: every byte is taken into the digest once, in order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from .recipe import MOVE_BYTES, Follower, Recipe, Recipes, Terms
from .safefile import ITEM_BYTES

PIECE: Final = 1 << 19
"""Bytes read at a time."""
HASHED_BYTES: Final = 32 << 20
"""Largest file of an unknown kind that is hashed while it is read. Of a larger one another thread
hashes what is read while this one audits and packs, which saves some of the time; of a smaller one
that may cost more than it saves: threads that wake each other may share a processor for some
milliseconds before the system parts them."""


class Intake:
    """A `directory.Sink` that takes adapters there is a recipe for.

    Attributes:
        recipe: for the adapter that was taken, or ``None``.
        digest: SHA-256 of the config and what came of the file.
        missing: bytes of the file that have not come.
        seconds: spent so far on audit, pack and digest, by ``clock``.
        hashed: the digest is of all bytes of a file that was not taken.
    """

    def __init__(self, recipes: Recipes, terms: Terms, clock: Callable[[], float]) -> None:
        self._recipes, self._terms, self._clock = recipes, terms, clock
        self.recipe: Recipe | None = None
        self.digest = hashlib.sha256()
        self.missing = 0
        self._passing = self.hashed = False
        self.seconds = {"audit": 0.0, "pack": 0.0, "digest": 0.0}

    def offer(self, config: bytes, head: npt.NDArray[np.uint8], size: int) -> bool:
        """See `Sink.offer`."""
        start = 8 + int.from_bytes(head[:8].tobytes(), "little")
        if start <= head.nbytes:
            self.recipe = self._recipes.find(config, head[:start].tobytes(), size, self._terms)
        if self.recipe is None:
            self._passing = size <= HASHED_BYTES
            if self._passing:
                self.digest.update(config)
                self.missing = size
            return False
        begun = self._clock()
        self.digest.update(config)
        self.digest.update(head[:start].data)
        self._follower, self._item = Follower(self.recipe), ITEM_BYTES[self.recipe.dtype]
        # What is in the window: bytes of the file from element `first` on, `kept` of them.
        self._window = np.empty(MOVE_BYTES + PIECE + self._item, np.uint8)
        self._first = self._kept = 0
        self.missing = size - start
        self.seconds["digest"] += self._clock() - begun
        for begin in range(start, min(head.nbytes, size), PIECE):
            piece = head[begin : begin + PIECE]
            self.room()[: piece.nbytes] = piece.data
            self.filled(piece.nbytes)
        return True

    def room(self) -> memoryview:
        """See `Sink.room`."""
        end = self._kept + min(PIECE, self.missing)
        return self._window[self._kept : end].data

    def filled(self, count: int) -> None:
        """See `Sink.filled`."""
        clock, seconds, follower, window = self._clock, self.seconds, self._follower, self._window
        kept, end = self._kept, self._kept + count
        whole = end - end % self._item
        begun = clock()
        self.digest.update(window[kept:end].data)
        hashed = clock()
        follower.check(window[kept - kept % self._item : whole])
        checked = clock()
        first = follower.pack(window[:whole], self._first)
        used = (first - self._first) * self._item
        self._first, self._kept = first, end - used
        window[: self._kept] = window[used:end].copy()
        self.missing -= count
        seconds["digest"] += hashed - begun
        seconds["audit"] += checked - hashed
        seconds["pack"] += clock() - checked

    def passing(self, piece: npt.NDArray[np.uint8]) -> None:
        """See `Sink.passing`."""
        if self._passing:
            begun = self._clock()
            self.digest.update(piece.data)
            self.seconds["digest"] += self._clock() - begun
            self.missing -= piece.nbytes
            self.hashed = not self.missing

    def packed(self) -> npt.NDArray[np.uint8] | None:
        """The slot of the adapter that was taken as a whole; ``None`` if the audit must look at
        it."""
        return self._follower.buffer if self._follower.sound() else None
