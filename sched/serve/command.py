"""``rota serve``: an engine (or a connection to one) behind HTTP and IPC, until a signal.

Owns the order of starting and ending: engine, IPC, HTTP; then HTTP, IPC, engine. A first SIGINT or
SIGTERM lets answers under way finish for a while, a second ends at once.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import anyio.abc
import anyio.to_thread
import uvicorn
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from ...errors import CommandError, EngineClosedError
from ..face import AdapterReply, Source
from ..ipc.address import TcpAddress, parse_address
from ..ipc.client import connect
from ..ipc.server import IpcServer
from ..web.app import create_app
from ..web.tracing import open_tracer
from .options import Options, ServeConfig
from .protocol import protocol
from .sources import Sources

if TYPE_CHECKING:
    from rich.console import Console

_log = logging.getLogger("rota.sched.serve")
_GRACE_S = 10


class Opening(NamedTuple):
    """Who is told how far an engine is: ``loaded`` of each start-up adapter, ``weights`` of the
    model's tensors (begun, in all; from any thread)."""

    loaded: Callable[[str, AdapterReply], None]
    weights: Callable[[int, int], None]


def open_engine(options: Options, adapters: Mapping[str, Source], told: Opening) -> Any:
    """The engine to serve, not entered yet: our own with start-up ``adapters``, or a client of a
    process."""
    config = options.serve
    if config.connect is not None:
        return connect(config.connect, token=config.ipc_token)
    import torch

    from ..engine import Engine

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    assert config.model is not None
    return Engine(
        config.model, adapters, on_load=told.loaded, on_weights=told.weights, **options.engine
    )


@contextlib.contextmanager
def progress(what: str, adapters: int, console: Console) -> Iterator[Opening]:
    """Shows that ``what`` is being opened and how long it takes, how many of its tensors are read
    and how many of its adapters loaded: bars on a terminal, a line for each adapter anywhere."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}"),
        TimeElapsedColumn(),
    )
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        model = bar.add_task(f"opening {what}", total=None, unit="")
        task = bar.add_task("loading", total=adapters, unit="adapters", visible=adapters > 0)

        def loaded(name: str, reply: AdapterReply) -> None:
            console.print(
                f"loaded {name} into slot {reply.slot} in {reply.seconds:.2f} s", markup=False
            )
            bar.advance(task)

        def read(done: int, total: int) -> None:
            bar.update(model, completed=done, total=total, unit="tensors")

        yield Opening(loaded, read)


async def serve(
    options: Options,
    console: Console,
    *,
    engine: Callable[[Options, Mapping[str, Source], Opening], Any] = open_engine,
    ready: Callable[[], None] = lambda: None,
    task_status: anyio.abc.TaskStatus[str | None] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Everything, until a signal or cancellation. Started with the base URL, if HTTP is served.
    ``ready`` is called once the engine is open, before anything is served."""
    config = options.serve
    sources = Sources(config.peer_secret_file, config.peer_arena_bytes, config.peer_rdma_devices)
    async with AsyncExitStack() as stack:
        stack.callback(sources.close)
        # What can be refused at once is, before a model is read for it.
        address = None if config.ipc is None else parse_address(config.ipc)
        if isinstance(address, TcpAddress) and config.ipc_token is None:
            raise CommandError(
                "TCP is served with a token only", code="token-needed", subject=config.ipc
            )
        if config.http and config.tls_cert is not None:
            _check_tls(config)
        sock = stack.enter_context(listen(config)) if config.http else None
        adapters = sources.all(config.adapters)
        with progress(str(config.model or config.connect), len(adapters), console) as told:
            live = await stack.enter_async_context(engine(options, adapters, told))
        for name, source in sources.all(config.stageable).items():
            await live.register(name, source)
        ready()
        async with anyio.create_task_group() as tasks:
            if address is not None:
                # Who opens the Unix socket is this user, who may read what this process may.
                tcp = isinstance(address, TcpAddress)
                roots = options.http.directories if tcp else None
                ipc = IpcServer(live, token=config.ipc_token, roots=roots)
                where = await tasks.start(ipc.serve, address)
                console.print(f"frontends at {where}")
            await _http(options, live, sock, console, tasks, task_status)
            tasks.cancel_scope.cancel()


class _Server(uvicorn.Server):
    """Signals are ours: uvicorn would raise them again before the engine has ended."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _http(
    options: Options,
    engine: Any,
    sock: socket.socket | None,
    console: Console,
    tasks: anyio.abc.TaskGroup,
    task_status: anyio.abc.TaskStatus[str | None],
) -> None:
    config = options.serve
    if sock is None:
        task_status.started(None)
        await _until_signal(None)
        return
    tracer, flush = (None, None) if config.traces is None else open_tracer(config.traces)
    server = _Server(
        uvicorn.Config(
            create_app(engine, options.http, tracer=tracer),
            ssl_certfile=config.tls_cert,
            ssl_keyfile=config.tls_key,
            http=protocol(config.header_timeout_s, config.max_header_bytes),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=config.keep_alive_s,
            timeout_graceful_shutdown=_GRACE_S,
            limit_concurrency=config.max_connections,
        )
    )
    scheme = "http" if config.tls_cert is None else "https"
    url = f"{scheme}://{config.host}:{sock.getsockname()[1]}"
    tasks.start_soon(_until_signal, server)
    console.print(f"serving {options.http.model_name} at {url}")
    if options.http.ui:
        console.print(f"live page at {url}/ui")
    if not options.http.admin_keys:
        console.print("adapter routes are off: no admin key")
    task_status.started(url)
    await server.serve(sockets=[sock])
    if flush is not None:
        await anyio.to_thread.run_sync(flush)


def _check_tls(config: ServeConfig) -> None:
    """Raises CommandError ``bad-tls`` for files that hold no certificate with its key."""
    assert config.tls_cert is not None
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            config.tls_cert, config.tls_key
        )
    except OSError as error:  # SSLError is one
        raise CommandError(
            "the certificate and its key cannot be used",
            code="bad-tls",
            subject=error.filename or config.tls_cert,
            found=error.strerror or error,
        ) from error


def listen(config: ServeConfig) -> socket.socket:
    """The socket to serve on, bound and not listening yet.

    Raises EngineClosedError ``cannot-listen``.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    sock = socket.socket(family)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if config.share_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((config.host, config.port))
    except OSError as error:
        sock.close()
        raise EngineClosedError(
            "cannot listen",
            code="cannot-listen",
            subject=f"{config.host}:{config.port}",
            found=error.strerror,
        ) from error
    return sock


async def _until_signal(server: uvicorn.Server | None) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for number in signals:
            _log.info("%s: ending", signal.Signals(number).name)
            if server is None:
                return
            server.force_exit = server.should_exit
            server.should_exit = True
