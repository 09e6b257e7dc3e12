"""Reading an adapter directory: which files, in which order, and that they belong together.

What it owns: the rules of the directory (plain files inside it, never pickle, within limits).
Invariants: a directory is read through one file descriptor per file; all files read were there, as
they are, at one moment.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from ...errors import RejectError, StagingError
from .buffers import blank
from .safefile import (
    CONFIG_NAME,
    FILE_NAME,
    INDEX_NAME,
    MLX_NAME,
    PICKLE_NAMES,
    FileLimits,
    parse_header,
    too_large,
)
from .strictjson import loads_object


class Sink(Protocol):
    """Takes an adapter of one file piece by piece, if it knows its kind."""

    def offer(self, config: bytes, head: npt.NDArray[np.uint8], size: int) -> bool:
        """Whether it takes a file of ``size`` bytes that begins with ``head``. If so it has taken
        ``head``."""
        ...

    def room(self) -> memoryview:
        """Where the next bytes go: at most so many, none when there are no more."""
        ...

    def filled(self, count: int) -> None:
        """The first ``count`` bytes of `room` are there."""
        ...

    def passing(self, piece: npt.NDArray[np.uint8]) -> None:
        """Bytes of a file that it did not take, in order, just read."""
        ...


HEAD_BYTES: Final = 1 << 18
"""Of a file that is offered to a sink: a header of some 2,000 tensors."""
PIECE_BYTES: Final = 1 << 19
"""Of a file that passes a sink, read at a time."""
READ_BYTES: Final = 1 << 20
"""Asked of the system at a time: while a call lasts, one that preempts nobody inside it lets no
other thread have the core, an event loop's for instance."""


def belongs(name: str) -> bool:
    """Whether a file of this name may be part of an adapter: what a look at a directory's files
    must cover to tell whether the adapter has changed (shards may have any name)."""
    return name.endswith((".safetensors", ".json"))


def read_directory(
    path: Path, limits: FileLimits, *, follow_links: bool = False, sink: Sink | None = None
) -> tuple[bytes, tuple[npt.NDArray[np.uint8], ...]]:
    """The config bytes and every safetensors file (uint8 arrays, by file name) of a directory.

    ``follow_links``: a file may be a link to a plain file elsewhere. ``sink``: is offered the file
    of an adapter that has one; if it takes it, no file is returned, and else it sees it pass.

    Raises:
        RejectError: missing-config, missing-weights, pickle-adapter, file-escapes-directory,
            not-a-plain-file, config-too-large, file-too-large, bad-index, duplicate-json-key.
        StagingError: adapter-unreadable, when the system refuses a read; adapter-changing, when the
            directory or one of its files was replaced or written to meanwhile.
    """
    try:
        root = path.resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links; a NUL in the path
        raise _unreadable(path.name, error) from error
    if not root.is_dir():
        raise StagingError(
            "the adapter path is not a directory", code="adapter-unreadable", subject=path.name
        )
    # What there is to read is decided before anything is read: a pickle is never opened.
    every = (CONFIG_NAME, FILE_NAME, INDEX_NAME, MLX_NAME)
    present = {name for name in every if _exists(root / name)}
    if not present - {CONFIG_NAME}:
        pickled = [name for name in PICKLE_NAMES if _exists(root / name)]
        if pickled:
            raise RejectError(
                "the adapter exists only as a pickle, which is never opened;"
                " save it as safetensors",
                code="pickle-adapter",
                subject=pickled[0],
                expected=FILE_NAME,
                found=pickled[0],
            )
        raise RejectError(
            "the directory holds no adapter weights", code="missing-weights", expected=FILE_NAME
        )
    if CONFIG_NAME not in present:
        raise RejectError(
            "the directory holds no adapter config", code="missing-config", expected=CONFIG_NAME
        )
    weights = next(name for name in (FILE_NAME, INDEX_NAME, MLX_NAME) if name in present)
    reader = _Reader(root, follow_links)
    reader.note((CONFIG_NAME, weights))
    config = reader.whole(CONFIG_NAME, limits.config_bytes, "config-too-large").tobytes()
    index: dict[str, set[str]] = {}
    names = [weights]
    if weights == INDEX_NAME:
        raw = reader.whole(INDEX_NAME, limits.index_bytes, "file-too-large")
        index = _shard_names(raw.tobytes(), limits)
        names = sorted(index)
        reader.note(names)
    shards, left = [], limits.file_bytes
    for name in names:
        taker = sink if len(names) == 1 and not index else None
        shard = reader.read(name, left, "file-too-large", config, taker)
        if shard is None:
            break
        shards.append(shard)
        left -= shards[-1].nbytes
        if index:
            _check_index(name, index[name], parse_header(shards[-1], limits)[0].keys())
    reader.check_unchanged()
    return config, tuple(shards)


def _exists(path: Path) -> bool:
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _unreadable(path.name, error) from error
    return True


def _check_index(name: str, listed: set[str], held: Collection[str]) -> None:
    """A shard holds exactly what the index says, or a part of the adapter is elsewhere."""
    odd = sorted(listed.symmetric_difference(set(held) - {"__metadata__"}))
    if odd:
        raise RejectError(
            "the index and a shard disagree on what the shard holds",
            code="bad-index",
            subject=odd[0][:300],
            expected=f"in {name}" if odd[0] in listed else f"not in {name}",
            found=f"{len(odd)} such tensors",
        )


def _shard_names(raw: bytes, limits: FileLimits) -> dict[str, set[str]]:
    """File name -> its tensors, of an index; each must be a bare name in the same directory."""
    index = loads_object(raw, code="bad-index", subject=INDEX_NAME)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise RejectError("the index has no weight_map", code="bad-index", subject=INDEX_NAME)
    names: dict[str, set[str]] = {}
    for key, name in weight_map.items():
        if not isinstance(name, str) or not name.endswith(".safetensors"):
            raise RejectError(
                "the index names a file that is not safetensors",
                code="bad-index",
                subject=key[:200],
                found=repr(name)[:200],
            )
        if os.path.basename(name) != name or "\\" in name or "\0" in name:
            raise RejectError(
                "the index names a file outside the adapter directory",
                code="file-escapes-directory",
                subject=name[:200],
                expected="a bare file name",
            )
        names.setdefault(name, set()).add(key)
    if len(names) > limits.shards:
        raise RejectError(
            "too many shards",
            code="bad-index",
            subject=INDEX_NAME,
            expected=f"at most {limits.shards}",
            found=len(names),
        )
    return names


class _Reader:
    """Reads files of one directory and remembers what they were, so that the config of one version
    is never paired with the weights of another."""

    def __init__(self, root: Path, follow_links: bool) -> None:
        self._root, self._follow_links = root, follow_links
        self._seen: dict[str, tuple[int, ...] | None] = {}

    def note(self, names: Iterable[str]) -> None:
        """What these files are now; noted before the first of them is read."""
        for name in names:
            self._seen[name] = self._now(name)

    def whole(self, name: str, limit: int, code: str) -> npt.NDArray[np.uint8]:
        """The whole file in one buffer, uint8 ``[size]``."""
        buffer = self.read(name, limit, code, b"", None)
        assert buffer is not None
        return buffer

    def read(
        self, name: str, limit: int, code: str, config: bytes, sink: Sink | None
    ) -> npt.NDArray[np.uint8] | None:
        """The whole file in one buffer, uint8 ``[size]``, or ``None`` if the sink took it."""
        root = self._root
        try:
            real = root / name
            if real.is_symlink():
                real = real.resolve(strict=True)
                if not self._follow_links and root not in real.parents:
                    raise RejectError(
                        "a link leads outside the adapter directory",
                        code="file-escapes-directory",
                        subject=name,
                    )
            # O_NOFOLLOW on the resolved path: a link put there since then is refused, not
            # followed. O_NONBLOCK: opening a FIFO must not wait for a writer.
            handle = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except (OSError, RuntimeError, ValueError) as error:
            raise _unreadable(name, error) from error
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise RejectError("not a plain file", code="not-a-plain-file", subject=name)
            if status.st_size > limit:
                raise too_large(code, name, limit, status.st_size)
            if _identity(status) != self._seen[name]:
                raise _changed(name)
            size, head = status.st_size, np.empty(0, np.uint8)
            if sink is not None:
                head = np.empty(min(size, HEAD_BYTES), np.uint8)
                self._fill(handle, name, head.data)
                if sink.offer(config, head, size):
                    while (room := sink.room()).nbytes:
                        sink.filled(self._some(handle, name, room))
                    return None
            buffer = blank(size)
            buffer[: head.size] = head
            if sink is None:
                self._fill(handle, name, buffer.data)
            else:
                sink.passing(head)
                for begin in range(head.size, size, PIECE_BYTES):
                    piece = buffer[begin : begin + PIECE_BYTES]
                    self._fill(handle, name, piece.data)
                    sink.passing(piece)
        except OSError as error:
            raise _unreadable(name, error) from error
        finally:
            os.close(handle)
        return buffer

    def _some(self, handle: int, name: str, room: memoryview) -> int:
        count = os.readv(handle, [room[:READ_BYTES]])
        if count == 0:
            raise _changed(name)
        return count

    def _fill(self, handle: int, name: str, room: memoryview) -> None:
        while room.nbytes:
            room = room[self._some(handle, name, room) :]

    def check_unchanged(self) -> None:
        """Raises StagingError adapter-changing when a name no longer means the file that was read,
        or the file has been written to since."""
        for name, noted in self._seen.items():
            if self._now(name) != noted:
                raise _changed(name)

    def _now(self, name: str) -> tuple[int, ...] | None:
        """``None``: no such file, or none that can be looked at; reading it says why."""
        try:
            return _identity((self._root / name).stat())
        except (OSError, ValueError):
            return None


def _identity(status: os.stat_result) -> tuple[int, ...]:
    # Copying tools set the mtime of what they wrote; nobody sets a ctime.
    times = status.st_mtime_ns, status.st_ctime_ns
    return status.st_dev, status.st_ino, status.st_size, *times


def _changed(name: str) -> StagingError:
    return StagingError(
        "the adapter was written to while it was read; write a new version beside it and rename",
        code="adapter-changing",
        subject=name,
    )


def _unreadable(name: str, error: BaseException) -> StagingError:
    reason = error.strerror if isinstance(error, OSError) else None
    return StagingError(
        f"cannot read the adapter: {reason or type(error).__name__}",
        code="adapter-unreadable",
        subject=name,
    )
