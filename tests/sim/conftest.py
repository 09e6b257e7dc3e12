"""Simulator tests: both backends in virtual time; log lines of injected faults are kept quiet."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio.testing

from rota.sched.sim.clock import VirtualLoop

_spec = importlib.util.spec_from_file_location(
    "sim_serving", Path(__file__).with_name("serving.py")
)
assert _spec is not None and _spec.loader is not None
_serving = importlib.util.module_from_spec(_spec)
sys.modules["sim_serving"] = _serving
_spec.loader.exec_module(_serving)


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
