"""The two ends of one-sided reads: an engine's with its arena, and a weight peer's.

What it owns: verbs devices, and what is registered with them. Invariants: memory is registered with
every device or with none; a region's keys are in the order of the devices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ..errors import RequestError
from . import messages as m
from .rails import ClientRails, PairDevice, Pairs
from .region import Arena, Region


def _some(devices: Sequence[PairDevice]) -> list[PairDevice]:
    if not 1 <= len(devices) <= m.MAX_RAILS:
        raise RequestError("1..8 verbs devices", code="bad-verbs-devices", found=len(devices))
    return list(devices)


class VerbsClient:
    """Devices and a staging arena that is registered once with each.

    Args:
        devices: 1..8 verbs devices; closed by `close`.
        arena_bytes: what all promotions at once may land in.
        clock: monotonic seconds.

    Raises:
        RequestError: bad-verbs-devices.
        DeviceError: verbs-failed, when the memory cannot be registered.
        CapacityError: host-memory.
    """

    def __init__(
        self,
        devices: Sequence[PairDevice],
        arena_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._devices, self._clock = _some(devices), clock
        self._arena = Arena(arena_bytes)
        self._lkeys = [device.register_local(self._arena.region) for device in self._devices]

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Registered memory; see `Arena.allocate`."""
        return self._arena.allocate(nbytes)

    def contains(self, array: npt.NDArray[np.uint8]) -> bool:
        """The array lies in the arena."""
        return self._arena.contains(array)

    def open(self, count: int) -> ClientRails:
        """Queue pairs for one promotion: ``count``, but at least one on each device. Raises
        DeviceError verbs-failed."""
        return ClientRails(self._devices, max(count, len(self._devices)), self._lkeys, self._clock)

    def close(self) -> None:
        """Give arena and devices back.

        Raises:
            InternalError: memory-in-use, while an image in the arena is alive; nothing is freed.
        """
        self._arena.close()
        for device in self._devices:
            device.unregister(self._arena.region)
            device.close()


class VerbsPeer:
    """Devices that are read from: the peer's side. Closed by `close`.

    Raises:
        RequestError: bad-verbs-devices.
    """

    def __init__(self, devices: Sequence[PairDevice]) -> None:
        self._devices = _some(devices)

    def register(self, region: Region) -> None:
        """See `store.Registrar`."""
        keys: list[int] = []
        try:
            for device in self._devices:
                keys.append(device.register(region))
        except BaseException:
            for device in self._devices[: len(keys)]:
                device.unregister(region)
            raise
        region.rkeys = tuple(keys)

    def unregister(self, region: Region) -> None:
        """See `store.Registrar`."""
        region.rkeys = ()
        for device in self._devices:
            device.unregister(region)

    def accept(self, rails: list[m.Rail]) -> tuple[list[m.Rail], Pairs]:
        """Queue pairs connected to the client's, each on the device of the same number (modulo how
        many there are). Raises DeviceError verbs-failed."""
        places = [rail.device % len(self._devices) for rail in rails]
        pairs = Pairs(self._devices, places, channel=False)
        made = pairs.rails
        try:
            pairs.connect(rails)
        except BaseException:
            pairs.close()
            raise
        return made, pairs

    def prepare(self, count: int) -> tuple[list[m.Rail], Pairs]:
        """``count`` queue pairs on the first device, not connected yet."""
        pairs = Pairs(self._devices, [0] * count, channel=False)
        return pairs.rails, pairs

    def close(self) -> None:
        """Give the devices back."""
        for device in self._devices:
            device.close()
