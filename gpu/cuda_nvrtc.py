"""CUDA C to machine code by NVRTC, with a cache on disk.

What it owns: the files of its cache folder. A CUBIN is made for one architecture (no driver
compiler in the way); PTX only for the test driver, which interprets it. No header is ever included.

Invariants: a cache entry is keyed by source, options, architecture, form and NVRTC version; entries
appear whole or not at all, and one whose checksum is wrong is made again. No GPU or driver is
needed to compile.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from ..errors import DeviceError

log = logging.getLogger("rota.gpu.cuda.nvrtc")

Form = Literal["cubin", "ptx"]
OPTIONS: Final = ("--std=c++17", "--ptxas-options=-v")
MAGIC: Final = b"rota-kernel-1\n"


@dataclass(frozen=True, slots=True)
class Image:
    """A compiled module: ``code`` as the driver takes it, and the compiler's report.

    ``report`` is empty when the code came from the cache.
    """

    code: bytes
    report: str


class Compiler:
    """NVRTC for one architecture.

    Args:
        capability: compute capability, e.g. (9, 0).
        form: "cubin" for a GPU, "ptx" for the test driver.
        cache_dir: folder for compiled code; ``None`` = no cache on disk.

    Raises:
        DeviceError: "cuda-unavailable" when NVRTC cannot be loaded.
    """

    def __init__(
        self, capability: tuple[int, int], *, form: Form = "cubin", cache_dir: Path | None = None
    ) -> None:
        try:
            # By name: the module is compiled, and type checkers cannot see into it.
            nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")
            result, major, minor = nvrtc.nvrtcVersion()
        except (ImportError, RuntimeError) as error:
            raise DeviceError(
                f"NVRTC cannot be loaded (pip install 'rota[cuda]'): {error}",
                code="cuda-unavailable",
                subject="nvrtc",
            ) from error
        self._nvrtc = nvrtc
        self._check("nvrtcVersion", result, "nvrtc")
        self.version = f"{major}.{minor}"
        self.form: Form = form
        number = f"{capability[0]}{capability[1]}"
        self.architecture = f"sm_{number}" if form == "cubin" else f"compute_{number}"
        self.cache_dir = cache_dir

    def compile(self, source: str, name: str) -> Image:
        """Compile, or read from the cache.

        Raises:
            DeviceError: "bad-argument" with the compiler's log when the source does not compile.
        """
        options = (f"--gpu-architecture={self.architecture}", *OPTIONS)
        key = hashlib.sha256(
            "\0".join((source, *options, self.form, self.version)).encode()
        ).hexdigest()
        path = None if self.cache_dir is None else self.cache_dir / f"{key}.{self.form}"
        if path is not None:
            code = self._read(path)
            if code is not None:
                return Image(code, "")
        image = self._compile(source, name, options)
        if path is not None:
            self._write(path, image.code)
        return image

    def _compile(self, source: str, name: str, options: tuple[str, ...]) -> Image:
        nvrtc = self._nvrtc
        result, program = nvrtc.nvrtcCreateProgram(
            source.encode(), f"{name}.cu".encode(), 0, [], []
        )
        self._check("nvrtcCreateProgram", result, name)
        try:
            (result,) = nvrtc.nvrtcCompileProgram(
                program, len(options), [option.encode() for option in options]
            )
            report = self._text(program, name)
            if int(result):
                raise DeviceError(
                    f"the kernel does not compile:\n{report}",
                    code="bad-argument",
                    subject=name,
                    found=getattr(result, "name", int(result)),
                )
            size_of, get = (
                (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
                if self.form == "cubin"
                else (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
            )
            result, size = size_of(program)
            self._check("nvrtcGetSize", result, name)
            code = bytearray(size)
            buffer = bytes(size)
            (result,) = get(program, buffer)
            self._check("nvrtcGetCode", result, name)
            code[:] = buffer
            return Image(bytes(code), report)
        finally:
            nvrtc.nvrtcDestroyProgram(program)

    def _text(self, program: Any, name: str) -> str:
        result, size = self._nvrtc.nvrtcGetProgramLogSize(program)
        self._check("nvrtcGetProgramLogSize", result, name)
        buffer = bytes(size)
        (result,) = self._nvrtc.nvrtcGetProgramLog(program, buffer)
        self._check("nvrtcGetProgramLog", result, name)
        return buffer.rstrip(b"\0").decode(errors="replace")

    def _check(self, call: str, result: Any, name: str) -> None:
        if int(result):
            raise DeviceError(
                f"{call} failed",
                code="driver-error",
                subject=name,
                found=getattr(result, "name", int(result)),
            )

    def _read(self, path: Path) -> bytes | None:
        try:
            raw = path.read_bytes()
        except OSError:
            return None
        head = len(MAGIC) + 32
        body = raw[head:]
        good = raw[: len(MAGIC)] == MAGIC and raw[len(MAGIC) : head] == _digest(body)
        if not good:
            log.warning("a cached kernel is damaged and is made again: %s", path.name)
            return None
        return body

    def _write(self, path: Path, code: bytes) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, part = tempfile.mkstemp(dir=path.parent, prefix=".part-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(MAGIC + _digest(code) + code)
                os.replace(part, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(part)
                raise
        except OSError as error:  # a cache that cannot be written costs time, not service
            log.warning("a compiled kernel was not cached: %s", error)


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()
