"""The world around the core, for scenario tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from . import harness


@pytest.fixture
def world() -> Callable[..., Any]:
    """``world(max_loras=2, ...)`` makes a World; it checks every law after every event."""
    return harness.World


@pytest.fixture
def token_of() -> Callable[[int, int], int]:
    return harness.token_of
