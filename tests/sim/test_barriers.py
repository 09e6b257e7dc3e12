"""Which jobs may pass a step in flight: those that touch nothing it reads or writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from rota.sched.core import events as ev
from rota.sched.worker import Beside

from .serving import serving

pytestmark = pytest.mark.anyio

PASS = {"open_sequence", "close_sequence", "drop_state"}
WAIT = {"commit", "retire", "spill", "restore", "relayout"}


async def test_whatever_changes_weights_blocks_or_the_pool_waits_for_the_steps_in_flight() -> None:
    tight = {"num_blocks": 9, "watermark_blocks": 0, "spill_blocks": 16, "spill_fixed_cost": 0.0}
    passing: dict[str, set[bool]] = {}
    async with serving(**tight) as s:
        put = s.thread.put

        def seen(job: Any, done: Callable[..., None]) -> None:
            passing.setdefault(job.func.__name__, set()).add(isinstance(job, Beside))
            put(job, done)

        s.thread.put = seen
        await s.load("a", "A")
        await s.load("b", "B")
        async with anyio.create_task_group() as tasks:
            for name in ("a", "b", None):
                tasks.start_soon(s.collect, name, 60)
        assert s.core.stats().spilled >= 1
        await s.replace("a", "C")
        await s.unload("b")
        await s.shell.command(lambda i: ev.Resize(i, 2, 64, anyio.current_time() + 60))
    assert passing.keys() - PASS == WAIT | {"step"}
    assert all(kinds == {name in PASS} for name, kinds in passing.items()), passing
