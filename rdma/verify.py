"""Digests reckoned while the bytes still arrive, on threads of their own.

What it owns: its threads. Invariant: nothing is called good before every byte of it was hashed.
"""

from __future__ import annotations

import hashlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import numpy as np
import numpy.typing as npt

from ..errors import StagingError
from .background import digest_pool
from .hashes import Hash
from .messages import CHUNK_BYTES

_BEHIND: Final = 1
"""Chunks that may wait for a thread before the caller takes one."""
_SHARED: Final = 4
"""Chunks left in the end that a thread is made for, where there is none."""


def _mismatch(expected: str, found: str, what: str) -> StagingError:
    return StagingError(
        "bytes from the peer do not have the digest it announced",
        code="digest-mismatch",
        subject=what,
        expected=expected,
        found=found,
    )


class ChunkVerifier:
    """Checks ``array`` (uint8 ``[n]``) against ``digests`` (by ``hash_``, one for each
    `CHUNK_BYTES`, joined).

    By a quick hash each chunk is checked as soon as it is there, on the caller's thread. Otherwise
    chunks are the work of ``threads`` threads, but for the last, which is the caller's; he takes
    others too when they fall behind, while nothing arrives (`help`) and in the end. With no threads
    all are his, but that one shares what is left in the end, if it is much. The threads are made
    when they are needed, or ``lent``, and then not ended.
    """

    def __init__(
        self,
        array: npt.NDArray[np.uint8],
        digests: bytes,
        hash_: Hash,
        threads: int = 2,
        lent: ThreadPoolExecutor | None = None,
    ) -> None:
        self._array, self._digests, self._hash = array, digests, hash_
        self._threads = 0 if hash_.quick else threads
        self._lent, self._pool = lent, lent
        self._waiting: deque[int] = deque()
        self._checks: deque[Future[object]] = deque()
        self._next = 0

    def advance(self, count: int) -> None:
        """The first ``count`` bytes are there. Raises StagingError digest-mismatch, early."""
        whole = count == self._array.nbytes
        end = -(-count // CHUNK_BYTES) if whole else count // CHUNK_BYTES
        while self._checks and self._checks[0].done():
            self._checks.popleft().result()
        for chunk in range(self._next, end):
            self._waiting.append(chunk)
            if len(self._checks) < self._threads and not whole:
                if self._pool is None:
                    self._pool = digest_pool(self._threads, "rota-verify")
                self._checks.append(self._pool.submit(self._check_all))
        self._next = max(self._next, end)
        if self._hash.quick:
            self._check_all()

    def help(self) -> bool:
        """Check a chunk if the threads are behind. Raises StagingError digest-mismatch."""
        return len(self._waiting) > (_BEHIND if self._threads else 0) and self._check()

    def _check(self) -> bool:
        """Check one that waits, if there is one."""
        try:
            chunk = self._waiting.popleft()
        except IndexError:
            return False
        start = chunk * CHUNK_BYTES
        found = self._hash.of(self._array[start : start + CHUNK_BYTES])
        size = self._hash.digest_bytes
        wanted = self._digests[size * chunk : size * (chunk + 1)]
        if found != wanted:
            raise _mismatch(wanted.hex(), found.hex(), f"chunk {chunk}")
        return True

    def _check_all(self) -> None:
        """Check what waits, until nothing does. What comes as this ends waits for the next."""
        while self._check():
            pass

    def finish(self) -> None:
        """Until every chunk is checked. Raises StagingError digest-mismatch."""
        self.advance(self._array.nbytes)
        if self._pool is None and len(self._waiting) >= _SHARED:
            # Nothing comes any more: the core that the sender had is free.
            self._pool = digest_pool(1, "rota-verify")
            self._checks.append(self._pool.submit(self._check_all))
        self._check_all()
        while self._checks:
            self._checks.popleft().result()

    def close(self) -> None:
        """End the threads, whatever they still had to do. Idempotent."""
        self._waiting.clear()
        if self._pool is None:
            return
        if self._lent is None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        while self._checks:  # they look at the array
            check = self._checks.popleft()
            if not check.cancel():
                check.exception()


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
