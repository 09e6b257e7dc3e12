"""A simulated engine behind the HTTP face: in process or over IPC, by ASGI or a real socket."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
import uvicorn

from rota.sched.ipc.client import connect
from rota.sched.ipc.server import IpcServer
from rota.sched.sim.engine import SimEngine
from rota.sched.web.app import create_app
from rota.sched.web.settings import HttpSettings

ADMIN = "admin-key-for-tests"
NOW = 1_700_000_000.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Face:
    """A served engine, and clients of it."""

    def __init__(self, engine: SimEngine, app: Any, base_url: str, http: httpx2.AsyncClient):
        self.engine = engine
        self.app = app
        self.base_url = base_url
        self.http = http

    async def post(self, path: str, body: Any, key: str | None = None) -> httpx2.Response:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return await self.http.post(path, json=body, headers=headers)

    async def settled(self) -> None:
        with anyio.fail_after(20):
            while not self.engine.core.idle():
                await anyio.lowlevel.checkpoint()


Serving = Callable[..., AbstractAsyncContextManager[Face]]


@asynccontextmanager
async def _uvicorn(app: Any) -> AsyncIterator[str]:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_config=None, lifespan="on", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    # Put in its place by the test.
    server.capture_signals = _no_signals  # type: ignore[method-assign]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(server.serve, sockets=[sock]))
        while not server.started:
            await anyio.lowlevel.checkpoint()
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
    sock.close()


def _no_signals() -> Any:
    return nullcontext()


@pytest.fixture
def serving(tmp_path: Path) -> Serving:
    @asynccontextmanager
    async def run(
        *,
        socket: bool = False,
        ipc: bool = False,
        engine: dict[str, Any] | None = None,
        **settings: Any,
    ) -> AsyncIterator[Face]:
        settings.setdefault("admin_keys", (ADMIN,))
        settings.setdefault("directories", (str(tmp_path),))
        async with AsyncExitStack() as stack:
            sim = await stack.enter_async_context(SimEngine(**engine or {}))
            served: Any = sim
            if ipc:
                tasks = await stack.enter_async_context(anyio.create_task_group())
                stack.callback(tasks.cancel_scope.cancel)
                where = await tasks.start(IpcServer(sim).serve, str(tmp_path / "ipc.sock"))
                served = await stack.enter_async_context(connect(where))
            app = create_app(served, HttpSettings(**settings), clock=lambda: NOW)
            transport = None
            base_url = "http://rota"
            if socket:
                base_url = await stack.enter_async_context(_uvicorn(app))
            else:
                transport = httpx2.ASGITransport(app=app)
            http = await stack.enter_async_context(
                httpx2.AsyncClient(transport=transport, base_url=base_url, timeout=20.0)
            )
            yield Face(sim, app, base_url, http)

    return run


@pytest.fixture
def adapter(tmp_path: Path) -> Callable[..., str]:
    """A directory that the simulated engine takes for an adapter."""

    def make(name: str, tensors: bytes, config: bytes = b"{}") -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "adapter_config.json").write_bytes(config)
        (folder / "adapter_model.safetensors").write_bytes(tensors)
        return str(folder)

    return make
