"""The file with the secret that weight peers and engines share.

Owns nothing. Invariant: both ends take the same files, or a peer could serve with a secret that no
engine can show.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ..errors import RequestError

MIN_SECRET: Final = 16
"""Bytes of the shortest secret."""
MAX_SECRET: Final = 4096
"""Bytes of the longest secret; a file has at most one more, its line's end."""


def read_secret(path: Path) -> bytes:
    """The secret in ``path``; white space around it does not count.

    Raises:
        RequestError: ``bad-secret-file`` (unreadable, or too long), ``weak-secret`` (too short).
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_SECRET + 2)
    except OSError as error:
        raise RequestError(
            "the secret for peers cannot be read",
            code="bad-secret-file",
            subject=str(path),
            found=error.strerror,
        ) from error
    secret = raw.strip()
    if len(raw) <= MAX_SECRET + 1 and MIN_SECRET <= len(secret) <= MAX_SECRET:
        return secret
    weak = len(secret) < MIN_SECRET
    raise RequestError(
        "not the length of a secret for peers",
        code="weak-secret" if weak else "bad-secret-file",
        subject=str(path),
        expected=f"{MIN_SECRET}..{MAX_SECRET} bytes",
        found=f"{len(secret)} bytes" if weak else f"more than {MAX_SECRET} bytes",
    )
