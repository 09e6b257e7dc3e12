"""Rigs for the CUDA tests: a device with a stream, a LoRA problem whose answer is exact, places
where ways to attend are tried, and whole models."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from rota.errors import DeviceError
from rota.gpu.host import HostDevice
from rota.gpu.kernels.bgmv import LoraSlice
from rota.gpu.kernels.lora_device import DeviceLoraGroup, planes_bytes
from rota.gpu.model import torch_attention_flashinfer
from rota.gpu.model.torch_attention import AttentionSpec
from rota.gpu.tensors import HostSpace

from .models import Both, models_on_driver, models_on_host
from .paged_kernels import Flash, flashinfer_module


def to_bf16(values):
    """Round float values to the bits of bf16, ties to even."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


class Rig:
    """A device, one stream, and moves between it and numpy."""

    def __init__(self, device, driver=None):
        self.device = device
        self.driver = driver
        self.stream = device.create_stream(label="main")
        self.held = []

    def up(self, array, label="array"):
        """Allocate, copy, remember to free."""
        array = np.ascontiguousarray(array)
        address = self.device.alloc(max(array.nbytes, 1), label=label)
        self.held.append(address)
        self.write(address, array)
        return address

    def write(self, address, array):
        array = np.ascontiguousarray(array)
        self.device.copy_h2d(address, array.ctypes.data, array.nbytes, self.stream)

    def down(self, address, shape, dtype):
        out = np.empty(shape, dtype)
        self.device.copy_d2h(out.ctypes.data, address, out.nbytes, self.stream)
        return out

    def close(self):
        """Give everything back; also on a device that was lost, where only that is left."""
        try:
            self.device.synchronize(self.stream)
        except DeviceError as error:
            if error.code != "device-dead":
                raise
        while self.held:
            self.device.free(self.held.pop())
        self.device.destroy_stream(self.stream)
        self.device.close()


@pytest.fixture
def driver(cuda_machine):
    """A fresh test driver, or ``None`` on a GPU."""
    return cuda_machine.fake.reset() if cuda_machine.fake else None


@pytest.fixture
def rig(cuda_machine, driver):
    """A rig on the CUDA device; leaves nothing behind."""
    made = Rig(cuda_machine.open(checked=True), driver)
    yield made
    made.close()
    if driver is not None:
        assert driver.live() == {}, driver.story


@pytest.fixture
def new_rig():
    """The `Rig` class, for tests that open a device of their own and close it."""
    return Rig


@pytest.fixture
def fake_rig(rig):
    """A rig that needs the test driver."""
    if rig.driver is None:
        pytest.skip("plants a fault that would kill a real context; runs on the test driver")
    return rig


@pytest.fixture
def host_rig():
    """The same on the host device."""
    made = Rig(HostDevice())
    yield made
    made.close()


class Problem:
    """One LoRA launch: data on the host, the same on a device, and the exact answer.

    All values are small integers, so every sum is exact in float32 whatever its order, and the
    three rounding points are the only roundings: the answer must match to the last bit.
    """

    def __init__(
        self, *, n, k_in, rank, widths, slots, n_slots=3, seed=0, real_rank=None, pad=8, wide=False
    ):
        """``wide``: float32 elements, which are never rounded on the way."""
        rng = np.random.default_rng(seed)
        self.dtype = torch.float32 if wide else torch.bfloat16
        self.bits = (lambda values: np.asarray(values, np.float32)) if wide else to_bf16
        self.values = (lambda values: values) if wide else from_bf16
        to_bits = self.bits
        self.n, self.k_in, self.rank, self.widths = n, k_in, rank, tuple(widths)
        self.real = rank if real_rank is None else real_rank
        self.slots = np.asarray(slots, np.int32)
        self.n_slots = n_slots
        self.x_stride = k_in + pad
        self.gap = 3  # columns nobody writes, before each slice and at the end of a row
        self.columns, at = [], 0
        for width in self.widths:
            at += self.gap
            self.columns.append(at)
            at += width
        self.out_stride = at + self.gap
        self.x = to_bits(rng.integers(-3, 4, (n, self.x_stride)))
        self.out = to_bits(rng.integers(-99, 100, (n, self.out_stride)))
        self.scales = rng.choice(
            np.array([0.5, 0.7, 1.25, 2.0, 3.1], np.float32), (len(widths), n_slots)
        )
        self.a = np.zeros((len(widths), n_slots, rank, k_in), self.x.dtype)
        self.b = [np.zeros((n_slots, width, rank), self.x.dtype) for width in widths]
        for j, width in enumerate(self.widths):
            self.a[j, :, : self.real] = to_bits(rng.integers(-1, 2, (n_slots, self.real, k_in)))
            self.b[j][:, :, : self.real] = to_bits(rng.integers(-1, 2, (n_slots, width, self.real)))
        self.absent = set()  # (slice, slot) without a pair

    def expected(self):
        """The answer, with the rounding points of the reference in their places."""
        out = self.out.copy()
        x = self.values(self.x[:, : self.k_in]).astype(np.float64)
        for row, slot in enumerate(self.slots):
            for j, width in enumerate(self.widths):
                if slot < 0 or (j, int(slot)) in self.absent:
                    continue
                a = self.values(self.a[j, slot]).astype(np.float64)
                b = self.values(self.b[j][slot]).astype(np.float64)
                xa = self.values(self.bits(a @ x[row])).astype(np.float64)
                delta = self.values(self.bits(b @ xa))
                span = slice(self.columns[j], self.columns[j] + width)
                before = self.values(out[row, span])
                out[row, span] = self.bits(before + np.float32(self.scales[j, slot]) * delta)
        return out

    def load(self, rig):
        """Copy everything to the device, each matrix an allocation of its own."""
        self.rig = rig
        self.a_cells = np.zeros((len(self.widths), self.n_slots), np.uint64)
        self.b_cells = self.a_cells.copy()
        for j in range(len(self.widths)):
            for slot in range(self.n_slots):
                if (j, slot) in self.absent:
                    continue
                self.a_cells[j, slot] = rig.up(self.a[j, slot], f"A {j} {slot}")
                self.b_cells[j, slot] = rig.up(self.b[j][slot], f"B {j} {slot}")
        self.a_table, self.b_table = rig.up(self.a_cells, "a"), rig.up(self.b_cells, "b")
        self.scale_table = rig.up(self.scales, "scales")
        self.x_addr, self.out_addr = rig.up(self.x, "x"), rig.up(self.out, "out")
        self.rows_addr = rig.up(self.slots, "row slots")
        nbytes = planes_bytes(self.n, len(self.widths), self.rank, self.k_in)
        self.planes = rig.device.alloc(nbytes, label="planes")
        rig.held.append(self.planes)
        slices = tuple(
            LoraSlice(
                self.a_table + 8 * self.n_slots * j,
                self.b_table + 8 * self.n_slots * j,
                self.scale_table + 4 * self.n_slots * j,
                width,
                self.columns[j],
            )
            for j, width in enumerate(self.widths)
        )
        self.group = DeviceLoraGroup(
            rig.device,
            slices,
            k_in=self.k_in,
            rank=self.rank,
            max_loras=self.n_slots,
            planes=self.planes,
            planes_nbytes=nbytes,
            dtype=self.dtype,
        )
        return self

    def apply(self, n=None):
        rig = self.rig
        self.group.apply(
            self.x_addr,
            self.x_stride,
            self.out_addr,
            self.out_stride,
            self.rows_addr,
            self.n if n is None else n,
            rig.stream,
        )

    def result(self):
        return self.rig.down(self.out_addr, self.out.shape, self.out.dtype)

    def solve(self, rig):
        self.load(rig)
        self.apply()
        return self.result()


@pytest.fixture
def problem():
    """The `Problem` class, for tests to make their own."""
    return Problem


@pytest.fixture
def bf16():
    """(to_bf16, from_bf16)."""
    return to_bf16, from_bf16


@pytest.fixture
def kernels(monkeypatch):
    """Both kernels where the real ones would be: torch's `Flash`, and the module."""
    monkeypatch.setattr(torch_attention_flashinfer, "WORKSPACE_BYTES", 4096)
    module, flash = flashinfer_module(), Flash()
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", flash, "CPU")
    yield flash, module
    library._destroy()


class Place:
    """Where ways are tried: a device, a space on it and a stream."""

    def __init__(self, device, space):
        self.device, self.space = device, space
        self.stream = device.create_stream(label="attention")

    def spec(self, heads=4, kv_heads=2, head_dim=16, dtype=torch.float32, rows=12, blocks=16):
        return AttentionSpec(
            self.device, self.space, self.stream, heads, kv_heads, head_dim, dtype, rows, blocks
        )

    def close(self):
        self.device.synchronize(self.stream)
        self.device.destroy_stream(self.stream)
        assert self.device.live_labels() == ()
        self.device.close()


@pytest.fixture
def host():
    device = HostDevice(checked=True, allow_foreign=True)
    made = Place(device, HostSpace(device))
    yield made
    made.close()


@pytest.fixture
def on_driver(cuda_machine):
    """The test driver, which captures; leaves nothing behind."""
    if cuda_machine.fake is None:
        pytest.skip("runs torch on the test driver; on a GPU the engine itself tries the ways")
    from rota.gpu.fakecuda.torch_queue import QueueSpace

    driver = cuda_machine.fake.reset()
    device = cuda_machine.open(checked=True)
    space = QueueSpace(device, driver)
    made = Place(device, space)
    yield made
    made.close()
    space.close()
    assert driver.live() == {}, driver.story


@pytest.fixture
def model_on_driver(cuda_machine, driver, data_dir):
    """``open(dtype, family)``: a `models.Served` on the test driver; leaves nothing behind."""
    if driver is None:
        pytest.skip("runs torch on the test driver; on a GPU see bench/gpu_all.py")
    with models_on_driver(cuda_machine, driver, data_dir) as make:
        yield make


@pytest.fixture
def both(model_on_driver, data_dir):
    """``open(dtype, family)``: the same model there and on the host, `models.Both`."""
    with models_on_host(data_dir) as on_host:
        yield lambda *args, **more: Both(model_on_driver(*args, **more), on_host(*args, **more))
