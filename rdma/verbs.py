"""Devices for one-sided RDMA reads, through libibverbs. The only file that imports pyverbs.

pyverbs never releases the GIL inside a verb, so nothing here blocks in one: memory is registered
once (pages present).

What it owns: the device, its protection domain and memory registrations. Invariants: a device gives
all of them back when it is closed, after the queue pairs on it; no device, no library or no kernel
support is one log line and ``None``, but for a device that was named.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, TypeVar

from ..errors import CapacityError, DeviceError
from .devices import ANY, Choice
from .hosts import VerbsClient, VerbsPeer
from .queue_pair import MAX_DEPTH, PORT, QueuePair
from .region import Region

log = logging.getLogger("rota.rdma.verbs")
_T = TypeVar("_T")


class _Library(NamedTuple):
    """The parts of pyverbs that are used."""

    enums: Any
    device: Any
    addr: Any
    cq: Any
    mr: Any
    pd: Any
    qp: Any
    wr: Any


def load_library() -> _Library:
    """Import pyverbs.

    Raises:
        DeviceError: verbs-unavailable, saying how to get it.
    """
    handlers, level = list(logging.root.handlers), logging.root.level
    try:
        try:
            import pyverbs.enums as enums  # rdma-core before 59
        except ModuleNotFoundError as error:
            if error.name != "pyverbs.enums":
                raise
            import pyverbs.libibverbs_enums as enums  # the only name from 59 on
        from pyverbs import addr, cq, device, mr, pd, qp, wr
    except ImportError as error:
        raise DeviceError(
            "pyverbs cannot be imported: install the distribution's python3-pyverbs and put it on"
            " PYTHONPATH, or build PyPI's pyverbs against the same rdma-core",
            code="verbs-unavailable",
            found=str(error)[:200],
        ) from None
    finally:
        # pyverbs.base calls logging.basicConfig when it is imported.
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
    return _Library(enums, device, addr, cq, mr, pd, qp, wr)


class Device:
    """An open verbs device: context and protection domain.

    Args:
        name: e.g. ``"rxe0"``; default the first with an active port.
        gid_index: default the RoCEv2 GID over IPv4, else index 0.

    Raises:
        DeviceError: verbs-unavailable, no-verbs-device, verbs-failed.
    """

    def __init__(self, name: str | None = None, gid_index: int | None = None) -> None:
        self.lib = load_library()
        self._lock = threading.Lock()
        self.registrations = 0
        """Memory registrations made so far."""
        self._context = self._open(name)
        try:
            self.pd = self.lib.pd.PD(self._context)
            attributes = self._context.query_device()
            self.depth = max(
                1, min(MAX_DEPTH, attributes.max_qp_rd_atom, attributes.max_qp_init_rd_atom)
            )
            self.mtu = int(self._context.query_port(PORT).active_mtu)
            self.gid_index, self.gid = self._gid(gid_index)
        except Exception as error:  # pyverbs raises what it likes
            self._context.close()
            raise self.failed("opening the device", error) from error
        self.name = _text(self._context.name)
        self._regions: dict[int, Any] = {}

    def failed(self, what: str, error: BaseException) -> DeviceError:
        """pyverbs's errors as ours."""
        return DeviceError(f"{what} failed", code="verbs-failed", found=str(error)[:200])

    def _open(self, name: str | None) -> Any:
        try:
            names = [_text(d.name) for d in self.lib.device.get_device_list()]
        except Exception as error:  # pyverbs raises what it likes
            raise DeviceError(
                "the kernel has no RDMA support loaded",
                code="no-verbs-device",
                found=str(error)[:200],
            ) from error
        for candidate in names if name is None else [n for n in names if n == name]:
            try:
                context = self.lib.device.Context(name=candidate)
            except Exception as error:  # pyverbs raises what it likes
                if name is not None:
                    raise self.failed("opening the device", error) from error
                continue
            state = context.query_port(PORT).state
            if name is not None or state == self.lib.enums.IBV_PORT_ACTIVE:
                return context
            context.close()
        raise DeviceError(
            "no verbs device with an active port" if name is None else "no such verbs device",
            code="no-verbs-device",
            subject=name,
            found=", ".join(names) or "no device",
        )

    def _gid(self, index: int | None) -> tuple[int, bytes]:
        place = 0 if index is None else index
        if index is None:
            for entry in self._context.query_gid_table(256):
                if entry.port_num != PORT or entry.gid_type != self.lib.enums.IBV_GID_TYPE_ROCE_V2:
                    continue
                raw = _gid_bytes(self._context.query_gid(PORT, entry.gid_index))
                if raw[:12] == bytes(10) + b"\xff\xff":  # an IPv4 address
                    place = int(entry.gid_index)
                    break
        return place, _gid_bytes(self._context.query_gid(PORT, place))

    def register(self, region: Region) -> int:
        """Let others read the region; its rkey. Raises DeviceError verbs-failed."""
        return int(self._register(region, self.lib.enums.IBV_ACCESS_REMOTE_READ).rkey)

    def register_local(self, region: Region) -> int:
        """Let the device write the region for us; its lkey. Raises DeviceError verbs-failed."""
        return int(self._register(region, self.lib.enums.IBV_ACCESS_LOCAL_WRITE).lkey)

    def _register(self, region: Region, access: int) -> Any:
        try:
            handle = self.lib.mr.MR(self.pd, max(1, region.nbytes), access, address=region.address)
        except Exception as error:  # pyverbs raises what it likes
            raise self.failed("registering memory", error) from error
        with self._lock:
            self._regions[region.address] = handle
            self.registrations += 1
        return handle

    def unregister(self, region: Region) -> None:
        """Undo `register` or `register_local`; from then on reads of it fail."""
        with self._lock:
            handle = self._regions.pop(region.address)
        handle.close()

    def takes_device_memory(self) -> bool:
        """The driver can register an accelerator's memory (dmabuf), so that READs could land there.

        A probe, for the log: images are staged in host memory whatever it says. The kernel asks
        the driver before it looks at the descriptor, so a wrong one tells the two apart.
        """
        try:
            made = self.lib.mr.DmaBufMR(
                self.pd, 4096, self.lib.enums.IBV_ACCESS_LOCAL_WRITE, dmabuf=-1
            )
        except Exception as error:  # pyverbs raises what it likes
            return getattr(error, "error_code", 0) == errno.EBADF
        made.close()
        return True

    def pair(self, *, channel: bool) -> QueuePair:
        """A new queue pair. Raises DeviceError verbs-failed."""
        return QueuePair(self, channel=channel)

    @property
    def context(self) -> Any:
        """The pyverbs context."""
        return self._context

    def close(self) -> None:
        """Give registrations, domain and device back. Queue pairs must be closed before."""
        with self._lock:
            handles, self._regions = list(self._regions.values()), {}
        for handle in handles:
            handle.close()
        self.pd.close()
        self._context.close()


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _gid_bytes(gid: Any) -> bytes:
    return ipaddress.IPv6Address(str(gid)).packed


def open_client(arena_bytes: int, devices: Choice = ANY) -> VerbsClient | None:
    """Devices with a registered staging arena for `client.Peer`, or ``None`` where there is none.

    ``None`` comes with one log line that says why; then everything goes by TCP. Who names a device
    gets it, or an error.

    Raises:
        RequestError: bad-verbs-devices.
        DeviceError, CapacityError: a device that was named cannot be used: verbs-unavailable,
            no-verbs-device, verbs-failed, host-memory.
    """
    try:
        client, opened = _made_of(devices, partial(VerbsClient, arena_bytes=arena_bytes))
    except (DeviceError, CapacityError) as error:
        if _named(devices):
            raise
        log.warning("no RDMA here, adapters come by TCP: %s", error)
        return None
    for device in opened:
        can = "can" if device.takes_device_memory() else "cannot"
        log.info(
            "%s %s read into device memory (dmabuf); images land in host memory", device.name, can
        )
    return client


def open_host(devices: Choice = ANY) -> VerbsPeer | None:
    """Devices for a weight peer, or ``None`` (with one log line) where there is none.

    Raises:
        RequestError: bad-verbs-devices.
        DeviceError: as `open_client`.
    """
    try:
        return _made_of(devices, VerbsPeer)[0]
    except DeviceError as error:
        if _named(devices):
            raise
        log.warning("no RDMA here, adapters go by TCP: %s", error)
        return None


def _named(devices: Choice) -> bool:
    return any(name is not None for name, _ in devices)


def _made_of(devices: Choice, make: Callable[[list[Device]], _T]) -> tuple[_T, list[Device]]:
    """What ``make`` makes of the opened devices, and these; after any error all are closed."""
    with ExitStack() as stack:
        opened: list[Device] = []
        for name, gid_index in devices:
            opened.append(Device(name, gid_index))
            stack.callback(opened[-1].close)
        made = make(opened)
        stack.pop_all()
    return made, opened
