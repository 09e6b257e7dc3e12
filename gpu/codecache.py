"""Machine code kept on disk, so that a second start does not compile again.

Owns the files of one folder. An entry is named by a key that covers everything its content depends
on, begins with a magic and a SHA-256 of its body, and appears in one rename: a damaged or half
written entry is seen and made anew. The folder is believed only if it is this user's alone, since
what lies in it will be executed.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import tempfile
from pathlib import Path

logger = logging.getLogger("rota.gpu.codecache")

MAGIC = b"rotacode\x01"
MAX_ENTRY_BYTES = 1 << 26


def default_folder() -> Path:
    """``~/.cache/rota/code``."""
    return Path.home() / ".cache" / "rota" / "code"


class CodeCache:
    """Entries by key. Nothing here raises: a cache that fails costs time, not service.

    Args:
        folder: made on the first write, for this user alone; ``None`` keeps nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def read(self, key: str) -> bytes | None:
        """The body stored under ``key`` (a file name), or ``None``."""
        if self._folder is None:
            return None
        try:
            if not _private(self._folder):
                return None
            path = self._folder / key
            if path.stat().st_size > MAX_ENTRY_BYTES:
                return None
            raw = path.read_bytes()
        except OSError:
            return None
        head = len(MAGIC) + 32
        body = raw[head:]
        if raw[: len(MAGIC)] != MAGIC or raw[len(MAGIC) : head] != _digest(body):
            logger.warning("cached code is damaged and is made again: %s", key)
            return None
        return body

    def write(self, key: str, body: bytes) -> None:
        """Store ``body`` under ``key``."""
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not _private(self._folder):
                return
            handle, part = tempfile.mkstemp(dir=self._folder, prefix=".part-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(MAGIC + _digest(body) + body)
                os.replace(part, self._folder / key)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(part)
                raise
        except OSError as error:
            logger.warning("compiled code was not cached: %s", error)


def _private(folder: Path) -> bool:
    found = folder.stat()
    private = found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not private:
        logger.warning("others may write to %s: its code is not used", folder)
    return private


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()
