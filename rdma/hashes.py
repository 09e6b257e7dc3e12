"""Which hash covers the chunks of a packed image: the fastest that both ends have, and may trust.

With a secret the digests are authentic, and so are bytes that match them, if nobody can make others
that do: BLAKE3, else SHA-256. Without one whoever can change bytes on the way can change their
digests too, and what is left to find is accidents: there XXH3-128 does as well and takes an eighth
of the time, too little to hold up receiving. Nor do tags cover what is said of an image there: one
more digest does. The only file that imports `blake3` and `xxhash`. Owns nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from ..errors import WireError
from .messages import CHUNK_BYTES, Packed


@dataclass(frozen=True, slots=True)
class Hash:
    """One hash.

    Attributes:
        of: uint8 ``[n]`` -> digest. Gives up the GIL while it reckons a chunk.
        digest_bytes: length of a digest.
        sure: nobody can make other bytes with the same digest.
        quick: takes less time than waking a thread to do it.
        slow: one thread does not keep up with a connection.
        told: behind the digests of the chunks there is one of what is said of the image.
    """

    of: Callable[[npt.NDArray[np.uint8]], bytes]
    digest_bytes: int = 32
    sure: bool = True
    quick: bool = False
    slow: bool = False
    told: bool = False


def _sha256(data: npt.NDArray[np.uint8]) -> bytes:
    return hashlib.sha256(data.data).digest()


def _known() -> dict[str, Hash]:
    found: dict[str, Hash] = {}
    sure: dict[str, Hash] = {}
    try:
        from xxhash import xxh3_128_digest
    except ImportError:
        pass
    else:

        def quick(data: npt.NDArray[np.uint8]) -> bytes:
            return bytes(xxh3_128_digest(data.data))

        found["xxh3-128"] = Hash(quick, 16, sure=False, quick=True, told=True)
    try:
        from blake3 import blake3
    except ImportError:
        pass
    else:

        def fast(data: npt.NDArray[np.uint8]) -> bytes:
            return bytes(blake3(data.data).digest())

        sure["blake3"] = Hash(fast)
    sure["sha256"] = Hash(_sha256, slow=True)
    return found | {f"{n}-told": replace(one, told=True) for n, one in sure.items()} | sure


KNOWN: Final = _known()
"""By name; first those that cover what is said of an image, then the fastest first. Every end has
SHA-256."""


def offered(*, sure: bool) -> list[str]:
    """The names of those this end may use, the one it likes best first: all it has, or where
    everything said is authentic, the sure ones."""
    return [name for name, one in KNOWN.items() if not sure or (one.sure and not one.told)]


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


def told_digest(packed: Packed) -> bytes:
    """By its hash, the digest of what ``packed`` says of an image: what a slot is given beside its
    bytes, and the digests of its chunks."""
    numbers = np.array((packed.nbytes, packed.embed_rows, packed.head_rows), "<u8")
    facts = (packed.digest.encode(), packed.fingerprint.encode(), numbers.tobytes())
    text = b"".join((*facts, packed.ranks, packed.scales, packed.affine, packed.chunks))
    return KNOWN[packed.hash].of(np.frombuffer(text, np.uint8))
