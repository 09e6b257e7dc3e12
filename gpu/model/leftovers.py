"""What a device did not take back when it was asked, to be asked again.

What it owns: parts that are out of use and whose `close` failed. Invariant: giving a part up never
fails, so whatever replaces it stands; what is left of it is counted by nobody else until `close`.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Protocol

from ...errors import DeviceError

logger = logging.getLogger("rota.gpu.model.leftovers")


class Part(Protocol):
    """Something whose `close` may fail, and may then be called again for the rest."""

    def close(self) -> None: ...


class Leftovers:
    """Empty at first."""

    def __init__(self) -> None:
        self._parts: list[Part] = []

    def give_up(self, part: Part) -> None:
        """Close a part that is out of use; what the device does not take back is kept for `close`.
        Never raises DeviceError: if the device is lost, its next step says so."""
        try:
            part.close()
        except DeviceError as error:
            logger.warning("some memory is given back at the end only: %s", error)
            self._parts.append(part)

    def close(self) -> None:
        """Ask again for everything that is left, once. Raises DeviceError."""
        parts, self._parts = self._parts, []
        with ExitStack() as stack:
            for part in parts:
                stack.callback(part.close)
