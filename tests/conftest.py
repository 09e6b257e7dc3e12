"""Shared test setup: keep the repository root off ``sys.path`` so that ``sched`` stays the standard library's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != ROOT]


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder with the project's own oracle data."""
    return ROOT / "tests" / "data"
