"""A frontend that asks and does not read: what the engine's end holds for it stays bounded."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import msgspec
import pytest

import rota
from rota.sched.ipc import wire
from rota.sched.ipc.limits import IpcLimits
from rota.sched.ipc.server import IpcServer
from rota.sched.sim.engine import SimEngine

pytestmark = pytest.mark.anyio
CHUNKS, EACH = 100, 200
LIMITS = IpcLimits(high_water=4096, max_requests=1, max_calls=1, send_timeout_s=1000.0)


def frame(message: Any) -> bytes:
    payload = msgspec.msgpack.encode(message)
    return struct.pack("<I", len(payload)) + payload


def messages(data: bytes) -> Iterator[Any]:
    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(wire.ToClient)
    while data:
        (size,) = struct.unpack_from("<I", data)
        yield decoder.decode(data[4 : 4 + size])
        data = data[4 + size :]


class Deaf(anyio.abc.ByteStream):
    """A frontend's end: it sends ``chunks``, and takes nothing until ``listens`` is set."""

    def __init__(self, chunks: list[bytes]) -> None:
        self.chunks = chunks
        self.taken = 0
        self.heard = b""
        self.listens = anyio.Event()
        self.over = anyio.Event()

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        return {anyio.abc.SocketAttribute.raw_socket: lambda: self}

    def shutdown(self, how: int) -> None:
        self.over.set()
        self.listens.set()

    async def receive(self, max_bytes: int = 65536) -> bytes:
        await anyio.lowlevel.checkpoint()
        if self.over.is_set():
            raise anyio.EndOfStream
        if self.taken < len(self.chunks):
            self.taken += 1
            return self.chunks[self.taken - 1]
        await self.over.wait()
        raise anyio.EndOfStream

    async def send(self, item: bytes) -> None:
        await self.listens.wait()
        if self.over.is_set():
            raise anyio.BrokenResourceError
        self.heard += item

    async def send_eof(self) -> None:
        raise AssertionError("the engine's end never half-closes")

    async def aclose(self) -> None:
        self.over.set()


def ping(number: int) -> Any:
    return wire.Ping(number)


def request_too_many(number: int) -> Any:
    sampling = rota.SamplingParams(max_tokens=1 << 20, ignore_eos=True)
    return wire.Generate(number, (1,), None, False, sampling, 0, None, 0)


def call_too_many(number: int) -> Any:
    return wire.Call(number, wire.GetStory(f"seq {number}"))


async def quiet(stream: Deaf) -> None:
    """Wait until the engine's end has stopped to read."""
    with anyio.fail_after(30):
        seen, turns = -1, 0
        while turns < 50:
            turns = turns + 1 if stream.taken == seen else 0
            seen = stream.taken
            await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("ask", [ping, request_too_many, call_too_many])
async def test_whoever_does_not_read_is_not_read_either(ask: Callable[[int], Any]) -> None:
    numbers = iter(range(CHUNKS * EACH))
    chunks = [b"".join(frame(ask(next(numbers))) for _ in range(EACH)) for _ in range(CHUNKS)]
    hello = wire.Hello(wire.MAGIC, wire.VERSION, wire.schema_hash())
    stream = Deaf([frame(hello), *chunks])
    async with SimEngine() as engine, anyio.create_task_group() as tasks:
        server = IpcServer(engine, limits=LIMITS)
        tasks.start_soon(server.handle, stream)
        await quiet(stream)
        assert stream.heard == b"" and stream.taken < 10
        stream.listens.set()
        await quiet(stream)
        assert stream.taken == 1 + CHUNKS, "all is read once it listens"
        answers = list(messages(stream.heard))
        # The one request that was taken has no credit, and says nothing.
        assert len(answers) - 1 == CHUNKS * EACH - (ask is request_too_many)
        stream.shutdown(0)


@pytest.mark.parametrize("how", ["the server ends", "it is cut off"])
async def test_the_end_does_not_wait_for_it(how: str) -> None:
    hello = wire.Hello(wire.MAGIC, wire.VERSION, wire.schema_hash())
    pings = b"".join(frame(ping(number)) for number in range(10 * EACH))
    stream = Deaf([frame(hello), *[pings] * 10])
    limits = LIMITS if how == "the server ends" else IpcLimits(high_water=4096, send_timeout_s=0.01)
    async with SimEngine() as engine:
        server = IpcServer(engine, limits=limits)
        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(server.handle, stream)
                await quiet(stream)
                assert stream.taken < 10
                if how == "the server ends":
                    tasks.cancel_scope.cancel()
        assert server.connections == 0 and stream.over.is_set()
