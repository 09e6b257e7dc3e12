"""The device suite runs over every backend in `BACKENDS`; a new backend is one more entry.

Tests reach memory only through the protocol (pinned buffers and copies), so that they hold for a
device whose addresses the CPU cannot follow.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pytest

from rota.errors import DeviceError
from rota.gpu.device import DEVICE_CODES, Device, Graph, KernelSpec, Stream
from rota.gpu.host import HostDevice

CUDA_ADD = """
extern "C" __global__ void add_bytes(unsigned char* p, int n, int value) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) p[i] = (unsigned char)(p[i] + value);
}
"""


def add_bytes(addr: int, n: int, value: int) -> None:
    """Host form of ``add_bytes``."""
    view = (ctypes.c_ubyte * n).from_address(addr)
    for i in range(n):
        view[i] = (view[i] + value) & 0xFF


ADD_BYTES = KernelSpec(
    "add_bytes",
    "pii",
    host=add_bytes,
    cuda_source=CUDA_ADD,
    footprint=lambda args: [(int(args[0]), int(args[1]), "w")],
)


@dataclass(frozen=True)
class Backend:
    """One implementation under test. ``checked``: it raises on leaks.

    ``make`` is ``None`` for the CUDA device, which needs the machine tests run on.
    """

    name: str
    make: Callable[..., Device] | None
    checked: bool
    logger: str = "rota.gpu.host"


BACKENDS = (
    Backend("host-checked", lambda **kw: HostDevice(checked=True, **kw), True),
    Backend("host-serving", lambda **kw: HostDevice(checked=False, **kw), False),
    Backend("cuda-checked", None, True, "rota.gpu.cuda"),
    Backend("cuda-serving", None, False, "rota.gpu.cuda"),
)


class Rig:
    """A device with one stream, and ways to look at its memory."""

    def __init__(self, device: Device, checked: bool) -> None:
        self.device = device
        self.checked = checked
        self.stream = device.create_stream(label="main")
        self.add = device.load_kernel(ADD_BYTES)

    def write(self, addr: int, data: bytes, stream: Stream | None = None) -> None:
        """Queue a pageable copy to the device."""
        held = ctypes.create_string_buffer(data, len(data))
        on = self.stream if stream is None else stream
        self.device.copy_h2d(addr, ctypes.addressof(held), len(data), on)

    def read(self, addr: int, n: int, stream: Stream | None = None) -> bytes:
        """Read device memory after the stream's work (a pageable copy is complete at return)."""
        held = ctypes.create_string_buffer(n)
        on = self.stream if stream is None else stream
        self.device.copy_d2h(ctypes.addressof(held), addr, n, on)
        return held.raw

    def launch_add(self, addr: int, n: int, value: int, stream: Stream | None = None) -> None:
        """Queue ``p[i] += value`` over ``n`` bytes."""
        on = self.stream if stream is None else stream
        self.device.launch(self.add, (-(-n // 128), 1, 1), (128, 1, 1), (addr, n, value), on)

    def capture_add(self, addr: int, n: int = 8, value: int = 1) -> Graph:
        """A graph of one ``add_bytes``."""
        self.device.begin_capture(self.stream)
        self.launch_add(addr, n, value)
        return self.device.end_capture(self.stream)

    @staticmethod
    def elsewhere(call: Callable[[], object]) -> str | None:
        """Run ``call`` on a fresh thread; the code of the `DeviceError` it raised, or ``None``."""
        codes: list[str] = []

        def run() -> None:
            try:
                call()
            except DeviceError as error:
                codes.append(error.code)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return codes[0] if codes else None

    @contextmanager
    def refuses(self, code: str, subject: str | None = None) -> Iterator[None]:
        """The block must raise `DeviceError` with this code, about this subject."""
        assert code in DEVICE_CODES
        with pytest.raises(DeviceError) as caught:
            yield
        assert caught.value.code == code, caught.value
        if subject is not None:
            assert caught.value.subject == subject


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each backend in turn."""
    chosen = request.param
    assert isinstance(chosen, Backend)
    return chosen


@pytest.fixture
def make_device(
    backend: Backend, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Device]]:
    """Open devices of the backend; whatever a test leaves in them is freed afterwards."""
    opened: list[Device] = []
    make_one, driver = backend.make, None
    if make_one is None:
        machine = request.getfixturevalue("cuda_machine")
        driver = machine.fake.reset() if machine.fake else None
        make_one = functools.partial(machine.open, checked=backend.checked)

    def make(**keywords: object) -> Device:
        device = make_one(**keywords)
        opened.append(device)
        return device

    yield make
    for device in opened:
        try:
            device.close()
        except DeviceError as error:
            if error.code != "leak":  # leaks have their own tests; here they are only tidied up
                raise
    if driver is not None:
        assert driver.live() == {}, driver.story


@pytest.fixture
def rig(backend: Backend, make_device: Callable[..., Device]) -> Rig:
    """A rig on each backend."""
    return Rig(make_device(), backend.checked)


@pytest.fixture(params=BACKENDS[:2], ids=lambda backend: backend.name)
def host_rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """A rig on each host backend, for what only a device that calls Python can do."""
    device = request.param.make()
    yield Rig(device, request.param.checked)
    with suppress(DeviceError):  # leaks
        device.close()


@pytest.fixture
def make_checked_rig() -> Iterator[Callable[..., Rig]]:
    """Open checked host rigs with the keywords of a test's choice."""
    opened: list[Device] = []

    def make(**keywords: int | bool) -> Rig:
        # Keywords of several kinds.
        device = HostDevice(checked=True, **keywords)  # type: ignore[arg-type]
        opened.append(device)
        return Rig(device, True)

    yield make
    for device in opened:
        try:
            device.close()
        except DeviceError as error:
            if error.code not in ("leak", "redzone-broken"):
                raise


@pytest.fixture
def checked_rig(make_checked_rig: Callable[..., Rig]) -> Rig:
    """A checked host rig."""
    return make_checked_rig()
