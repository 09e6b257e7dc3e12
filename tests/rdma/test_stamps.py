"""Whether files are still those that were read: what a look must see, and what it may skip."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rota.rdma import stamps
from rota.rdma.stamps import YOUNG_NS, Watch, stamps_of


class Folder:
    """A directory with an adapter's files, its watch, and a clock by which all of it is old."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.scans = path, 0
        path.mkdir()
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (path / name).write_bytes(b"12345678")
        scan = os.scandir

        def counted(where: Any) -> Any:
            self.scans += 1
            return scan(where)

        monkeypatch.setattr(stamps.os, "scandir", counted)
        self.watch = Watch(path)
        self.watch.trust(stamps_of(path, self.later()))

    def later(self) -> int:
        newest = [self.path.stat(), *(p.stat() for p in self.path.iterdir())]
        return max(max(s.st_mtime_ns, s.st_ctime_ns) for s in newest) + YOUNG_NS

    def unchanged(self) -> bool:
        return self.watch.unchanged(self.later())


@pytest.fixture
def adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    return Folder(tmp_path / "one", monkeypatch)


def written(path: Path) -> None:
    (path / "adapter_config.json").write_bytes(b"87654321")


def replaced(path: Path) -> None:
    old = path / "adapter_config.json"
    (path / "new").write_bytes(old.read_bytes())
    os.utime(path / "new", ns=(old.stat().st_atime_ns, old.stat().st_mtime_ns))
    (path / "new").rename(old)


def removed(path: Path) -> None:
    (path / "adapter_config.json").unlink()


def added(path: Path) -> None:
    (path / "adapter_model-00002-of-00002.safetensors").write_bytes(b"x")


def another(path: Path) -> None:
    path.rename(path.with_name("old"))
    path.mkdir()
    for file in path.with_name("old").iterdir():
        (path / file.name).write_bytes(file.read_bytes())


def gone(path: Path) -> None:
    path.rename(path.with_name("old"))


def test_unchanged_takes_a_look_at_each_file_and_no_scan(adapter: Folder) -> None:
    adapter.scans = 0
    assert all(adapter.unchanged() for _ in range(4))
    assert adapter.scans == 1  # the first, to know the directory by


@pytest.mark.parametrize("looked", [False, True])
@pytest.mark.parametrize("change", [written, replaced, removed, added, another, gone])
def test_every_change_is_seen(
    adapter: Folder, change: Callable[[Path], None], looked: bool
) -> None:
    now = adapter.later()
    if looked:
        assert adapter.watch.unchanged(now)
    change(adapter.path)
    assert not adapter.watch.unchanged(now + YOUNG_NS)


def test_other_files_change_nothing(adapter: Folder) -> None:
    assert adapter.unchanged()
    (adapter.path / "train.log").write_text("step 1")
    adapter.scans = 0
    assert adapter.unchanged() and adapter.unchanged()
    assert adapter.scans == 1


def test_what_is_young_is_not_trusted(adapter: Folder) -> None:
    assert stamps_of(adapter.path, adapter.later() - YOUNG_NS) is None
    old = adapter.later()
    # Old files in a young directory: one may still come within the tick of its stamp.
    os.utime(adapter.path, ns=(old, old))
    assert stamps_of(adapter.path, old) is not None
    adapter.scans = 0
    assert adapter.watch.unchanged(old) and adapter.watch.unchanged(old)
    assert adapter.scans == 2
    assert adapter.watch.unchanged(old + YOUNG_NS) and adapter.watch.unchanged(old + YOUNG_NS)
    assert adapter.scans == 3
    adapter.watch.trust(None)
    assert not adapter.watch.unchanged(old + YOUNG_NS)
