"""Where adapters come from: a directory, or bytes already in memory.

What it owns: the `AdapterSource` protocol and the two local sources (a network peer implements the
same protocol). Invariant: the same files give the same bytes, hence the same digest and image,
whichever source carried them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from . import safefile
from .directory import Sink, read_directory


@dataclass(frozen=True, slots=True, eq=False)
class RawAdapter:
    """The bytes of one adapter: ``config`` is JSON, ``shards`` are whole safetensors files.

    Each shard is uint8 ``[file size]``; there is one unless the adapter is sharded (then in the
    order of their file names).
    """

    config: bytes
    shards: tuple[npt.NDArray[np.uint8], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.nbytes for shard in self.shards)

    def digest(self) -> str:
        """SHA-256 (hex) of the config bytes followed by the bytes of every shard."""
        state = hashlib.sha256(self.config)
        for shard in self.shards:
            state.update(shard.data)
        return state.hexdigest()


class AdapterSource(Protocol):
    """Anything that can produce the bytes of one adapter."""

    def read(self, limits: safefile.FileLimits) -> RawAdapter:
        """All bytes, read once. May block (called on a staging worker).

        Raises:
            RejectError: the adapter's own fault (too large, pickle, escapes its directory).
            StagingError: I/O (code ``adapter-unreadable``).
        """
        ...


@runtime_checkable
class StreamedSource(Protocol):
    """A source whose file need not be in memory as a whole, if somebody takes it piece by piece."""

    def stream(self, limits: safefile.FileLimits, sink: Sink) -> RawAdapter | None:
        """As `AdapterSource.read`; ``None`` if the sink took all."""
        ...


@dataclass(frozen=True, slots=True)
class DirectorySource:
    """A PEFT adapter directory on disk.

    ``follow_links`` lets its files be links to elsewhere, as model hub caches keep them. Leave it
    False for a path that someone else chose.
    """

    path: str | Path
    follow_links: bool = False

    def read(self, limits: safefile.FileLimits) -> RawAdapter:
        """See `AdapterSource.read`."""
        config, shards = read_directory(Path(self.path), limits, follow_links=self.follow_links)
        return RawAdapter(config, shards)

    def stream(self, limits: safefile.FileLimits, sink: Sink) -> RawAdapter | None:
        """See `StreamedSource.stream`."""
        path, follow = Path(self.path), self.follow_links
        config, shards = read_directory(path, limits, follow_links=follow, sink=sink)
        return RawAdapter(config, shards) if shards else None


@dataclass(frozen=True, slots=True, eq=False)
class BytesSource:
    """safetensors bytes and config bytes already in memory; they are not copied."""

    tensors: bytes | bytearray | memoryview
    config: bytes

    def read(self, limits: safefile.FileLimits) -> RawAdapter:
        """See `AdapterSource.read`."""
        data = np.frombuffer(self.tensors, np.uint8)
        safefile.check_sizes(len(self.config), data.nbytes, limits)
        return RawAdapter(self.config, (data,))

    def stream(self, limits: safefile.FileLimits, sink: Sink) -> RawAdapter | None:
        """See `StreamedSource.stream`."""
        raw = self.read(limits)
        (data,) = raw.shards
        return None if sink.offer(raw.config, data, data.nbytes) else raw
