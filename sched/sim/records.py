"""What the ledger writes down: a broken law, and the life of one request."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


class Violation(msgspec.Struct, frozen=True):
    """``law``: which promise; ``what``: how it broke; ``at``: virtual seconds."""

    law: str
    what: str
    at: float


@dataclass(slots=True)
class Req:
    """One request, as the ledger knows it. Times in virtual seconds."""

    adapter: str | None
    prompt: int
    priority: int
    since: float
    wanted: int = 0  #: most new tokens
    tokens: int = 0
    slot: int | None = None
    ident: int | None = None
    computed: int = 0
    decoding: bool = False
    opened: bool = False
    closed: bool = False
    ended: bool = False
    absent: bool = False
    held: float | None = None
    first: float | None = None
    hit: int = 0
    family: int = -1
    left: float | None = None

    def left_by(self, now: float) -> float:
        """When it gave everything back; ``now`` if it has not."""
        return now if self.left is None else self.left
