"""What callers hand to an engine, checked before it reaches the core.

The core trusts its events: one with a wrong type in it would be a bug that stops serving for all.
Here it is a refusal (RequestError ``bad-argument`` or ``bad-token``) that hurts its caller alone.
"""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import msgspec

from ..errors import CommandError, RequestError
from ..gpu.lora.source import AdapterSource, BytesSource, DirectorySource
from .face import Source

if TYPE_CHECKING:
    from .core import Core


def bad_argument(subject: str, expected: str, found: object) -> RequestError:
    """The refusal of a value that can never be right."""
    return RequestError(
        "an argument is not understood",
        code="bad-argument",
        subject=subject,
        expected=expected,
        found=repr(found)[:100],
    )


def check(event: msgspec.Struct) -> None:
    """Refuse an event unless every field has its declared type. Raises RequestError
    bad-argument."""
    kind = type(event)
    values = [kind.__name__, *msgspec.structs.astuple(event)]
    try:
        msgspec.convert(values, kind, strict=True)
    except msgspec.ValidationError as error:
        # Events are arrays behind a tag: "$[3]" is the third field.
        place = re.search(r"\$\[(\d+)\]", str(error))
        subject = kind.__struct_fields__[int(place[1]) - 1] if place else None
        raise RequestError(
            "an argument is not understood",
            code="bad-argument",
            subject=subject,
            expected=str(error).partition("`")[2].partition("`")[0] or None,
            found=repr(getattr(event, subject))[:100] if subject else None,
        ) from error


def token_ids(prompt: Sequence[int]) -> list[int]:
    """Token ids as plain integers, also from an array. Raises RequestError bad-argument (no
    sequence) or bad-token (not integers)."""
    if isinstance(prompt, (bytes, bytearray, memoryview)):
        raise bad_argument("prompt", "text or token ids", prompt)
    try:
        values = iter(prompt)
    except TypeError:
        raise bad_argument("prompt", "text or token ids", prompt) from None
    ids: list[int] = []
    for value in values:
        try:
            ids.append(operator.index(value))
        except TypeError:
            raise RequestError(
                "a token id that is no integer",
                code="bad-token",
                subject=f"prompt[{len(ids)}]",
                expected="an integer",
                found=repr(value)[:100],
            ) from None
    return ids


def deadline_in(seconds: float) -> float:
    """The moment ``seconds`` from now. Raises RequestError bad-argument."""
    if not isinstance(seconds, (int, float)) or math.isnan(seconds):
        raise bad_argument("deadline_s", "a number of seconds", seconds)
    return anyio.current_time() + seconds


def known_source(core: Core, name: str) -> int:
    """The id of the source a known name comes from. Raises CommandError unknown-adapter."""
    source = core.source_of(name) if isinstance(name, str) else None
    if source is None:
        raise CommandError("no adapter of this name", code="unknown-adapter", subject=str(name))
    return source


def adapter_source(source: Source) -> AdapterSource:
    """A directory, ``(tensors, config)`` bytes, or a source object. Raises RequestError."""
    match source:
        case (bytes() | bytearray() | memoryview() as tensors, bytes() as config):
            return BytesSource(tensors, config)
        case str() | os.PathLike() if "\0" not in os.fspath(source):
            return DirectorySource(source if isinstance(source, Path) else Path(source))
        case _ if callable(getattr(source, "read", None)):
            return source  # type: ignore[return-value]  # duck-typed by the line above
    raise bad_argument("source", "a directory, (safetensors bytes, config bytes) or a Peer", source)
