"""The tokenizer of a model directory: text to token ids and back, within limits.

Owns the ``tokenizers`` object and the set of token ids that end a sequence. Invariants: immutable
after loading, so any thread may use it; padding and truncation of the file are switched off, since
both would change a prompt in silence.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders

from ...errors import ModelError, RequestError
from .files import read_json, read_text, token_text

_MAX_TOKENIZER_BYTES = 256 << 20


@dataclass(frozen=True)
class TextLimits:
    """Limits of one prompt.

    Attributes:
        max_chars: characters of text, checked before tokenizing.
        max_tokens: token ids after tokenizing.
    """

    max_chars: int = 4_000_000
    max_tokens: int = 1_000_000


class Tokenizer:
    """A model's tokenizer.

    Attributes:
        eos_ids: token ids that end a sequence.
        special_ids: ids of special tokens (skipped in text by default).
        limits: limits of one prompt.
        byte_level: whether tokens spell bytes (GPT-2 style), so that text can be made byte by byte.
    """

    def __init__(
        self,
        raw: Any,
        *,
        eos_ids: frozenset[int] = frozenset(),
        limits: TextLimits | None = None,
    ) -> None:
        raw.no_padding()
        raw.no_truncation()
        self._raw = raw
        self.eos_ids = eos_ids
        self.limits = limits if limits is not None else TextLimits()
        added = raw.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.byte_level = isinstance(raw.decoder, decoders.ByteLevel)

    @classmethod
    def from_dir(
        cls, model_dir: str | os.PathLike[str], limits: TextLimits | None = None
    ) -> Tokenizer:
        """Load ``tokenizer.json`` and the end-of-sequence ids of a model directory.

        The ids come from ``generation_config.json`` (an int or a list), else from ``config.json``
        (top level or ``text_config``), always with ``eos_token`` of ``tokenizer_config.json``.

        Raises:
            ModelError: ``no-tokenizer``, ``bad-tokenizer``, ``bad-model-file``.
        """
        directory = Path(model_dir)
        path = directory / "tokenizer.json"
        text = read_text(path, _MAX_TOKENIZER_BYTES)
        if text is None:
            raise ModelError(
                "the model directory has no tokenizer.json",
                code="no-tokenizer",
                subject=str(path),
                expected="present",
                found="absent",
            )
        try:
            raw = tokenizers.Tokenizer.from_str(text)
        # The library raises plain Exception for every fault of the file.
        except Exception as error:
            raise ModelError(
                "tokenizer.json cannot be loaded",
                code="bad-tokenizer",
                subject=str(path),
                found=str(error),
            ) from error
        return cls(raw, eos_ids=_eos_ids(directory, raw), limits=limits)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return int(self._raw.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``.

        Args:
            text: what to tokenize; special tokens spelled out in it become special tokens.
            add_special_tokens: whether the tokenizer's own template (bos and the like) is applied;
                false for text a chat template made, which spells them itself.

        Raises:
            RequestError: ``prompt-too-long`` over the limits; ``bad-text`` for text that is no
                Unicode (lone surrogates).
        """
        if len(text) > self.limits.max_chars:
            raise RequestError(
                "the prompt is too long",
                code="prompt-too-long",
                subject="prompt",
                expected=f"at most {self.limits.max_chars} characters",
                found=len(text),
            )
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                "the prompt is not valid Unicode",
                code="bad-text",
                subject="prompt",
                expected="no lone surrogates",
                found=f"U+{ord(text[error.start]):04X} at character {error.start}",
            ) from error
        ids: list[int] = self._raw.encode(text, add_special_tokens=add_special_tokens).ids
        if len(ids) > self.limits.max_tokens:
            raise RequestError(
                "the prompt is too long",
                code="prompt-too-long",
                subject="prompt",
                expected=f"at most {self.limits.max_tokens} tokens",
                found=len(ids),
            )
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids without a token (padded vocabulary rows) give no text."""
        text: str = self._raw.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it (not text), or ``None`` for an id without one."""
        token: str | None = self._raw.id_to_token(token_id)
        return token

    def token_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it, or ``None``."""
        found: int | None = self._raw.token_to_id(token)
        return found


def _eos_ids(directory: Path, raw: Any) -> frozenset[int]:
    found: object = None
    for name in ("generation_config.json", "config.json"):
        config = read_json(directory / name) or {}
        nested = config.get("text_config")
        found = config.get("eos_token_id")
        if found is None and isinstance(nested, dict):
            found = nested.get("eos_token_id")
        if found is not None:
            break
    ids: set[int] = set()
    for value in found if isinstance(found, list) else [] if found is None else [found]:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ModelError(
                "eos_token_id is not a token id",
                code="bad-model-file",
                subject=str(directory),
                expected="an id or a list of ids",
                found=repr(value)[:100],
            )
        ids.add(value)
    named = token_text((read_json(directory / "tokenizer_config.json") or {}).get("eos_token"))
    named_id = None if named is None else raw.token_to_id(named)
    if named_id is not None:
        ids.add(int(named_id))
    return frozenset(ids)
