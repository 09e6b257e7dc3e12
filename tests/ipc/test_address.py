"""Addresses, listening and dialling, and writing to a socket without waiting."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import pytest

import rota
from rota.errors import EngineClosedError, RequestError
from rota.sched.ipc.address import TcpAddress, UnixAddress, parse_address, sender_at_once

pytestmark = pytest.mark.anyio


async def test_tcp_needs_a_token_and_sockets_are_private(serving: Any, tmp_path: Path) -> None:
    async with serving() as world:
        with pytest.raises(RequestError) as caught:
            await world.server.serve("127.0.0.1:0")
        assert caught.value.code == "token-needed"
        mode = os.stat(world.address.path).st_mode
        assert stat.S_IMODE(mode) == 0o600
        with pytest.raises(EngineClosedError) as used:
            await world.server.serve(world.address)
        assert used.value.code == "address-in-use"
        async with world.connect() as engine:
            await engine.ping()
    assert not await anyio.Path(world.address.path).exists()
    (tmp_path / "rota.sock").write_text("a file")
    with pytest.raises(EngineClosedError) as file:
        await world.server.serve(world.address)
    assert file.value.code == "address-in-use"


async def test_no_engine_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineClosedError) as caught:
        async with rota.connect(tmp_path / "nobody.sock"):
            pass
    assert caught.value.code == "engine-unreachable"


@pytest.mark.parametrize("tcp", [False, True])
async def test_what_is_sent_at_once_comes_in_order_with_what_has_to_wait(
    tmp_path: Path, anyio_backend: str, tcp: bool
) -> None:
    data, got = os.urandom(3 << 20), bytearray()
    taken: list[int] = []

    async def serve(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            at_once, rest = sender_at_once(stream), data
            while rest:
                sent = at_once(rest)
                taken.append(sent)
                chunk, rest = rest[sent : sent + 5000], rest[sent + 5000 :]
                await stream.send(chunk)
            await anyio.aclose_forcefully(stream)
            assert at_once(b"x") == 0, "closed"

    if tcp:
        listener: Any = await anyio.create_tcp_listener(local_host="127.0.0.1")
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
    else:
        listener = await anyio.create_unix_listener(tmp_path / "s")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        client: anyio.abc.SocketStream
        client = await (
            anyio.connect_tcp("127.0.0.1", port) if tcp else anyio.connect_unix(tmp_path / "s")
        )
        async with client:
            async for part in client:
                got += part
        tasks.cancel_scope.cancel()
    assert got == data
    assert any(taken) == (not tcp or anyio_backend == "trio")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:/run/rota.sock", UnixAddress("/run/rota.sock")),
        ("./rota.sock", UnixAddress("./rota.sock")),
        ("localhost:7000", TcpAddress("localhost", 7000)),
        ("[::1]:7000", TcpAddress("::1", 7000)),
    ],
)
def test_addresses(text: str, address: Any) -> None:
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:x", "host:70000", "unix:"])
def test_bad_addresses(text: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_address(text)
    assert caught.value.code == "bad-address"
