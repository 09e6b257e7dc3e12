"""Shared test setup: ``sched`` stays the standard library's, and the CUDA machine tests run on.

CUDA tests run on the test driver (`rota.gpu.fakecuda`), which serves the whole test process, or
with ``--gpu`` on the GPU of this machine. A missing package is named in the skip.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != ROOT]


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--gpu``: run CUDA tests on the real driver."""
    parser.addoption("--gpu", action="store_true", help="run the CUDA tests on this machine's GPU")


@pytest.fixture(autouse=True)
def _no_device_thread_is_left() -> Iterator[None]:
    """Every engine a test opens is closed when it ends, its device thread too."""
    before = set(threading.enumerate())
    yield
    left = [t for t in threading.enumerate() if t.name == "rota-device" and t not in before]
    for thread in left:
        thread.join(5)
    assert not any(t.is_alive() for t in left), "an engine's device thread outlived the test"


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder with the project's own oracle data."""
    return ROOT / "tests" / "data"


class CudaMachine:
    """Where CUDA tests run: ``fake`` is the test driver's `FakeCuda`, or ``None`` on a GPU."""

    def __init__(self, fake, cache_dir: Path) -> None:
        self.fake = fake
        self.cache_dir = cache_dir

    def open(self, **keywords):
        """Open a CUDA device on this machine."""
        from rota.gpu.cuda import CudaDevice

        keywords.setdefault("cache_dir", self.cache_dir)
        return CudaDevice(test_driver=self.fake is not None, **keywords)


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@pytest.fixture(scope="session")
def cuda_machine(request: pytest.FixtureRequest) -> CudaMachine:
    """The machine CUDA tests run on; skips by name what is not installed."""
    if not _importable("cuda.bindings"):
        pytest.skip("cuda-bindings is not installed (pip install 'rota[test-cuda]')")
    if not _importable("nvidia.cu13") and not _importable("nvidia.cuda_nvrtc"):
        pytest.skip("nvidia-cuda-nvrtc is not installed (pip install 'rota[test-cuda]')")
    cache = ROOT / ".cache" / "test-kernels"
    if request.config.getoption("--gpu"):
        return CudaMachine(None, cache)
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        pytest.skip("no C compiler for the test driver's stub")
    from rota.errors import DeviceError
    from rota.gpu.fakecuda.load import load

    try:
        return CudaMachine(load(ROOT / ".cache" / "fakecuda"), cache)
    except DeviceError as error:
        pytest.skip(f"{error}; run with --gpu to use the GPU instead")
