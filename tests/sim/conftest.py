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

for _name in ("serving", "broken"):
    _spec = importlib.util.spec_from_file_location(
        f"sim_{_name}", Path(__file__).with_name(f"{_name}.py")
    )
    assert _spec is not None and _spec.loader is not None
    _module = importlib.util.module_from_spec(_spec)
    sys.modules[f"sim_{_name}"] = _module
    _spec.loader.exec_module(_module)


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
