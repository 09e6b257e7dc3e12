"""What only a serving host device promises: work done at the call, memory back, doors, limits."""

from __future__ import annotations

import ast
import ctypes
import os
import sys
from pathlib import Path

import pytest

import rota.gpu.device as device_module
from rota.errors import DeviceError
from rota.gpu.device import DEVICE_CODES, KernelSpec, open_device
from rota.gpu.host import HostDevice
from rota.gpu.host_memory import available_memory


@pytest.fixture
def serving():
    device = HostDevice()
    yield device
    device.close()


def test_work_is_done_when_the_call_returns(serving):
    stream = serving.create_stream()
    a = serving.alloc(8, label="a")
    serving.memset(a, 3, 8, stream)
    assert ctypes.string_at(a, 8) == bytes([3] * 8)
    seen = []
    kernel = serving.load_kernel(KernelSpec("see", "pi", host=lambda *args: seen.append(args)))
    serving.launch(kernel, (1, 1, 1), (1, 1, 1), (a, 8), stream)
    assert seen == [(a, 8)]
    assert serving.query(stream)
    serving.destroy_stream(stream)
    serving.free(a)


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("checked", [False, True])
def test_a_thousand_cycles_of_written_memory_stay_flat(checked):
    size = 1 << 20
    device = HostDevice(checked=checked, quarantine_bytes=4 * size)
    stream = device.create_stream()
    start = resident_bytes()
    for i in range(1000):
        addr = device.alloc(size, label="cycle")
        device.memset(addr, i & 255, size, stream)
        device.synchronize(stream)
        device.free(addr)
    assert resident_bytes() - start < 32 * size  # of 1000 written
    device.destroy_stream(stream)
    device.close()


def test_only_the_newest_frees_are_remembered(serving, monkeypatch):
    monkeypatch.setattr("rota.gpu.ranges.REMEMBERED_FREES", 2)
    stream = serving.create_stream(label="s")
    addrs = [serving.alloc(64, label=f"n{i}") for i in range(4)]
    for addr in addrs:
        serving.free(addr)
    codes = []
    for addr in addrs:
        with pytest.raises(DeviceError) as caught:
            serving.free(addr)
        codes.append((caught.value.code, caught.value.subject))
    assert codes[2:] == [("double-free", "n2"), ("double-free", "n3")]
    assert codes[:2] == [("bad-address", None)] * 2
    serving.destroy_stream(stream)


def test_a_wrong_argument_count_in_a_capture_is_refused(serving):
    stream = serving.create_stream()
    kernel = serving.load_kernel(KernelSpec("one", "i", host=abs))
    serving.begin_capture(stream)
    with pytest.raises(DeviceError) as caught:
        serving.launch(kernel, (1, 1, 1), (1, 1, 1), (1, 2), stream)
    assert caught.value.code == "bad-argument"
    assert serving.abort_capture_if_active(stream)
    serving.destroy_stream(stream)


def test_the_default_limit_is_what_the_system_can_give(serving):
    free, total = serving.memory_info()
    assert free == total
    assert 0 < total <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("limit", [0, -5])
def test_a_limit_is_positive(limit):
    with pytest.raises(DeviceError) as caught:
        HostDevice(memory_limit=limit)
    assert caught.value.code == "bad-argument"


def test_available_memory_reads_the_kernels_word_and_survives_odd_files(tmp_path):
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    form = tmp_path / "meminfo"
    form.write_text("MemTotal: 99 kB\nMemAvailable:       7 kB\n", encoding="ascii")
    assert available_memory(form) == 7 * 1024
    form.write_text(f"MemAvailable: {physical} kB\n", encoding="ascii")
    assert available_memory(form) == physical
    for odd in ("", "MemAvailable: x kB\n", "MemAvailable: 7 MB\n", "MemAvailable:\n"):
        form.write_text(odd, encoding="ascii")
        assert 7 * 1024 < available_memory(form) <= physical
    assert 7 * 1024 < available_memory(tmp_path / "absent") <= physical


@pytest.mark.parametrize("spec", ["auto", "cpu"])
def test_open_device_opens_the_host(spec):
    device = open_device(spec)
    assert (device.name, device.host_addressable) == ("host", True)
    device.close()


def test_open_device_names_what_cuda_lacks(monkeypatch):
    for block in (True, False):
        with monkeypatch.context() as patch:
            if block:
                patch.setitem(sys.modules, "cuda", None)
                patch.setitem(sys.modules, "cuda.bindings", None)
                patch.setitem(sys.modules, "cuda.bindings.driver", None)
            with pytest.raises(DeviceError) as caught:
                open_device("cuda")
        assert caught.value.code == "cuda-unavailable"
        if block:
            assert "cuda-bindings is not installed" in caught.value.message
        else:
            assert caught.value.message.startswith("no CUDA device can be used: the ")


def test_open_device_refuses_what_it_does_not_know():
    with pytest.raises(DeviceError) as caught:
        open_device("tpu")
    assert (caught.value.code, caught.value.found) == ("bad-argument", "'tpu'")


def test_every_code_the_device_files_raise_is_documented_and_every_documented_code_is_raised():
    folder = Path(device_module.__file__).parent
    used = set()
    for path in [
        *folder.glob("device*.py"),
        folder / "ranges.py",
        folder / "decorators.py",
        *folder.glob("host*.py"),
        *folder.glob("cuda*.py"),
    ]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "code":
                if isinstance(node.value, ast.Constant):
                    used.add(node.value.value)
            elif isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "code":
                used |= {node.value.value} if isinstance(node.value, ast.Constant) else set()
    assert used == set(DEVICE_CODES)
