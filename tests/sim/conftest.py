"""``--sim-seeds N``: how many seeds the simulator lane runs (the longer lane is by argument).

``--record-golden``: write the golden traces anew instead of comparing them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Simulated faults are expected; their log lines are not news."""
    logger = logging.getLogger("rota")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)
