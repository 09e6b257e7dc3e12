"""A piece of the long fuzz run, and every seed that once found something."""

from __future__ import annotations

import pytest

from . import fuzz

#: Seeds with a finding in the past.
KEPT: tuple[int, ...] = ()


@pytest.mark.parametrize("start", range(0, 3000, 500))
def test_damaged_conversations(start: int) -> None:
    for seed in range(start, start + 500):
        fuzz.one(seed)


def test_seeds_kept() -> None:
    for seed in KEPT:
        fuzz.one(seed)
