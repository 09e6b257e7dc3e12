"""Processes killed without warning, and many connections: the other side stays whole."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

import rota
from rota.errors import EngineClosedError
from rota.sched.ipc.client import Backoff
from rota.sched.sim.engine import sim_text

pytestmark = pytest.mark.anyio
HERE = Path(__file__).parent


@asynccontextmanager
async def process(script: str, address: Any) -> AsyncIterator[anyio.abc.Process]:
    """A script that has said it is ready; killed at the end."""
    command = [sys.executable, str(HERE / script), str(address)]
    child = await anyio.open_process(command, stdout=subprocess.PIPE, stderr=None)
    try:
        assert child.stdout is not None
        assert (await child.stdout.receive()).strip() == b"ready"
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()
        await child.aclose()


def params(n: int = 8) -> rota.SamplingParams:
    return rota.SamplingParams(max_tokens=n)


async def test_a_killed_engine_ends_streams_by_name_and_a_new_one_is_found(
    tmp_path: Path,
) -> None:
    address = tmp_path / "rota.sock"
    backoff = Backoff(first_s=0.02, most_s=0.1)
    async with process("sim_process.py", address) as first:
        async with rota.connect(address, backoff=backoff) as engine:
            streams = [engine.generate([1], None, params(2000)) for _ in range(8)]
            for stream in streams:
                await stream.__anext__()
            first.send_signal(signal.SIGKILL)
            for stream in streams:
                with pytest.raises(EngineClosedError) as caught:
                    async for _ in stream:
                        pass
                assert caught.value.code == "engine-gone"
            async with process("sim_process.py", address):
                await engine.wait_connected()
                assert await engine.complete([1], None, params()) == sim_text("base", 1, 8)


async def test_a_killed_frontend_loses_its_own_streams_only(serving: Any) -> None:
    async with serving(engine={"step_s": 0.0005}) as world, world.connect() as mine:
        kept = mine.generate([1], None, params(400))
        async with process("frontend_process.py", world.address) as other:
            assert world.engine.stats().decoding >= 16
            other.send_signal(signal.SIGKILL)
            text = "".join([e.text async for e in kept])
        assert text == sim_text("base", 1, 400)
        await world.settled()
        assert world.server.connections == 1


async def test_connections_come_and_go_and_leave_nothing(serving: Any) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def cycle(world: Any, times: int) -> None:
        for i in range(times):
            async with world.connect() as engine:
                stream = engine.generate([1], None, params(50))
                if i % 2:
                    await stream.__anext__()
                else:
                    await engine.ping()
        await world.alone()
        await world.settled()

    async with serving() as world:
        await cycle(world, 20)
        gc.collect()
        before, objects = descriptors(), len(gc.get_objects())
        await cycle(world, 150)
        gc.collect()
        assert descriptors() == before
        assert len(gc.get_objects()) < objects + 1000
