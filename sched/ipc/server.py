"""The engine's end: listen, accept, and serve each frontend.

Owns the listeners, the connections, and those to weight peers that frontends name. Invariants: TCP
is served with a token only; a frontend's fault ends its own connection and nothing else; when
:meth:`IpcServer.serve` ends, every connection has ended.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import anyio
import anyio.abc
import msgspec

from ...errors import CapacityError, RequestError
from ..failures import to_failure
from . import wire
from .address import Address, TcpAddress, keep_alive, listen, parse_address
from .connection import Connection
from .framing import Framing
from .limits import IpcLimits
from .verbs import Sources

_log = logging.getLogger("rota.sched.ipc")


class IpcServer:
    """Serve one engine to many frontends.

    Args:
        engine: an Engine, or anything with its interface, on this event loop.
        token: the secret frontends must show; needed on TCP.
        limits: see :class:`IpcLimits`.
        roots: directories adapters may be loaded from, by path; ``None``: any the engine can read
            (fit for a Unix socket, which only the same user can open).
        peers: weight peers (``host:port``) frontends may name; ``None``: any.
    """

    def __init__(
        self,
        engine: Any,
        *,
        token: str | None = None,
        limits: IpcLimits | None = None,
        roots: Sequence[str] | None = None,
        peers: Sequence[str] | None = None,
    ) -> None:
        self._engine = engine
        self._token = token
        self._limits = limits or IpcLimits()
        self._sources = Sources(roots, peers)
        self._schema = wire.schema_hash()
        self.connections = 0

    async def serve(
        self,
        address: str | os.PathLike[str] | Address,
        *,
        task_status: anyio.abc.TaskStatus[Address] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        """Listen until cancelled. Started with the address in use (the port, if it was 0).

        Raises:
            RequestError: ``bad-address``; ``token-needed`` for TCP without a token.
            EngineClosedError: ``address-in-use``, ``cannot-listen``.
        """
        where = parse_address(address)
        if isinstance(where, TcpAddress) and not self._token:
            raise RequestError(
                "TCP is served with a token only", code="token-needed", subject=str(where)
            )
        with closing(self._sources):
            await self._serve(where, task_status)

    async def _serve(self, where: Address, task_status: anyio.abc.TaskStatus[Address]) -> None:
        async with listen(where) as listeners:
            if isinstance(where, TcpAddress) and where.port == 0:
                port = listeners[0].extra(anyio.abc.SocketAttribute.local_port)
                where = TcpAddress(where.host, int(port))
            async with anyio.create_task_group() as tasks:
                for listener in listeners:
                    tasks.start_soon(self._accept, listener, tasks)
                _log.info("serving frontends at %s", where)
                task_status.started(where)

    async def _accept(self, listener: anyio.abc.SocketListener, tasks: anyio.abc.TaskGroup) -> None:
        while True:
            try:
                stream = await listener.accept()
            except OSError as error:  # out of descriptors, say: those served go on
                _log.error("accepting a frontend failed: %s", error)
                await anyio.sleep(0.1)  # it would fail again at once
                continue
            keep_alive(stream)
            tasks.start_soon(self.handle, stream)

    async def handle(self, stream: anyio.abc.ByteStream) -> None:
        """Serve one connection to its end; never raises for the frontend's fault."""
        if self.connections >= self._limits.max_connections:
            await self._too_many(stream)
            return
        self.connections += 1
        try:
            connection = Connection(
                self._engine,
                stream,
                schema=self._schema,
                token=self._token,
                limits=self._limits,
                sources=self._sources,
            )
            await connection.run()
        except Exception:  # a bug costs one frontend, not the engine
            _log.exception("a connection failed unexpectedly")
        finally:
            self.connections -= 1

    async def _too_many(self, stream: anyio.abc.ByteStream) -> None:
        error = CapacityError(
            "too many frontends",
            code="too-many-connections",
            expected=f"at most {self._limits.max_connections}",
            retry_after_s=1.0,
        )
        framing = Framing(self._limits.max_hello, self._limits.max_reply)
        framing.send(msgspec.msgpack.encode(wire.Refused(to_failure(error))))
        with anyio.move_on_after(1.0):
            try:
                await stream.send(framing.data_to_send())
            except (OSError, anyio.BrokenResourceError):
                pass
        await anyio.aclose_forcefully(stream)
