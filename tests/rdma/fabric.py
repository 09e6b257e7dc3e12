"""A verbs device of the tests' own: memory by key, queue pairs that copy it at a later poll."""

from __future__ import annotations

import ctypes
import os
import random

from rota.errors import DeviceError
from rota.rdma import messages as m
from rota.rdma.region import Region

MIB = 1 << 20


class Fabric:
    """Memory that can be read, by key; how its queue pairs behave; what they did."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.keys: dict[int, Region] = {}
        self.devices: dict[bytes, FakeDevice] = {}
        self.status: dict[int, int] = {}  # how the n-th read of all ends
        self.flipped: tuple[int, int] | None = None  # of the n-th read, this byte, by one bit
        self.stuck = False  # nothing completes but by fail()
        self.posted = self.most = self.open = self.registrations = 0
        self.refuse_local = self.refuse_remote = self.refuse_pair = False
        self.writes: list[int] = []


class FakePair:
    """A queue pair that copies memory at a later `poll`, in order, some at a time."""

    def __init__(self, device: FakeDevice, channel: bool) -> None:
        fabric = device.fabric
        if fabric.refuse_pair:
            raise DeviceError("no queue pair", code="verbs-failed")
        self.device, self.fabric, self.depth = device, fabric, 4
        self.far: FakeDevice | None = None
        self.ready, self.signal = os.pipe() if channel else (-1, -1)
        self.descriptor = self.ready
        self.queue: list[tuple[int, int, int, int, int]] = []
        self.failed = self.closed = self.connected = False
        fabric.open += 1

    @property
    def rail(self) -> m.Rail:
        return m.Rail(7, 9, self.device.gid, 3, self.depth, 0)

    def connect(self, other: m.Rail) -> None:
        self.far = self.fabric.devices[other.gid]
        self.connected = True

    def post_read(self, number: int, local: int, lkey: int, remote: int, rkey: int, n: int) -> None:
        assert self.connected and not self.failed and not self.closed
        assert 0 < n <= MIB
        assert lkey == self.device.lkey  # a key of another device is none
        self.device.posted += 1
        self.queue.append((number, local, remote, rkey, n))
        assert len(self.queue) <= self.depth
        self.fabric.posted += 1
        self.fabric.most = max(self.fabric.most, len(self.queue))
        os.write(self.signal, b"x")

    def poll(self) -> list[tuple[int, int]]:
        if self.failed:
            done = [(number, 5) for number, *_ in self.queue]
            self.queue.clear()
            return done
        if self.fabric.stuck or not self.queue:
            return []
        done = []
        for _ in range(self.fabric.rng.randint(0, len(self.queue))):
            number, local, remote, rkey, n = self.queue.pop(0)
            status = self.fabric.status.get(number, 0)
            region = self.fabric.keys.get(rkey)
            here = self.far is not None and rkey in self.far.keys.values()
            if (
                region is None
                or not here
                or not (region.address <= remote and remote + n <= region.address + region.nbytes)
            ):
                status = 10
            if not status:
                ctypes.memmove(local, remote, n)
                self.fabric.writes.append(local)
                if self.fabric.flipped is not None and self.fabric.flipped[0] == number:
                    place = local + self.fabric.flipped[1] % n
                    ctypes.c_uint8.from_address(place).value ^= 1 << number % 8
            done.append((number, status))
            if status:
                self.failed = True
                break
        return done

    def arm(self) -> None:
        assert not self.closed

    def take_event(self) -> None:
        os.read(self.ready, 1)

    def fail(self) -> None:
        self.failed = True

    def close(self) -> None:
        assert not self.closed
        self.closed = True
        self.fabric.open -= 1
        if self.ready >= 0:
            os.close(self.ready)
            os.close(self.signal)


class FakeDevice:
    """One device on the fabric. ``refuse``: registers nothing for others."""

    name = "fake0"

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.gid = len(fabric.devices).to_bytes(16, "big")
        fabric.devices[self.gid] = self
        self.posted, self.lkey, self.refuse = 0, -1, False
        self.keys: dict[int, int] = {}
        self.closed = False

    def register(self, region: Region) -> int:
        if self.fabric.refuse_remote or self.refuse:
            raise DeviceError("no memory", code="verbs-failed")
        self.fabric.registrations += 1
        key = 100 + self.fabric.registrations
        self.fabric.keys[key] = region
        self.keys[region.address] = key
        return key

    def register_local(self, region: Region) -> int:
        if self.fabric.refuse_local:
            raise DeviceError("no memory", code="verbs-failed")
        self.fabric.registrations += 1
        self.lkey = 1000 + self.fabric.registrations
        return self.lkey

    def unregister(self, region: Region) -> None:
        if (key := self.keys.pop(region.address, None)) is not None:
            del self.fabric.keys[key]

    def pair(self, *, channel: bool) -> FakePair:
        return FakePair(self, channel)

    def close(self) -> None:
        assert not self.closed
        self.closed = True
