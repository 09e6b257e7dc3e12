"""What a client needs of a verbs device: registered memory, and queue pairs to read through.

Owns nothing; `hosts.VerbsClient` and `rails.ClientRails` satisfy these, and so does a test's device
without a card.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from . import messages as m

Cancelled = Callable[[], bool]


class OneSided(Protocol):
    """A verbs device with a registered arena, as a client uses it (`hosts.VerbsClient`)."""

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Registered memory, uint8 ``[nbytes]``. Raises CapacityError arena-full."""
        ...

    def contains(self, array: npt.NDArray[np.uint8]) -> bool:
        """The array lies in registered memory."""
        ...

    def open(self, count: int) -> OneSidedRails:
        """Queue pairs, not connected yet. Raises RotaError."""
        ...


class OneSidedRails(Protocol):
    """The client's queue pairs of one promotion."""

    @property
    def rails(self) -> list[m.Rail]:
        """This end, for the peer."""
        ...

    def connect(self, rails: list[m.Rail]) -> None:
        """The peer's end. Raises RotaError."""
        ...

    def read(
        self,
        target: npt.NDArray[np.uint8],
        address: int,
        rkeys: Sequence[int],
        deadline: float,
        cancelled: Cancelled | None,
        landed: Callable[[int], None],
        *,
        stall: float,
    ) -> None:
        """Fill ``target`` from the peer's memory; ``rkeys`` by the peer's devices. Raises
        StagingError."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...
