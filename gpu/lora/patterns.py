"""rank_pattern and alpha_pattern: regex keys from an untrusted file, matched in bounded time.

What it owns: which regexes are accepted. A backtracking matcher can be made to run for years by a
twenty-character pattern, so a pattern may not repeat a group, refer back or look around, and the
product of its choices, summed over the map, is bounded. Names are short.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...errors import RejectError

MAX_PATTERNS = 8192
MAX_PATTERN_CHARS = 256
NAME_CHARS = 64
"""Module names are about this long."""
MAX_COST = 1 << 17
"""Bound on the summed `pattern_cost` of one map."""


@dataclass(frozen=True, slots=True)
class ValuePattern:
    """One entry: ``key`` as written, its compiled form, and the value it gives."""

    key: str
    regex: re.Pattern[str]
    value: float


def parse_patterns(
    value: Any, field: str, check: Callable[[Any, str], float]
) -> tuple[ValuePattern, ...]:
    """Compile a pattern map, in file order. ``check(value, field)`` reads one value.

    The form is PEFT's: key ``k`` matches a module name by ``re.match(r"(.*\\.)?(k)$", name)``.

    Raises:
        RejectError: with ``field`` as code for a wrong type, too many or too long keys, or a
            regex that does not compile; ``unsafe-pattern`` for one that could run too long.
    """
    if value is None:
        return ()
    if type(value) is not dict:
        raise _bad("the map is not an object", field, field)
    if len(value) > MAX_PATTERNS:
        raise _bad(f"more than {MAX_PATTERNS} patterns", field, field)
    patterns, cost = [], 0
    for key, item in value.items():
        if not 0 < len(key) <= MAX_PATTERN_CHARS:
            raise _bad(f"a pattern is not 1..{MAX_PATTERN_CHARS} characters", field, key)
        cost += pattern_cost(key)
        if cost > MAX_COST:
            raise _bad("the patterns could take too long to match", "unsafe-pattern", key)
        try:
            regex = re.compile(rf"(.*\.)?({key})$")
        except (re.error, RecursionError, OverflowError) as error:
            raise _bad(f"not a regex: {error}", field, key) from None
        patterns.append(ValuePattern(key, regex, check(item, field)))
    return tuple(patterns)


def first_match(patterns: tuple[ValuePattern, ...], name: str) -> float | None:
    """Value of the first pattern that matches the module name, or ``None``."""
    for pattern in patterns:
        if pattern.regex.match(name) is not None:
            return pattern.value
    return None


def pattern_cost(pattern: str) -> int:
    """Upper estimate of the ways a backtracking matcher can walk ``pattern`` over one name.

    Each unbounded or counted repeat multiplies by `NAME_CHARS`, each optional item by 2, each group
    by its alternatives. Raises RejectError unsafe-pattern for a repeated group, a back reference or
    a ``(?`` extension, whose cost has no such bound.
    """
    cost, alternatives = 1, [1]
    index, after_group = 0, False
    while index < len(pattern):
        char, ahead = pattern[index], pattern[index + 1 : index + 3]
        was_group, after_group = after_group, False
        index += 1
        if char == "\\":
            if ahead[:1].isdigit():
                raise _bad("a pattern refers back", "unsafe-pattern", pattern)
            index += 1
        elif char == "[":
            index = _class_end(pattern, index)
        elif char == "(":
            if ahead[:1] == "?" and ahead != "?:":
                raise _bad("a pattern uses a (? extension", "unsafe-pattern", pattern)
            index += 2 if ahead == "?:" else 0
            alternatives.append(1)
        elif char == ")":
            cost *= alternatives.pop() if len(alternatives) > 1 else 1
            after_group = True
        elif char == "|":
            alternatives[-1] += 1
        elif char == "?":
            cost *= 2
        elif char in "*+{":
            bounds = re.match(r"\{(\d*)(,?)(\d*)\}", pattern[index - 1 :])
            if char == "{" and bounds is None:
                continue
            if was_group:
                raise _bad("a pattern repeats a group", "unsafe-pattern", pattern)
            if char == "{" and bounds is not None:
                low, _, high = bounds.groups()
                if len(low) > 3 or len(high) > 3:
                    raise _bad("a pattern repeats too often", "unsafe-pattern", pattern)
                index += bounds.end() - 1
            cost *= NAME_CHARS
            if pattern[index : index + 1] in ("?", "+"):  # lazy or possessive: the same repeat
                index += 1
        if cost > MAX_COST:
            break
    for count in alternatives:
        cost *= count
    return cost


def _class_end(pattern: str, index: int) -> int:
    """Index after the ``]`` of the class whose first inner character is at ``index``."""
    if pattern[index : index + 1] == "^":
        index += 1
    if pattern[index : index + 1] == "]":
        index += 1
    while index < len(pattern) and pattern[index] != "]":
        index += 2 if pattern[index] == "\\" else 1
    return index + 1


def _bad(why: str, code: str, key: str) -> RejectError:
    return RejectError(why, code=code, subject=key[:200])


def match_name(name: str, targets: tuple[str, ...]) -> str | None:
    """First target that selects the module ``name``: equal to it, or a dotted suffix of it."""
    for target in targets:
        if name == target or name.endswith("." + target):
            return target
    return None
