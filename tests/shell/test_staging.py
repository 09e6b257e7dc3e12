"""What tells the stager that a directory is still what it was."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from rota.gpu.lora.source import DirectorySource
from rota.rdma.stamps import stamps_of
from rota.sched.staging import source_key

HOUR = 3600 * 10**9
PARTS = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.safetensors.index.json",
    "adapters.safetensors",
    "part-1.safetensors",
)


def keep_time(file: Path, was: os.stat_result) -> None:
    """Give a file the mtime it had, a clock tick or more later."""
    os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
    while file.stat().st_ctime_ns == was.st_ctime_ns:
        os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))


@pytest.mark.parametrize("how", ["rewritten", "rewritten unnoticed", "replaced", "removed"])
@pytest.mark.parametrize("name", PARTS)
def test_a_change_of_any_file_an_adapter_may_be_read_from_is_seen(
    tmp_path: Path, name: str, how: str
) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    for part in (*PARTS, "README.md"):
        (folder / part).write_bytes(b"1234")

    def looks() -> object:
        return stamps_of(folder, time.time_ns() + HOUR)

    before = looks()
    (folder / "README.md").write_bytes(b"words")
    assert looks() == before is not None
    if how == "removed":
        (folder / name).unlink()
    elif how == "replaced":
        (tmp_path / "new").write_bytes(b"5678")
        (tmp_path / "new").rename(folder / name)
    else:
        file = folder / name
        was = file.stat()
        file.write_bytes(b"5678")
        if how == "rewritten":
            os.utime(file, ns=(5, 5))  # a clock tick later
        else:
            keep_time(file, was)
    assert looks() != before


def test_young_files_prove_nothing(tmp_path: Path) -> None:
    (tmp_path / "part-1.safetensors").write_bytes(b"1")
    changed = (tmp_path / "part-1.safetensors").stat().st_ctime_ns
    assert stamps_of(tmp_path, changed + 10**9) is None
    assert stamps_of(tmp_path, changed + HOUR) is not None


def test_naming_a_place_asks_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop's thread names places; a network disk that is gone must not stop it."""

    def dead(*args: Any, **more: Any) -> Any:
        raise AssertionError("the disk was asked")

    for name in ("stat", "lstat", "readlink", "open", "scandir"):
        monkeypatch.setattr(os, name, dead)
    key = source_key(DirectorySource(Path("/net/adapters/a")))
    assert key == source_key(DirectorySource(Path("/net/x/../adapters/./a")))
    assert key != source_key(DirectorySource(Path("/net/adapters/b")))
