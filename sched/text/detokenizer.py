"""Token ids to text, one at a time, never half a character.

Owns one sequence's undecided tail. Invariants: what was given out never changes; the deltas and
the flush, joined, equal the decode of all ids at once (one exception, in :class:`_Window`); the
tail is bounded.

A byte-level tokenizer (GPT-2, Llama 3, Qwen) spells bytes, so its stream is a UTF-8 stream: bytes
go through an incremental decoder, which holds back an incomplete character and replaces malformed
bytes as the whole decode would (Unicode's "maximal subparts"). Every other tokenizer is asked to
decode a short window twice, with and without the new tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from ...errors import InternalError
from .tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


def byte_alphabet() -> dict[str, int]:
    """The byte each character of a byte-level token stands for.

    Printable Latin-1 characters stand for themselves, the other 68 bytes, in order, for U+0100 and
    on (the GPT-2 tokenizer's convention).
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    taken = set(plain)
    table = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in taken)
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


_ALPHABET = byte_alphabet()
_UTF8 = codecs.getincrementaldecoder("utf-8")


class _Strategy(Protocol):
    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class _Bytes:
    """Byte-level tokens: at most three bytes are ever undecided."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = _UTF8(errors="replace")

    def push(self, token_id: int) -> str:
        token = self._tokenizer.token(token_id)
        if token is None:
            return ""
        try:
            data = bytes([_ALPHABET[char] for char in token])
        except KeyError:
            # An added token with other characters is text already.
            data = token.encode("utf-8")
        return self._decoder.decode(data)

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _Window:
    """Any other tokenizer: decode a window of recent tokens, give out what it adds.

    The window keeps the tokens of the last text given out as context, because a tokenizer that
    marks word starts drops the space of the first token it decodes. Text that ends in U+FFFD may be
    half a character and waits, for at most ``HOLD`` tokens. One exception to equality: a tokenizer
    with byte-fallback tokens turns *all* bytes of a run into U+FFFD once one is malformed; bytes
    given out as whole characters before that stay as they are.
    """

    HOLD = 32

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(context)
        self._known = len(self._ids)

    def push(self, token_id: int) -> str:
        if self._tokenizer.token(token_id) is None:
            return ""
        self._ids.append(token_id)
        return self._take(hold=len(self._ids) - self._known < self.HOLD)

    def flush(self) -> str:
        return self._take(hold=False)

    def _take(self, hold: bool) -> str:
        # Specials were filtered on the way in, so what is here is to be spelled out.
        before = self._tokenizer.decode(self._ids[: self._known], skip_special_tokens=False)
        after = self._tokenizer.decode(self._ids, skip_special_tokens=False)
        if hold and (len(after) <= len(before) or after.endswith(_REPLACEMENT)):
            return ""
        self._ids = self._ids[self._known :] or self._ids
        self._known = len(self._ids)
        return after[len(before) :]


class IncrementalDetokenizer:
    """The text of one sequence as it grows.

    Args:
        tokenizer: the model's tokenizer.
        skip_special_tokens: whether special tokens give no text.
        context: token ids before the sequence (the end of its prompt is enough). They give no text;
            a tokenizer that marks word starts needs them to keep the first word's space, where the
            text continues its prompt. Only the last 16 are used.
    """

    CONTEXT = 16

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        context: Sequence[int] = (),
    ) -> None:
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        kept = [i for i in context[-self.CONTEXT :] if i not in self._skipped]
        self._strategy: _Strategy = (
            _Bytes(tokenizer) if tokenizer.byte_level else _Window(tokenizer, kept)
        )

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` makes certain; often empty, never half a character.

        Raises:
            InternalError: ``bad-token-id`` for a negative id (a row that was not sampled).
        """
        if token_id < 0:
            raise InternalError(
                "a token that was not sampled reached the detokenizer",
                code="bad-token-id",
                subject=str(token_id),
                expected=">= 0",
                found=token_id,
            )
        return "" if token_id in self._skipped else self._strategy.push(token_id)

    def flush(self) -> str:
        """The rest, at the end of the sequence: an unfinished character becomes U+FFFD."""
        return self._strategy.flush()
