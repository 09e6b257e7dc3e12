"""Builds the stub library, loads it, and hangs the fake driver's entry points into it.

What it owns: the one `FakeCuda` of the process. cuda.bindings asks for each entry point once and
keeps it, so the callbacks live as long as the process and always reach the driver of the moment.

Invariant: loading is explicit and for good; a process that loaded the stub never sees a real GPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

from ...errors import DeviceError
from .api_device import ENTRIES as DEVICE_ENTRIES
from .api_device import Entry
from .api_graph import ENTRIES as GRAPH_ENTRIES
from .api_work import ENTRIES as WORK_ENTRIES
from .driver import NOT_FOUND, FakeDriver

log = logging.getLogger("rota.gpu.fakecuda")

SONAME: Final = "libcuda.so.1"
BUILD_SECONDS: Final = 60.0
HOOK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p))


class FakeCuda:
    """The stub in this process, and the driver behind it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.driver = FakeDriver()
        self.missing: list[str] = []
        """Functions that were asked for and that the model does not have."""
        self._library = library
        self._callbacks: dict[bytes, Any] = {}
        for table in (DEVICE_ENTRIES, WORK_ENTRIES, GRAPH_ENTRIES):
            for name, entry in table.items():
                types = ctypes.CFUNCTYPE(ctypes.c_int, *entry.types)
                self._callbacks[name.encode()] = types(self._bind(name, entry))
        self._hook = HOOK(self._find)
        library.rota_fakecuda_set_hook(self._hook)

    def reset(self, **keywords: Any) -> FakeDriver:
        """Replace the machine by a fresh one; see `FakeDriver` for the keywords."""
        self.driver.close()
        self.driver = FakeDriver(**keywords)
        return self.driver

    @property
    def functions(self) -> tuple[str, ...]:
        """Every driver function the model has."""
        return tuple(name.decode() for name in self._callbacks)

    def _bind(self, name: str, entry: Entry) -> Callable[..., int]:
        def call(*args: object) -> int:
            return self.driver.call(name, entry.run, args)

        return call

    def _find(self, name: bytes, out: Any) -> int:
        callback = self._callbacks.get(name)
        if callback is None:
            self.missing.append(name.decode())
            return NOT_FOUND
        out[0] = ctypes.cast(callback, ctypes.c_void_p).value
        return 0


def build(cache_dir: Path) -> Path:
    """Compile the stub with the system's C compiler into ``cache_dir``; the library's path.

    Raises:
        DeviceError: "cuda-unavailable" when there is no compiler, or it fails.
    """
    source = Path(__file__).with_name("stub.c")
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    target = cache_dir / digest / SONAME
    if target.exists():
        return target
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise DeviceError(
            "the fake CUDA driver needs a C compiler", code="cuda-unavailable", subject="cc"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(".part")
    command = [compiler, "-shared", "-fPIC", "-O1", f"-Wl,-soname,{SONAME}", "-o", str(part)]
    done = subprocess.run(
        [*command, str(source)], capture_output=True, text=True, timeout=BUILD_SECONDS, check=False
    )
    if done.returncode != 0:
        raise DeviceError(
            f"the stub did not compile: {done.stderr.strip()}",
            code="cuda-unavailable",
            subject=str(source.name),
        )
    part.replace(target)
    return target


@cache
def load(cache_dir: Path) -> FakeCuda:
    """Load the stub for the whole process, before any CUDA call; later calls get the same object.

    Raises:
        DeviceError: "cuda-unavailable" when a real driver library is in the process already.
    """
    if any(SONAME in line for line in _mapped()):
        raise DeviceError(
            "a driver library is loaded already", code="cuda-unavailable", subject=SONAME
        )
    library = ctypes.CDLL(str(build(cache_dir)), mode=ctypes.RTLD_GLOBAL)
    log.info("the fake CUDA driver serves this process from now on")
    return FakeCuda(library)


def _mapped(maps: Path = Path("/proc/self/maps")) -> list[str]:
    try:
        return maps.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
