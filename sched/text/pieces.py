"""One token as bytes, for log-probabilities: a token may be part of a character."""

from __future__ import annotations

from .detokenizer import byte_alphabet
from .tokenizer import Tokenizer

_ALPHABET = byte_alphabet()


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The bytes a token stands for; of a special token its name; ``b""`` for an id without one."""
    token = tokenizer.token(token_id)
    if token is None:
        return b""
    if not tokenizer.byte_level:
        return tokenizer.decode([token_id], skip_special_tokens=False).encode()
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:
        return token.encode()
