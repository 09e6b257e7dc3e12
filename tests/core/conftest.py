"""The world around the core, for scenario tests."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_spec = importlib.util.spec_from_file_location(
    "core_harness", Path(__file__).with_name("harness.py")
)
assert _spec is not None and _spec.loader is not None
harness = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(harness)


@pytest.fixture
def world() -> Callable[..., Any]:
    """``world(max_loras=2, ...)`` makes a World; it checks every law after every event."""
    return harness.World


@pytest.fixture
def token_of() -> Callable[[int, int], int]:
    return harness.token_of
