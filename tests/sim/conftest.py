"""Simulator tests: both backends in virtual time; log lines of injected faults are kept quiet."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import trio.testing

from rota.sched.sim.clock import VirtualLoop


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    if request.param == "asyncio":
        return "asyncio", {"loop_factory": VirtualLoop}
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("rota")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)
