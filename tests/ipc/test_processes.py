"""Processes killed without warning, and many connections: the other side stays whole."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest

import rota
from rota.sched.ipc.client import Backoff
from rota.sched.sim.engine import sim_content, sim_text

from .asking import end_without_their_engine, params

pytestmark = pytest.mark.anyio


def running_tasks() -> list[Any]:
    """Every task of this event loop."""
    return anyio.get_running_tasks()


async def test_a_killed_engine_ends_streams_by_name_and_a_new_one_is_found(
    tmp_path: Path, process: Any
) -> None:
    address = tmp_path / "rota.sock"
    backoff = Backoff(first_s=0.02, most_s=0.1)
    async with process("sim_process.py", address) as first:
        async with rota.connect(address, backoff=backoff) as engine:
            streams = [engine.generate([1], None, params(2000)) for _ in range(8)]
            for stream in streams:
                await stream.__anext__()
            first.send_signal(signal.SIGKILL)
            await end_without_their_engine(streams)
            async with process("sim_process.py", address):
                await engine.wait_connected()
                assert await engine.complete([1], None, params()) == sim_text("base", 1, 8)


async def test_a_killed_frontend_loses_its_own_streams_only(serving: Any, process: Any) -> None:
    async with serving(engine={"step_s": 0.0005}) as world, world.connect() as mine:
        kept = mine.generate([1], None, params(400))
        async with process("frontend_process.py", world.address) as other:
            assert world.engine.stats().decoding >= 16
            other.send_signal(signal.SIGKILL)
            text = "".join([e.text async for e in kept])
        assert text == sim_text("base", 1, 400)
        await world.settled()
        assert world.server.connections == 1


async def test_frontends_killed_at_any_moment_under_load_cost_nobody_else(
    serving: Any, process: Any
) -> None:
    rng = random.Random(11)
    async with serving(engine={"step_s": 0.0005}) as world, AsyncExitStack() as stack:
        mine = await stack.enter_async_context(world.connect())
        await world.engine.load("a", (b"a", b"{}"))
        victims: list[anyio.abc.Process] = []

        async def begin() -> None:
            victims.append(
                await stack.enter_async_context(process("frontend_process.py", world.address))
            )

        for _ in range(4):
            await begin()
        kept = [mine.generate([1], "a", params(300)) for _ in range(4)]
        moments = sorted(rng.sample(range(1, 250), len(victims)))
        text = ["" for _ in kept]
        for count in range(301):
            if moments and count == moments[0]:
                moments.pop(0)
                victims.pop().send_signal(signal.SIGKILL)
                # Meanwhile adapters change, as they do in life.
                await world.engine.replace("a", (f"a{count}".encode(), b"{}"))
            for index, stream in enumerate(kept):
                async for event in stream:
                    text[index] += event.text
                    break
        assert text == [sim_text(sim_content(b"a", b"{}"), 1, 300)] * 4, "the version leased"
        await world.settled()
        assert world.server.connections == 1 and not moments


async def test_an_engine_killed_at_any_moment_ends_what_it_had_and_no_more(
    tmp_path: Path, process: Any
) -> None:
    rng = random.Random(12)
    address = tmp_path / "rota.sock"
    backoff = Backoff(first_s=0.02, most_s=0.1)
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(process("sim_process.py", address))
        clients = [
            await stack.enter_async_context(rota.connect(address, backoff=backoff))
            for _ in range(3)
        ]
        for _ in range(3):
            for client in clients:
                await client.wait_connected()
            streams = [c.generate([1], None, params(2000)) for c in clients for _ in range(4)]
            for _ in range(rng.randrange(1, 60)):
                await streams[rng.randrange(len(streams))].__anext__()
            first.send_signal(signal.SIGKILL)
            await end_without_their_engine(streams)
            first = await stack.enter_async_context(process("sim_process.py", address))
        for client in clients:
            await client.wait_connected()
            assert await client.complete([1], None, params()) == sim_text("base", 1, 8)


async def test_connections_come_and_go_and_leave_nothing(
    serving: Any, anyio_backend_name: str
) -> None:
    # A thousand on one event loop; the other takes the same path, a part of them will do.
    times = 1000 if anyio_backend_name == "asyncio" else 150

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

    # The log of stories is bounded; a short one has filled before anything is counted.
    async with serving(engine={"log_size": 64}) as world:
        await cycle(world, 20)
        gc.collect()
        before, objects, tasks = descriptors(), len(gc.get_objects()), len(running_tasks())
        await cycle(world, times // 2)
        gc.collect()
        # By now caches of the first connections have filled: one object kept a connection shows.
        blocks = sys.getallocatedblocks()
        await cycle(world, times // 2)
        gc.collect()
        grown = sys.getallocatedblocks() - blocks
        assert descriptors() == before
        assert len(gc.get_objects()) < objects + 1000
        assert len(running_tasks()) == tasks
        if anyio_backend_name == "asyncio":  # 75 of the other are too few to tell from warming up
            assert grown < times // 4
