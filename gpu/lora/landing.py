"""A place on the device for one staged image, so that its commit copies no byte from the host.

What it owns: device memory for one image, two page-locked chunks, a stream and events. A staging
worker uploads an image while steps run; the commit that follows is a copy inside the device, and
the next step waits for that alone.

States: EMPTY -> LANDING (a worker uploads) -> LANDED -> TAKEN (a commit copies) -> EMPTY; a worker
may also land over LANDED, for an image whose commit never came. Invariants: only an image that
landed whole is taken, and only that very object, not one of its name; whoever finds the place in
use does without it; nobody waits for an upload but the worker that does it, and `close`, which an
upload in progress stops for at its next chunk.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Final, Literal, NamedTuple, TypeVar

from ...errors import DeviceError
from ..device import Device, Stream
from .image import SlotImage

log = logging.getLogger("rota.gpu.lora.landing")

CHUNK_BYTES: Final = 4 << 20
"""Page-locked memory of one step of an upload; there are two."""
CLOSE_SECONDS: Final = 5.0
"""How long `close` waits for an upload in progress."""

T = TypeVar("T")


class Part(NamedTuple):
    """``nbytes`` bytes of an image from ``begin``, and the device address they go to."""

    target: int
    begin: int
    nbytes: int


State = Literal["empty", "landing", "landed", "taken", "closed"]


def landing_for(device: Device, nbytes: int) -> Landing | None:
    """A place for images up to this size; ``None`` where the device has no room for one.

    Raises:
        DeviceError: what else the allocations raise.
    """
    try:
        return Landing(device, nbytes)
    except DeviceError as error:
        if error.code != "out-of-memory":
            raise
        log.info("commits copy from the host: there is no room to land images ahead: %s", error)
        return None


class Landing:
    """Made and closed by the device thread, which also takes; any worker may upload.

    Args:
        device: of the pool.
        nbytes: of the largest image.

    Raises:
        DeviceError: what the allocations raise; nothing is kept then.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device, self._nbytes = device, nbytes
        self._changed = threading.Condition()
        self._state: State = "empty"
        self._closing = False
        self._image: SlotImage | None = None
        self._owned: list[tuple[Callable[[Any], None], Any]] = []
        self._chunk = min(CHUNK_BYTES, nbytes)
        own = self._own
        try:
            self._stream = own(device.destroy_stream, device.create_stream(label="lora landing"))
            self._taken = own(device.destroy_event, device.create_event(label="lora landing taken"))
            self._sent, self._chunks = [], []
            for _ in range(2):
                sent = device.create_event(label="lora landing sent")
                self._sent.append(own(device.destroy_event, sent))
                chunk = device.pinned_alloc(self._chunk, label="lora landing chunk")
                self._chunks.append(own(device.pinned_free, chunk))
            self._address = own(device.free, device.alloc(nbytes, label="lora landing"))
        except BaseException:
            self.close()
            raise

    def _own(self, give_back: Callable[[T], None], taken: T) -> T:
        self._owned.append((give_back, taken))
        return taken

    def upload(self, image: SlotImage) -> bool:
        """Land an image; false if the place is in use, or the device refused. Never raises."""
        with self._changed:
            if self._state not in ("empty", "landed") or image.nbytes > self._nbytes:
                return False
            self._state, self._image = "landing", None
        whole = False
        try:
            whole = self._send(image.address, image.nbytes)
        except DeviceError as error:
            log.info("an image was not landed ahead of its commit: %s", error)
        finally:
            with self._changed:
                if self._state == "landing":  # else it was closed without waiting any longer
                    self._state = "landed" if whole else "empty"
                    self._image = image if whole else None
                self._changed.notify_all()
        return whole

    def _send(self, source: int, nbytes: int) -> bool:
        device, stream = self._device, self._stream
        device.wait_event(self._taken, stream)
        for number, start in enumerate(range(0, nbytes, self._chunk)):
            if self._closing:
                break
            side = number % 2
            count = min(self._chunk, nbytes - start)
            if number >= 2:
                device.synchronize_event(self._sent[side])
            ctypes.memmove(self._chunks[side], source + start, count)
            device.copy_h2d(self._address + start, self._chunks[side], count, stream)
            device.record_event(self._sent[side], stream)
        device.synchronize(stream)
        return not self._closing

    def copy_to(self, parts: Sequence[Part], image: SlotImage, stream: Stream) -> bool:
        """Copy the image's parts to their places on the stream, if it has landed; else do nothing.

        Raises:
            DeviceError: what the copy raises.
        """
        with self._changed:
            if self._state != "landed" or self._image is not image:
                return False
            self._state, self._image = "taken", None
        # After a failure the place stays taken: nobody knows when the copy has passed.
        for part in parts:
            self._device.copy_d2d(part.target, self._address + part.begin, part.nbytes, stream)
        self._device.record_event(self._taken, stream)
        with self._changed:
            self._state = "empty"
        return True

    def close(self) -> None:
        """Free everything, once. End the stream's work that takes first.

        Raises:
            DeviceError: what the device would not take back; the rest is freed, and another call
                asks again.
        """
        with self._changed:
            self._closing = True
            ended = self._changed.wait_for(lambda: self._state != "landing", CLOSE_SECONDS)
            self._state, self._image = "closed", None
        if not ended:
            # Its memory is in use for ever; the device's own close names it.
            log.warning("an upload of an adapter does not end; its memory is left to the device")
            self._owned.clear()
        with ExitStack() as stack:
            for owned in tuple(self._owned):
                stack.callback(self._give_back, owned)

    def _give_back(self, owned: tuple[Callable[[Any], None], Any]) -> None:
        give_back, taken = owned
        give_back(taken)
        self._owned.remove(owned)
