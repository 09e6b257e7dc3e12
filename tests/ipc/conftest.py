"""A simulated engine behind an IPC server, on both event loops."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from rota.sched.ipc.client import Client, connect
from rota.sched.ipc.server import IpcServer
from rota.sched.sim.engine import SimEngine


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class World:
    """An engine, its server and where it listens."""

    def __init__(self, engine: SimEngine, server: IpcServer, address: Any) -> None:
        self.engine = engine
        self.server = server
        self.address = address

    def connect(self, **options: Any) -> Client:
        return connect(self.address, **options)

    async def settled(self) -> None:
        """Wait until the engine has nothing left to do."""
        with anyio.fail_after(20):
            while not self.engine.core.idle():
                await anyio.lowlevel.checkpoint()

    async def alone(self) -> None:
        """Wait until the last frontend's connection has ended."""
        with anyio.fail_after(20):
            while self.server.connections:
                await anyio.lowlevel.checkpoint()


Serving = Callable[..., AbstractAsyncContextManager[World]]


@asynccontextmanager
async def _process(script: str, *words: object) -> AsyncIterator[anyio.abc.Process]:
    command = [sys.executable, str(Path(__file__).parent / script), *map(str, words)]
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


@pytest.fixture
def process() -> Callable[..., AbstractAsyncContextManager[anyio.abc.Process]]:
    """A script of this folder, run with these arguments, that has said it is ready; killed at the
    end."""
    return _process


@pytest.fixture
def serving(tmp_path: Path) -> Serving:
    @asynccontextmanager
    async def run(
        *, tcp: bool = False, engine: dict[str, Any] | None = None, **server: Any
    ) -> AsyncIterator[World]:
        address = "127.0.0.1:0" if tcp else str(tmp_path / "rota.sock")
        async with SimEngine(**engine or {}) as sim:
            ipc = IpcServer(sim, **server)
            async with anyio.create_task_group() as tasks:
                where = await tasks.start(partial(ipc.serve, address))
                try:
                    yield World(sim, ipc, where)
                finally:
                    tasks.cancel_scope.cancel()

    return run
