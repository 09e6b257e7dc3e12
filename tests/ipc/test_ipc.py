"""A frontend and an engine over real sockets: the same answers as in process, and every end."""

from __future__ import annotations

import random
import threading
from inspect import signature
from pathlib import Path
from typing import Any

import anyio
import pytest

import rota
from rota.errors import (
    CapacityError,
    CommandError,
    EngineClosedError,
    RejectError,
    RequestError,
    WireError,
)
from rota.sched.ipc.client import Backoff, Client
from rota.sched.ipc.limits import IpcLimits

from .asking import CONFIG, A, B, params, text_of

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("tcp", [False, True])
async def test_the_same_interface_and_the_same_answers(serving: Any, tcp: bool) -> None:
    secret = {"token": "secret"} if tcp else {}
    async with serving(tcp=tcp, **secret) as world, world.connect(**secret) as engine:
        reply = await engine.load("a", (A, CONFIG))
        assert (reply.outcome, reply.name, reply.slot) == ("done", "a", 0)
        assert engine.stats() == world.engine.stats(), "an answer brings a snapshot"
        for adapter, tensors in (("a", A), (None, None), (rota.DEFAULT, None)):
            got = [e async for e in engine.generate([1, 2, 3], adapter, params())]
            here = [e async for e in world.engine.generate([1, 2, 3], adapter, params())]
            assert got == here
            assert "".join(e.text for e in got) == text_of(tensors, 3, 8)
        assert await engine.complete("four", "a", params()) == text_of(A, 4, 8)
        assert engine.info.vocab_size == world.engine.info.vocab_size
        messages = [{"role": "user", "content": "hi"}]
        assert await engine.chat_prompt(messages) == world.engine.chat_prompt(messages)
        assert await engine.encode("hi") == [104, 105]
        assert await engine.pieces([104, 105]) == [b"h", b"i"]
        assert await engine.story("adapter a") == world.engine.story("adapter a")
        await engine.ping()


def test_a_client_has_every_method_of_an_engine_with_the_same_arguments() -> None:
    """What differs on purpose is in docs/ipc.md: a tokenizer stays with its engine."""

    def public(kind: type) -> dict[str, Any]:
        return {n: getattr(kind, n) for n in vars(kind) if n[0] != "_"}

    def arguments(method: Any) -> list[Any]:
        return [(p.name, p.kind, p.default) for p in signature(method).parameters.values()]

    here, there = public(rota.Engine), public(Client)
    assert here.keys() - there.keys() == {"tokenizer"}
    for name, method in here.items():
        if callable(method):
            assert arguments(method) == arguments(there[name]), name


async def test_a_client_is_closed_by_any_task_and_as_often_as_it_likes(serving: Any) -> None:
    async with serving(engine={"step_s": 0.001}) as world:
        async with world.connect() as engine:
            stream = engine.generate([1], None, params(2000))
            await stream.__anext__()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(engine.aclose)
                with pytest.raises(EngineClosedError) as ended:
                    async for _ in stream:
                        pass
            await engine.aclose()
            assert not engine.connected
            for call in (engine.ping, engine.refresh, engine.wait_connected):
                with pytest.raises(EngineClosedError) as refused:
                    await call()
                assert refused.value.code == ended.value.code == "client-closed"
            await world.alone()
            await world.settled()
        async with engine:
            assert await engine.complete([1], None, params()) == text_of(None, 1, 8), "and again"


def test_a_client_may_be_made_before_there_is_a_loop() -> None:
    client = rota.connect("unix:/nowhere.sock")

    async def run() -> None:
        with pytest.raises(EngineClosedError) as caught:
            async with client:
                pass
        assert caught.value.code == "engine-unreachable"
        await client.aclose()

    anyio.run(run)


async def test_every_command_does_there_what_it_does_here(serving: Any, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes(CONFIG)
    (folder / "adapter_model.safetensors").write_bytes(B)
    async with serving() as world, world.connect() as engine:
        assert (await engine.register("r", folder)).outcome == "registered"
        assert (await engine.promote("r")).slot == 0
        assert (await engine.load("a", (A, CONFIG), pin=True)).slot == 1
        assert world.engine.stats().slots[1].pinned
        await engine.unpin("a")
        await engine.pin("r")
        assert [s.pinned for s in engine.stats().slots] == [True, False, False, False]
        assert (await engine.replace("a", str(folder))).generation == 2
        assert await engine.complete([1], "a", params()) == text_of(B, 1, 8)
        assert (await engine.swap("a", (A, CONFIG), 3)).slot == 3
        assert (await engine.prefetch("p", (B, CONFIG))).outcome == "prefetched"
        assert (await engine.rotate("a")).name == "a"
        assert await engine.complete([1], sampling=params()) == text_of(A, 1, 8)
        await engine.rotate(None)
        assert (await engine.unload("a")).outcome == "unloaded"
        assert {x.name for x in (await engine.refresh()).adapters} == {"r", "p"}


async def test_errors_keep_their_class_code_and_fields(serving: Any) -> None:
    async with serving(engine={"max_waiting": 1}) as world, world.connect() as engine:
        with pytest.raises(RequestError) as unknown:
            await engine.complete([1], "nobody", params())
        assert (unknown.value.code, unknown.value.subject) == ("unknown-adapter", "nobody")
        with pytest.raises(CommandError) as command:
            await engine.unload("nobody")
        assert command.value.code == "unknown-adapter"
        with pytest.raises(RejectError) as refused:
            await engine.load("x", (A, b"refuse"))
        assert refused.value.code == "sim-refused"
        with pytest.raises(CommandError) as nowhere:
            await engine.load("x", "/nowhere/at/all")
        assert nowhere.value.code == "no-such-directory"
        with pytest.raises(RequestError) as source:
            await engine.load("x", object())
        assert source.value.code == "bad-source"
        with pytest.raises(RequestError) as chat:
            await engine.chat_prompt([{"role": 3}])
        assert chat.value.code == "bad-messages"


async def test_leaving_the_loop_cancels_on_the_engine(serving: Any) -> None:
    async with serving(engine={"step_s": 0.001}) as world, world.connect() as engine:
        async for event in engine.generate([1], None, params(1000)):
            if event.index == 2:
                break
        del event
        await world.settled()
        generation = engine.generate([1], None, params(1000))
        await generation.__anext__()
        generation.cancel()
        rest = [e async for e in generation]
        assert rest[-1].finish_reason == "cancelled"
        with anyio.move_on_after(0.05):
            async for _ in engine.generate([1], None, params(1000)):
                pass
        await world.settled()


async def test_a_client_that_goes_away_has_its_requests_cancelled(serving: Any) -> None:
    async with serving(engine={"step_s": 0.001}) as world:
        async with world.connect() as engine:
            streams = [engine.generate([1], None, params(2000)) for _ in range(8)]
            for stream in streams:
                await stream.__anext__()
        with pytest.raises(EngineClosedError) as caught:
            async for _ in streams[0]:
                pass
        assert caught.value.code == "client-closed"
        await world.alone()
        await world.settled()
        with pytest.raises(EngineClosedError):
            engine.generate([1])


async def test_a_slow_reader_holds_at_most_its_window_and_slows_nobody(serving: Any) -> None:
    async with serving() as world, world.connect(window=8) as engine:
        slow = engine.generate([1], None, params(500))
        first = await slow.__anext__()
        quick = await engine.complete([1, 2], None, params(500))
        assert quick == text_of(None, 2, 500)
        await world.settled()
        await engine.ping()
        assert slow.buffered <= 8
        text = first.text + "".join([e.text async for e in slow])
        assert text == text_of(None, 1, 500), "the engine kept the rest"


async def test_many_streams_over_many_frontends(serving: Any) -> None:
    async with serving() as world:
        await world.engine.load("a", (A, CONFIG))
        got: dict[tuple[int, int], str] = {}

        async def one(engine: Client, key: tuple[int, int], adapter: str | None) -> None:
            got[key] = await engine.complete([1] * (1 + key[1]), adapter, params(40))

        async def frontend(number: int) -> None:
            async with world.connect() as engine, anyio.create_task_group() as tasks:
                for i in range(16):
                    tasks.start_soon(one, engine, (number, i), "a" if i % 2 else None)

        async with anyio.create_task_group() as tasks:
            for number in range(4):
                tasks.start_soon(frontend, number)
        assert len(got) == 64
        for (_, i), text in got.items():
            assert text == text_of(A if i % 2 else None, 1 + i, 40)


async def test_engine_gone_ends_everything_by_name_and_the_client_comes_back(
    serving: Any, tmp_path: Path
) -> None:
    async def live(stop: anyio.Event, task_status: Any) -> None:
        async with serving(engine={"step_s": 0.001}):
            task_status.started()
            await stop.wait()

    first, second = anyio.Event(), anyio.Event()
    async with anyio.create_task_group() as tasks:
        await tasks.start(live, first)
        backoff = Backoff(first_s=0.01, most_s=0.05)
        async with rota.connect(tmp_path / "rota.sock", backoff=backoff) as client:
            stream = client.generate([1], None, params(2000))
            await stream.__anext__()
            first.set()
            with pytest.raises(EngineClosedError) as caught:
                async for _ in stream:
                    pass
            assert caught.value.code in ("engine-gone", "engine-closed")
            while client.connected:
                await anyio.lowlevel.checkpoint()
            with pytest.raises(EngineClosedError) as down:
                client.generate([1])
            assert down.value.code == "engine-gone" and down.value.retry_after_s is not None
            with pytest.raises(EngineClosedError):
                await client.load("a", (A, CONFIG))
            await tasks.start(live, second)
            await client.wait_connected()
            assert await client.complete([1], None, params()) == text_of(None, 1, 8)
        second.set()


async def test_wrong_tokens_and_too_many_frontends_are_named(serving: Any) -> None:
    async with serving(tcp=True, token="right", limits=IpcLimits(max_connections=1)) as world:
        for token in (None, "wrong"):
            with pytest.raises(WireError) as caught:
                async with world.connect(token=token):
                    pass
            assert caught.value.code == "unauthorized"
            await world.alone()
        async with world.connect(token="right"):
            with pytest.raises(CapacityError) as full:
                async with world.connect(token="right"):
                    pass
            assert full.value.code == "too-many-connections"


async def test_garbage_ends_its_own_connection_only(serving: Any) -> None:
    async with serving() as world, world.connect() as engine:
        stream = engine.generate([1], None, params(100))
        for garbage in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x00" * 64,
            b"\xff" * 64,
            b"\x05\x00\x00\x00ab",
        ):
            async with await anyio.connect_unix(world.address.path) as raw:
                await raw.send(garbage)
                await raw.send_eof()
                with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                    while True:
                        await raw.receive()
        assert "".join([e.text async for e in stream]) == text_of(None, 1, 100)


async def test_a_silent_stranger_is_dropped(serving: Any) -> None:
    async with serving(limits=IpcLimits(hello_timeout_s=0.05)) as world:
        async with await anyio.connect_unix(world.address.path) as raw:
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await raw.receive()


async def test_limits_of_one_connection_are_named(serving: Any) -> None:
    limits = IpcLimits(max_requests=2, max_frame=2000)
    async with serving(engine={"step_s": 0.001}, limits=limits) as world:
        async with world.connect(limits=limits) as engine:
            held = [engine.generate([1], None, params(500)) for _ in range(2)]
            with pytest.raises(CapacityError) as full:
                await engine.complete([1], None, params())
            assert full.value.code == "QUEUE_FULL"
            with pytest.raises(WireError) as large:
                engine.generate("x" * 3000, None, params())
            assert large.value.code == "frame-too-large"
            for stream in held:
                stream.cancel()


async def test_a_cancelled_call_is_forgotten_and_its_work_goes_on(serving: Any) -> None:
    gate = threading.Event()
    async with serving(engine={"gate": gate}) as world, world.connect() as engine:
        with anyio.move_on_after(0.05) as scope:
            await engine.load("a", (A, CONFIG))
        assert scope.cancelled_caught
        gate.set()
        await world.settled()
        assert (await engine.refresh()).adapters[0].level == "device"


def test_back_off_grows_to_its_limit() -> None:
    backoff, rng = Backoff(first_s=0.1, most_s=1.0), random.Random(0)
    delays = [backoff.delay(i, rng) for i in range(100)]
    assert all(0.05 <= d <= 1.0 for d in delays) and max(delays) > 0.5 and delays[0] <= 0.1
