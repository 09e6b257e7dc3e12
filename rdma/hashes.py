"""Which hash covers the chunks of a packed image: BLAKE3 where both ends have it, else SHA-256.

Either digest has 32 bytes and resists collisions; BLAKE3 is several times as fast, so that checking
does not hold up receiving. The only file that imports `blake3`. Owns nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ..errors import WireError
from .messages import CHUNK_BYTES

DIGEST_BYTES: Final = 32
SHA256: Final = "sha256"
"""Every end has this one."""

Hash = Callable[[npt.NDArray[np.uint8]], bytes]
"""uint8 ``[n]`` -> digest. Gives up the GIL while it reckons a chunk."""


def _sha256(data: npt.NDArray[np.uint8]) -> bytes:
    return hashlib.sha256(data.data).digest()


def _known() -> dict[str, Hash]:
    try:
        from blake3 import blake3
    except ImportError:
        return {SHA256: _sha256}

    def fast(data: npt.NDArray[np.uint8]) -> bytes:
        return bytes(blake3(data.data).digest())

    return {"blake3": fast, SHA256: _sha256}


KNOWN: Final = _known()
"""By name, the fastest first."""


def choose(offered: Sequence[str]) -> str:
    """The first of ``offered`` that this end has too. Raises WireError no-common-hash."""
    for name in offered:
        if name in KNOWN:
            return name
    raise WireError(
        "the two ends have no hash in common",
        code="no-common-hash",
        expected=", ".join(KNOWN),
        found=", ".join(offered)[:200],
    )


def chunk_digests(image: npt.NDArray[np.uint8], name: str) -> bytes:
    """The hash of each `CHUNK_BYTES` of a uint8 ``[n]`` image, joined (32 bytes a chunk)."""
    return b"".join(
        KNOWN[name](image[start : start + CHUNK_BYTES])
        for start in range(0, image.nbytes, CHUNK_BYTES)
    )
