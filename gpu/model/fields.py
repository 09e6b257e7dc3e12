"""Typed reads of one JSON object's fields: the right type in the right range, or a named refusal.

What it owns: nothing. Invariant: an absent field (or null) takes the default given, and a field of
the wrong type never does.

Raises (every reader): ModelError bad-config-field, whose subject is the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ...errors import ModelError

MAX_EOS: Final = 1024
MAX_NUMBER: Final = 1e30


def ids(raw: Mapping[str, Any], field: str) -> list[int]:
    """An id, a list of ids, or nothing."""
    value = raw.get(field)
    if value is None:
        return []
    values = value if isinstance(value, list) else [value]
    if len(values) > MAX_EOS or any(type(v) is not int for v in values):
        raise bad_field(field, f"an integer or a list of at most {MAX_EOS}", value)
    return values


def integer(
    raw: Mapping[str, Any], field: str, low: int, high: int, *, default: int | None = None
) -> int:
    """An integer in ``low..high``; ``default`` stands for an absent field."""
    value = raw.get(field)
    if value is None:
        value = default
    if type(value) is not int or not low <= value <= high:
        raise bad_field(field, f"an integer in {low}..{high}", value)
    return value


def number(raw: Mapping[str, Any], field: str, *, default: float | None = None) -> float:
    """A number > 0, as float."""
    value = raw.get(field)
    if value is None:
        value = default
    # Compared before it is converted: JSON integers have no bound, and NaN fails both.
    if isinstance(value, (int, float)) and type(value) is not bool and 0 < value < MAX_NUMBER:
        return float(value)
    raise bad_field(field, "a positive number", value)


def flag(raw: Mapping[str, Any], field: str, *, default: bool) -> bool:
    """true or false."""
    value = raw.get(field)
    if value is None:
        return default
    if type(value) is not bool:
        raise bad_field(field, "true or false", value)
    return value


def bad_field(field: str, expected: str, found: object) -> ModelError:
    """The refusal of a field."""
    return ModelError(
        "a config field is missing or out of range",
        code="bad-config-field",
        subject=field,
        expected=expected,
        found=repr(found)[:200],
    )
