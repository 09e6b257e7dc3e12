"""Bounded, strict reading of a checkpoint's JSON files.

What it owns: nothing. Invariants: at most `MAX_JSON_BYTES` are read; NaN and Infinity are refused;
the top level is an object; every failure is a `ModelError` that names the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...errors import ModelError

MAX_JSON_BYTES = 16 << 20
"""A sharded index of a large model is a few MB; configs are a few KB."""


def read_json_object(path: Path, *, code: str) -> dict[str, Any]:
    """The JSON object in ``path``.

    Raises:
        ModelError: with ``code`` for a file that cannot be read, is too large, or is not one
            strict JSON object.
    """

    def constant(text: str) -> float:
        raise ValueError(f"{text} is not JSON")

    try:
        with path.open("rb") as file:
            raw = file.read(MAX_JSON_BYTES + 1)
        if len(raw) > MAX_JSON_BYTES:
            raise ModelError(
                "a JSON file is too large",
                code=code,
                subject=path.name,
                expected=f"at most {MAX_JSON_BYTES} bytes",
            )
        value = json.loads(raw.decode("utf-8"), parse_constant=constant)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"cannot be read as JSON: {str(error)[:200]}", code=code, subject=path.name
        ) from error
    if not isinstance(value, dict):
        raise ModelError(
            "not a JSON object",
            code=code,
            subject=path.name,
            expected="an object",
            found=type(value).__name__,
        )
    return value
