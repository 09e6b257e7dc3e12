"""What a machine without a GPU says, and that the test driver is never taken for one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rota.errors import DeviceError
from rota.gpu import cuda_probe
from rota.gpu.device import open_device
from rota.gpu.fakecuda.load import build, load

ROOT = Path(__file__).resolve().parents[2]


def fresh(code, *, timeout=120, **environment):
    """Run code in a process of its own, with more variables; its output lines."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_test_driver_is_no_device_unless_it_is_asked_for(cuda_machine):
    if cuda_machine.fake is None:
        pytest.skip("asks about the test driver")
    assert cuda_probe.is_test_driver()
    assert "test driver" in cuda_probe.why_unavailable()
    assert cuda_probe.why_unavailable(test_driver=True) is None
    device = open_device("auto")
    assert device.name == "host"
    device.close()
    with pytest.raises(DeviceError) as caught:
        open_device("cuda")
    assert caught.value.code == "cuda-unavailable" and "test driver" in caught.value.message


def test_asking_for_the_test_driver_without_loading_it_is_refused():
    out = fresh(
        "from rota.errors import DeviceError\n"
        "from rota.gpu.cuda import CudaDevice\n"
        "try:\n    CudaDevice(test_driver=True)\n"
        "except DeviceError as error:\n    print(error.code)\n    print(error.message)\n"
    )
    assert out[0] == "cuda-unavailable"
    assert "test driver is not loaded" in out[1] or "not installed" in out[1]


def test_a_real_driver_library_in_the_process_is_refused_by_the_loader(tmp_path):
    """A stand-in of that name, loaded by somebody else, is as good as the real one here."""
    library = build(tmp_path)
    out = fresh(
        "import ctypes\nfrom pathlib import Path\n"
        f"ctypes.CDLL({str(library)!r})\n"
        "from rota.errors import DeviceError\nfrom rota.gpu.fakecuda.load import load\n"
        f"try:\n    load(Path({str(tmp_path)!r}))\n"
        "except DeviceError as error:\n    print(error.code, error.subject)\n"
    )
    assert out == ["cuda-unavailable libcuda.so.1"]


def test_a_compiler_that_is_missing_or_fails_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(DeviceError) as caught:
        build(tmp_path)
    assert (caught.value.code, caught.value.subject) == ("cuda-unavailable", "cc")
    monkeypatch.setattr("shutil.which", lambda name: "/bin/false")
    with pytest.raises(DeviceError) as caught:
        build(tmp_path)
    assert (caught.value.code, caught.value.subject) == ("cuda-unavailable", "stub.c")


def test_loading_twice_gives_the_same_machine(cuda_machine):
    if cuda_machine.fake is None:
        pytest.skip("asks about the test driver")
    assert load(ROOT / ".cache" / "fakecuda") is cuda_machine.fake


DRIVERS = {
    "hangs in cuInit": (
        "for (;;) pause();",
        "",
        "the NVIDIA driver did not answer within 1.5 s",
    ),
    "crashes in cuInit": (
        "abort();",
        "",
        "the NVIDIA driver ended the process that asked it (status -6)",
    ),
    "refuses": ("return 999;", "", "the driver said CUDA_ERROR_STANDIN to cuInit"),
    "has no device": ("return 0;", "*n = 0; return 0;", "the driver sees no CUDA device"),
    "cannot count": ("return 0;", "return 3;", "the driver said CUresult 3 to cuDeviceGetCount"),
}


@pytest.mark.parametrize("kind", DRIVERS)
def test_a_driver_that_is_broken_is_named_and_harms_nobody(tmp_path, kind):
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the stand-in of a driver")
    init, count, said = DRIVERS[kind]
    source = tmp_path / "driver.c"
    source.write_text(
        "#include <stdlib.h>\n#include <unistd.h>\n"
        f"int cuInit(unsigned f) {{ {init} return 0; }}\n"
        f"int cuDeviceGetCount(int *n) {{ {count} return 0; }}\n"
        "int cuGetErrorName(int r, const char **s) {\n"
        '  if (r != 999) return 1;\n  *s = "CUDA_ERROR_STANDIN"; return 0;\n}\n'
    )
    library = tmp_path / "libcuda.so.1"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True, timeout=60
    )
    out = fresh(
        "from rota.gpu.cuda_probe import why_unavailable\n"
        "from rota.gpu.device import open_device\n"
        "print(why_unavailable(limit_s=1.5))\n"
        "device = open_device('cpu'); print(device.name); device.close()\n",
        LD_LIBRARY_PATH=str(tmp_path),
    )
    assert out == [said, "host"]


def test_importing_rota_and_opening_the_host_load_no_cuda():
    out = fresh(
        "import sys\nimport rota\nfrom rota.gpu.device import open_device\n"
        "device = open_device('cpu'); print(device.name); device.close()\n"
        "print([m for m in sys.modules if m.split('.')[0] == 'cuda'])\n"
    )
    assert out == ["host", "[]"]


def test_a_device_number_that_is_not_there_is_refused_and_nothing_is_retained(cuda_machine, driver):
    with pytest.raises(DeviceError) as caught:
        cuda_machine.open(ordinal=99)
    assert caught.value.found == "CUDA_ERROR_INVALID_DEVICE"
    with pytest.raises(DeviceError) as caught:
        cuda_machine.open(memory_limit=0)
    assert caught.value.code == "bad-argument"
    if driver is not None:
        assert driver.live() == {}


def test_two_devices_share_the_primary_context_and_the_last_one_releases_it(cuda_machine, driver):
    first, second = cuda_machine.open(), cuda_machine.open()
    a = first.alloc(8, label="a")
    second.close()
    stream = first.create_stream(label="s")
    first.memset(a, 1, 8, stream)
    first.synchronize(stream)
    first.free(a)
    first.destroy_stream(stream)
    first.close()
    if driver is not None:
        assert driver.live() == {}


def test_the_benchmark_script_runs_its_whole_path_on_the_test_driver(cuda_machine):
    done = subprocess.run(
        [sys.executable, "-P", str(ROOT / "bench" / "kernels_gpu.py"), "--test-driver"],
        capture_output=True,
        text=True,
        timeout=250,
        env={"PYTHONPATH": str(ROOT / "bench"), "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("checked on ")
    assert len([line for line in lines if line.startswith("ran Cell(")]) == 5
