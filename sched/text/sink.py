"""One sequence's tokens to text: the detokenizer, then the stop matcher."""

from __future__ import annotations

from collections.abc import Sequence

from .detokenizer import IncrementalDetokenizer
from .stop import StopMatcher
from .tokenizer import Tokenizer


class TextSink:
    """Owned by one stream. ``stops`` may be empty; then no text is ever held back for them."""

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str] = (), prompt: Sequence[int] = ()
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, context=prompt)
        self._stop = StopMatcher(stops) if stops else None

    def push(self, token: int) -> tuple[str, bool]:
        """Text this token makes certain, and whether a stop string matched (then it is the last
        text of the sequence)."""
        text = self._detokenizer.push(token)
        if self._stop is None:
            return text, False
        text = self._stop.push(text)
        return text, self._stop.matched is not None

    def finish(self) -> str:
        """What was held back, when the sequence ends for another reason."""
        text = self._detokenizer.flush()
        if self._stop is None:
            return text
        text = self._stop.push(text)
        return text if self._stop.matched is not None else text + self._stop.flush()
