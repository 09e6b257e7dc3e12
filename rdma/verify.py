"""Digests reckoned while the bytes still arrive, on threads of their own.

What it owns: its threads. Invariant: nothing is called good before every byte of it was hashed.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt

from ..errors import StagingError
from .background import digest_pool
from .hashes import Hash
from .messages import CHUNK_BYTES

_HASHERS = 2


def _mismatch(expected: str, found: str, what: str) -> StagingError:
    return StagingError(
        "bytes from the peer do not have the digest it announced",
        code="digest-mismatch",
        subject=what,
        expected=expected,
        found=found,
    )


class ChunkVerifier:
    """Checks ``array`` (uint8 ``[n]``) against ``digests`` (of 32 bytes, by ``hash_``, one for each
    `CHUNK_BYTES`); the last chunk on the caller's thread, the others beside it."""

    def __init__(self, array: npt.NDArray[np.uint8], digests: bytes, hash_: Hash) -> None:
        self._array, self._digests, self._hash = array, digests, hash_
        # Its threads start with the first chunk given to it: an image of one needs none.
        self._pool = digest_pool(_HASHERS, "rota-verify")
        self._checks: list[Future[None]] = []
        self._next = 0

    def advance(self, count: int) -> None:
        """The first ``count`` bytes are there. Raises StagingError digest-mismatch, early."""
        last = (self._array.nbytes - 1) // CHUNK_BYTES * CHUNK_BYTES
        while self._next < last and self._next + CHUNK_BYTES <= count:
            self._checks.append(self._pool.submit(self._check, self._next // CHUNK_BYTES))
            self._next += CHUNK_BYTES
        while self._checks and self._checks[0].done():
            self._checks.pop(0).result()

    def finish(self) -> None:
        """Wait for every chunk. Raises StagingError digest-mismatch."""
        self.advance(self._array.nbytes)
        if self._array.nbytes:
            self._check(self._next // CHUNK_BYTES)
        for check in self._checks:
            check.result()
        self._checks.clear()

    def close(self) -> None:
        """End the threads, whatever they still had to do. Idempotent."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _check(self, chunk: int) -> None:
        start = chunk * CHUNK_BYTES
        found = self._hash(self._array[start : start + CHUNK_BYTES])
        wanted = self._digests[32 * chunk : 32 * chunk + 32]
        if found != wanted:
            raise _mismatch(wanted.hex(), found.hex(), f"chunk {chunk}")


class WholeVerifier:
    """One SHA-256 over ``head`` and then the bytes of arrays, in the order they are announced."""

    def __init__(self, head: bytes) -> None:
        self._hash = hashlib.sha256(head)
        self._pool = digest_pool(1, "rota-verify")
        self._array: npt.NDArray[np.uint8] | None = None
        self._done = 0

    def begin(self, array: npt.NDArray[np.uint8]) -> None:
        """The bytes of ``array`` come next."""
        self._array, self._done = array, 0

    def advance(self, count: int) -> None:
        """The first ``count`` bytes of the array are there."""
        assert self._array is not None
        if count - self._done >= CHUNK_BYTES or count == self._array.nbytes:
            self._pool.submit(self._hash.update, self._array[self._done : count].data)
            self._done = count

    def finish(self, expected: str) -> None:
        """Raises StagingError digest-mismatch."""
        found = self._pool.submit(self._hash.hexdigest).result()
        if found != expected:
            raise _mismatch(expected, found, "adapter")

    def close(self) -> None:
        """End its thread, whatever it still had to do. Idempotent."""
        self._pool.shutdown(wait=True, cancel_futures=True)
