"""Which hash covers the chunks of a packed image: the fastest that both ends have, and may trust.

With a secret the digests are authentic, and so are bytes that match them, if nobody can make others
that do: BLAKE3, else SHA-256. Without one whoever can change bytes on the way can change their
digests too, and what is left to find is accidents: there XXH3-128 does as well and takes an eighth
of the time, too little to hold up receiving. The only file that imports `blake3` and `xxhash`.
Owns nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ..errors import WireError
from .messages import CHUNK_BYTES

SHA256: Final = "sha256"
"""Every end has this one."""


@dataclass(frozen=True, slots=True)
class Hash:
    """One hash.

    Attributes:
        of: uint8 ``[n]`` -> digest. Gives up the GIL while it reckons a chunk.
        digest_bytes: length of a digest.
        sure: nobody can make other bytes with the same digest.
        quick: takes less time than waking a thread to do it.
    """

    of: Callable[[npt.NDArray[np.uint8]], bytes]
    digest_bytes: int = 32
    sure: bool = True
    quick: bool = False


def _sha256(data: npt.NDArray[np.uint8]) -> bytes:
    return hashlib.sha256(data.data).digest()


def _known() -> dict[str, Hash]:
    found: dict[str, Hash] = {}
    try:
        from xxhash import xxh3_128_digest
    except ImportError:
        pass
    else:

        def quick(data: npt.NDArray[np.uint8]) -> bytes:
            return bytes(xxh3_128_digest(data.data))

        found["xxh3-128"] = Hash(quick, 16, sure=False, quick=True)
    try:
        from blake3 import blake3
    except ImportError:
        pass
    else:

        def fast(data: npt.NDArray[np.uint8]) -> bytes:
            return bytes(blake3(data.data).digest())

        found["blake3"] = Hash(fast)
    return found | {SHA256: Hash(_sha256)}


KNOWN: Final = _known()
"""By name, the fastest first."""


def offered(*, sure: bool) -> list[str]:
    """The names of all this end has, or of the sure ones, the fastest first."""
    return [name for name, one in KNOWN.items() if one.sure or not sure]


def choose(names: Sequence[str], *, sure: bool) -> str:
    """The first of ``names`` that this end has too, and may use.

    Raises:
        WireError: no-common-hash.
    """
    ours = offered(sure=sure)
    for name in names:
        if name in ours:
            return name
    raise WireError(
        "the two ends have no hash in common",
        code="no-common-hash",
        expected=", ".join(ours),
        found=", ".join(names)[:200],
    )


def chunk_digests(image: npt.NDArray[np.uint8], name: str) -> bytes:
    """The digest of each `CHUNK_BYTES` of a uint8 ``[n]`` image, joined."""
    return b"".join(
        KNOWN[name].of(image[start : start + CHUNK_BYTES])
        for start in range(0, image.nbytes, CHUNK_BYTES)
    )
