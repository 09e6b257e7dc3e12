"""Where an engine listens: a Unix socket's path, or a TCP host and port.

Owns the parsing, and the listening and connecting on both. Invariants: a Unix socket is readable
and writable by its owner only (0600) before it can be connected to, and a live server's socket is
never taken over.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import cast

import anyio
import anyio.abc
import msgspec

from ...errors import EngineClosedError, RequestError

_BACKLOG = 128
_MAX_UNIX = 107  # sun_path of Linux, without its NUL


class UnixAddress(msgspec.Struct, frozen=True, tag="unix"):
    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


class TcpAddress(msgspec.Struct, frozen=True, tag="tcp"):
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


Address = UnixAddress | TcpAddress


def parse_address(text: str | os.PathLike[str] | Address) -> Address:
    """``unix:PATH``, a path with a slash in it, or ``HOST:PORT`` (``[::1]:7000`` for IPv6).

    Raises:
        RequestError: ``bad-address``.
    """
    if isinstance(text, (UnixAddress, TcpAddress)):
        return text
    given = os.fspath(text)
    if given.startswith("unix:") or "/" in given:
        path = given.removeprefix("unix:")
        if not path or "\0" in path or len(os.fsencode(path)) > _MAX_UNIX:
            raise _bad(given, f"a path of 1 to {_MAX_UNIX} bytes")
        return UnixAddress(path)
    host, colon, port = given.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 65536):
        raise _bad(given, "unix:PATH or HOST:PORT")
    return TcpAddress(host.removeprefix("[").removesuffix("]"), int(port))


def _bad(given: str, expected: str) -> RequestError:
    return RequestError(
        "not an address", code="bad-address", subject=given[:200], expected=expected
    )


@asynccontextmanager
async def listen(address: Address) -> AsyncIterator[Sequence[anyio.abc.SocketListener]]:
    """Listeners for an address; a Unix socket's file is removed at the end.

    Raises:
        EngineClosedError: ``address-in-use``, or ``cannot-listen``.
    """
    try:
        if isinstance(address, TcpAddress):
            multi = await anyio.create_tcp_listener(
                local_host=address.host, local_port=address.port, backlog=_BACKLOG
            )
            listeners = cast("Sequence[anyio.abc.SocketListener]", multi.listeners)
        else:
            await _refuse_if_served(address)
            listeners = [await anyio.create_unix_listener(address.path, mode=0o600)]
    except OSError as error:
        code = "address-in-use" if error.errno == errno.EADDRINUSE else "cannot-listen"
        raise EngineClosedError(
            "cannot listen", code=code, subject=str(address), found=os.strerror(error.errno or 0)
        ) from error
    inode = _inode(address)
    try:
        yield listeners
    finally:
        with anyio.CancelScope(shield=True):
            for listener in listeners:
                await listener.aclose()
        if isinstance(address, UnixAddress) and inode is not None and _inode(address) == inode:
            _remove(address.path)


def _inode(address: Address) -> int | None:
    if isinstance(address, TcpAddress):
        return None
    try:
        found = os.stat(address.path)
    except OSError:
        return None
    return found.st_ino if stat.S_ISSOCK(found.st_mode) else None


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


def _mode(path: str) -> int | None:
    try:
        return os.lstat(path).st_mode
    except FileNotFoundError:
        return None


async def _refuse_if_served(address: UnixAddress) -> None:
    """anyio removes a socket file that is in the way; that must not be a living server's."""
    mode = _mode(address.path)
    if mode is None:
        return
    if not stat.S_ISSOCK(mode):
        raise EngineClosedError(
            "a file that is no socket is in the way", code="address-in-use", subject=address.path
        )
    try:
        stream = await anyio.connect_unix(address.path)
    except OSError:
        return
    await stream.aclose()
    raise EngineClosedError(
        "another server listens there", code="address-in-use", subject=address.path
    )


async def dial(address: Address, timeout_s: float) -> anyio.abc.SocketStream:
    """Connect.

    Raises:
        EngineClosedError: ``engine-unreachable``.
    """
    try:
        with anyio.fail_after(timeout_s):
            stream: anyio.abc.SocketStream
            if isinstance(address, UnixAddress):
                stream = await anyio.connect_unix(address.path)
            else:
                stream = await anyio.connect_tcp(address.host, address.port)
    except (OSError, TimeoutError) as error:
        raise EngineClosedError(
            "no engine answers", code="engine-unreachable", subject=str(address), found=error
        ) from error
    keep_alive(stream)
    return stream


def shut(stream: anyio.abc.ByteStream) -> None:
    """End both directions at once: whoever reads or writes sees the end.

    The way to stop a reader here: anyio's Unix streams on asyncio may complain on the event loop
    when a pending read is cancelled in the turn its bytes arrive.
    """
    raw = stream.extra(anyio.abc.SocketAttribute.raw_socket)
    with suppress(OSError):
        raw.shutdown(socket.SHUT_RDWR)


def sender_at_once(stream: anyio.abc.ByteStream) -> Callable[[bytes], int]:
    """A function that gives the kernel what it takes without waiting, and returns how many bytes
    that was: two turns of the event loop less for each write than the stream's own ``send``, which
    is still to be used for the rest, and says what is wrong if something is. It takes nothing where
    the stream has a buffer of its own (TCP on asyncio)."""
    raw = stream.extra(anyio.abc.SocketAttribute.raw_socket, None)
    if not isinstance(raw, socket.socket):
        return lambda data: 0

    def send(data: bytes) -> int:
        try:
            return raw.send(data, socket.MSG_DONTWAIT)
        except OSError:
            return 0

    return send


def keep_alive(stream: anyio.abc.SocketStream) -> None:
    """Let the kernel notice a dead machine at the other end of a TCP connection (about a minute),
    however busy either event loop is."""
    raw = stream.extra(anyio.abc.SocketAttribute.raw_socket)
    if raw.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with suppress(OSError):  # gone already: its first read will say so
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                raw.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
