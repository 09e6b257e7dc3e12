"""The bounded log and the stories told from it."""

from __future__ import annotations

from collections import deque

from ...errors import InternalError


class Log:
    """A bounded list of ``(time, subject, what)``; ``subject`` is like ``seq 3``, ``slot 1`` or
    ``adapter sql``. Old lines fall off the end."""

    def __init__(self, size: int) -> None:
        self._lines: deque[tuple[float, str, str]] = deque(maxlen=size)
        self.now = 0.0

    def add(self, subject: str, what: str) -> None:
        self._lines.append((self.now, subject, what))

    def story(self, subject: str) -> list[str]:
        """The lines of one subject, oldest first, as ``"12.345 what"``."""
        return [f"{t:.6f} {what}" for t, s, what in self._lines if s == subject]

    def broken(self, subject: str, what: str) -> InternalError:
        """The error for a broken invariant, carrying the subject's story."""
        story = "; ".join(self.story(subject)[-12:])
        return InternalError(f"{what} (story: {story})", subject=subject, code="invariant")
