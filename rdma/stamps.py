"""Whether an adapter's files are still those that were read, by their stamps.

What it owns: the stamps of one directory as they were. Invariants: nothing is called unchanged that
was written to, replaced, added or removed since; a file or directory that changed so recently that
it could change again without a sign of it is never trusted. Calls take the disk.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from ..gpu.lora.directory import belongs

YOUNG_NS: Final = 2_000_000_000
"""What changed this recently may change again within one tick of its time stamp."""

Row = tuple[str, int, int, int, int]
"""Name, size, times and inode."""


def _row(name: str, status: os.stat_result) -> Row:
    return name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _old(row: Row, now_ns: int) -> bool:
    return now_ns - max(row[2], row[3]) >= YOUNG_NS


def rows_of(path: Path) -> tuple[Row, ...] | None:
    """Of the adapter's files, by name; ``None`` when there are none, or one is unreadable."""
    try:
        with os.scandir(path) as entries:
            rows = sorted(_row(e.name, e.stat()) for e in entries if belongs(e.name))
    except OSError:
        return None
    return tuple(rows) or None


def stamps_of(path: Path, now_ns: int) -> tuple[Row, ...] | None:
    """`rows_of`, or ``None`` when one is too young to trust.

    Whoever writes a file may set its mtime as it was; its ctime tells of it.
    """
    rows = rows_of(path)
    return rows if rows is not None and all(_old(row, now_ns) for row in rows) else None


class Watch:
    """The files of the directory ``path``. Belongs to one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._path, self._where = path, str(path)
        self._files: tuple[Row, ...] | None = None
        self._directory: Row | None = None

    def trust(self, files: tuple[Row, ...] | None) -> None:
        """What was read had these stamps; ``None``: it is not to be trusted."""
        self._files, self._directory = files, None

    def unchanged(self, now_ns: int) -> bool:
        """What was read is still there, and nothing else that belongs to it."""
        files = self._files
        if files is None:
            return False
        try:
            directory = _row("", os.stat(self._where))
            if directory == self._directory:
                # No name came or went: a look at each is enough.
                where = self._where
                return all(_row(row[0], os.stat(f"{where}/{row[0]}")) == row for row in files)
        except OSError:
            return False
        if stamps_of(self._path, now_ns) != files:
            return False
        self._directory = directory if _old(directory, now_ns) else None
        return True
