"""Which verbs devices to use, as text: names, and GID indices where one is meant.

Owns nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..errors import RequestError
from .messages import MAX_RAILS

Choice = Sequence[tuple[str | None, int | None]]
"""Devices by name (``None``: the first with an active port), each with a GID index (``None``: the
RoCEv2 GID over IPv4)."""
ANY: Final[Choice] = ((None, None),)


def parse_devices(text: str) -> list[tuple[str, int | None]]:
    """``"mlx5_0,mlx5_1:3"``: names and, after a colon, GID indices, as `open_client` takes them.

    Raises:
        RequestError: bad-verbs-devices.
    """
    found: list[tuple[str, int | None]] = []
    for part in text.split(","):
        name, colon, index = part.strip().partition(":")
        if not name or (colon and not (index.isascii() and index.isdigit() and int(index) < 256)):
            raise _bad_devices(text)
        found.append((name, int(index) if colon else None))
    if len(found) > MAX_RAILS or len({name for name, _ in found}) < len(found):
        raise _bad_devices(text)
    return found


def _bad_devices(text: str) -> RequestError:
    return RequestError(
        "not a list of verbs devices",
        code="bad-verbs-devices",
        subject=text[:200],
        expected=f"1..{MAX_RAILS} different NAME or NAME:GID, with commas between",
    )
