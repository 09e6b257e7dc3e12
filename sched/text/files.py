"""Bounded reads of a model directory's text files.

Owns the rule that a missing file is an answer (``None``), while one that is too large, unreadable
or not JSON is a named refusal.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...errors import ModelError

MAX_CONFIG_BYTES = 16 << 20


def read_text(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> str | None:
    """The file's text (UTF-8), or ``None`` when there is no such file.

    Raises:
        ModelError: ``bad-model-file`` when over ``max_bytes``, unreadable or not UTF-8.
    """
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelError(
            "a file of the model cannot be read",
            code="bad-model-file",
            subject=str(path),
            found=error.strerror or repr(error),
        ) from error
    if len(data) > max_bytes:
        raise ModelError(
            "a file of the model is too large",
            code="bad-model-file",
            subject=str(path),
            expected=f"at most {max_bytes} bytes",
            found="more",
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(
            "a file of the model is not UTF-8 text",
            code="bad-model-file",
            subject=str(path),
            found=f"byte {error.start}: {error.reason}",
        ) from error


def read_json(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any] | None:
    """The file's JSON object, or ``None`` when there is no such file.

    Raises:
        ModelError: ``bad-model-file``, as :func:`read_text`, or when it is not a JSON object.
    """
    text = read_text(path, max_bytes)
    if text is None:
        return None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(
            "a file of the model is not JSON",
            code="bad-model-file",
            subject=str(path),
            found=str(error),
        ) from error
    if not isinstance(content, dict):
        raise ModelError(
            "a file of the model is not a JSON object",
            code="bad-model-file",
            subject=str(path),
            expected="object",
            found=type(content).__name__,
        )
    return content


def token_text(value: object) -> str | None:
    """A special token as ``tokenizer_config.json`` spells it: a string, or ``{"content": str}``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
