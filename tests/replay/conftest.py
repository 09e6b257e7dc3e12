"""The project's own heads of public traces."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def traces(data_dir: Path) -> Path:
    return data_dir / "traces"
