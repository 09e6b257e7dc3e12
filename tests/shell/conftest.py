"""Both backends, in virtual time: an idle loop jumps to its next timer instead of waiting."""

from __future__ import annotations

from typing import Any

import pytest
import trio.testing

from rota.sched.sim.clock import VirtualLoop


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    if request.param == "asyncio":
        return "asyncio", {"loop_factory": VirtualLoop}
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}
