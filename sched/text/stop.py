"""Stop strings in a stream of text.

Owns the text held back because it may begin a stop string. Invariants: the outcome depends on the
text alone, not on how it is cut into pieces; no character of a stop string is given out before the
match is decided; at most the longest stop string less one character is held back.

The stop string that *ends* first wins (at one end, the longest), since that is what a reader of the
stream can know first. Matching is one Aho-Corasick automaton over characters (A. Aho, M. Corasick,
"Efficient string matching", 1975): the state's depth is the length of the longest tail of the text
that begins some stop string, so it says both what matched and what to hold back, at constant cost
per character.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ...errors import RequestError

MAX_STOPS = 16
MAX_STOP_CHARS = 1024


def check_stops(stops: Sequence[str]) -> tuple[str, ...]:
    """The stop strings without repeats, in order.

    Raises:
        RequestError: ``bad-stop`` when there are more than 16, or one is empty, longer than 1024
            characters or no string.
    """
    if isinstance(stops, str):
        stops = [stops]
    if len(stops) > MAX_STOPS:
        raise RequestError(
            "too many stop strings",
            code="bad-stop",
            subject="stop",
            expected=f"at most {MAX_STOPS}",
            found=len(stops),
        )
    for i, stop in enumerate(stops):
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise RequestError(
                "a stop string cannot be used",
                code="bad-stop",
                subject=f"stop[{i}]",
                expected=f"1 to {MAX_STOP_CHARS} characters",
                found=len(stop) if isinstance(stop, str) else type(stop).__name__,
            )
    return tuple(dict.fromkeys(stops))


class StopMatcher:
    """Watches one sequence's text for its stop strings.

    Args:
        stops: up to 16 strings; none is allowed, and then nothing is ever held back.
        include: whether the text given out ends with the stop string, rather than before it.

    Attributes:
        matched: the stop string found, or ``None``.

    Raises:
        RequestError: ``bad-stop``, as :func:`check_stops`.
    """

    def __init__(self, stops: Sequence[str] = (), *, include: bool = False) -> None:
        self.matched: str | None = None
        self._include = include
        self._held = ""
        self._state = 0
        # Per state: characters to next states, where to fall back, depth, what ends here.
        self._next: list[dict[str, int]] = [{}]
        self._fall = [0]
        self._depth = [0]
        self._ends: list[str | None] = [None]
        for stop in check_stops(stops):
            self._add(stop)
        self._link()

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._fall.append(0)
                self._depth.append(self._depth[state] + 1)
                self._ends.append(None)
            state = self._next[state][char]
        self._ends[state] = stop

    def _link(self) -> None:
        order = deque(self._next[0].values())
        while order:
            state = order.popleft()
            for char, child in self._next[state].items():
                order.append(child)
                self._fall[child] = self._step(self._fall[state], char)
            if self._ends[state] is None:
                # The longest stop string that ends here, by way of the shorter tails.
                self._ends[state] = self._ends[self._fall[state]]

    def _step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fall[state]
        return self._next[state].get(char, 0)

    def push(self, text: str) -> str:
        """The text that is now certain to come before any stop string.

        Check ``matched`` afterwards: once it is set, the sequence is over and later text is
        swallowed.
        """
        if self.matched is not None:
            return ""
        if len(self._next) == 1:
            return text
        buffer = self._held + text
        start = len(self._held)
        for i in range(start, len(buffer)):
            self._state = self._step(self._state, buffer[i])
            stop = self._ends[self._state]
            if stop is not None:
                self.matched = stop
                self._held = ""
                end = i + 1
                return buffer[:end] if self._include else buffer[: end - len(stop)]
        cut = len(buffer) - self._depth[self._state]
        self._held = buffer[cut:]
        return buffer[:cut]

    def flush(self) -> str:
        """The text held back, when the sequence ends for another reason."""
        held, self._held, self._state = self._held, "", 0
        return held
