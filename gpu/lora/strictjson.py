"""JSON read strictly: bounded, one value per key, Unicode, no NaN literals, bounded nesting.

What it owns: nothing. The adapter config comes through here, and so does every safetensors header
with anything unusual in it, so that a file two readers could understand differently is refused
rather than interpreted. The standard library's parser says what is right, and what is wrong with
the rest.
"""

from __future__ import annotations

import json
from typing import Any

from ...errors import RejectError


def loads_object(raw: bytes, *, code: str, subject: str, constants: bool = False) -> dict[str, Any]:
    """Parse ``raw`` as one JSON object.

    ``constants`` lets NaN and Infinity through as floats, for callers that name the field at fault.

    Raises:
        RejectError: with ``code`` for anything that is not one strict JSON object;
            ``duplicate-json-key`` when a key occurs twice in one object.
            ``subject`` names the file.
    """

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(items)
        if len(made) != len(items):
            seen: set[str] = set()
            for key, _ in items:
                if key in seen:
                    raise RejectError(
                        f"a JSON object in {subject} has the same key twice",
                        code="duplicate-json-key",
                        subject=key[:200],
                    )
                seen.add(key)
        return made

    def constant(text: str) -> float:
        if constants:
            return float(text)
        raise ValueError(f"{text} is not JSON")

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=pairs, parse_constant=constant)
        if b"\\u" in raw:  # an escape may be half of a pair: one reader keeps it, another does not
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise RejectError(f"not UTF-8 at byte {error.start}", code=code, subject=subject) from None
    except UnicodeEncodeError:
        raise RejectError("half of a surrogate pair", code=code, subject=subject) from None
    except RecursionError:
        raise RejectError("nested too deeply", code=code, subject=subject) from None
    except ValueError as error:
        raise RejectError(f"not JSON: {str(error)[:200]}", code=code, subject=subject) from None
    if not isinstance(value, dict):
        raise RejectError(
            "not a JSON object",
            code=code,
            subject=subject,
            expected="an object",
            found=type(value).__name__,
        )
    return value
