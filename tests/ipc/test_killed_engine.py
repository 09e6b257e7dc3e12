"""The real engine on a checkpoint, in a process of its own: kill -9 of it, and of a frontend."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import anyio
import pytest

import rota
from rota.sched.core import Stats
from rota.sched.ipc.client import Backoff

from .asking import end_without_their_engine

pytestmark = pytest.mark.anyio
ORACLE = Path(__file__).resolve().parents[1] / "data" / "oracle" / "llama"
NAMES = ("attn_mlp_r8", "rslora_r16_bf16")
ADAPTERS = [f"{name}={ORACLE / 'adapters' / name}" for name in NAMES]
CASES = json.loads((ORACLE / "ref.json").read_text())["cases"]


@pytest.fixture
def anyio_backend() -> str:
    """The loops differ inside a process, not in what a kill of it does."""
    return "asyncio"


async def answers(engine: rota.Client) -> None:
    """Base and both adapters say what the oracle says."""
    params = rota.SamplingParams(max_tokens=12, ignore_eos=True)
    for case, name in [("base", None), *((name, name) for name in NAMES)]:
        stream = engine.generate(CASES[case]["ids"], name, params)
        got = [e.token_id async for e in stream if e.token_id is not None]
        assert got == CASES[case]["greedy_f32"], case


def busy(stats: Stats) -> int:
    return stats.waiting + stats.prefilling + stats.decoding + stats.closing


async def test_kill_nine_of_a_frontend_and_then_of_the_engine(tmp_path: Path, process: Any) -> None:
    address, model = tmp_path / "rota.sock", ORACLE / "base"
    engine = ("real_process.py", address, model, *ADAPTERS)
    backoff = Backoff(first_s=0.02, most_s=0.1)
    asked = anyio.Event()

    async def silent_peer(stream: anyio.abc.SocketStream) -> None:
        """A weight peer that takes connections and never answers: what it is asked for stages for
        as long as the engine lives."""
        asked.set()
        async with stream:
            try:
                while True:
                    await stream.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                return

    async with (
        process(*engine) as first,
        rota.connect(address, backoff=backoff) as client,
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(listener.serve, silent_peer)
        await answers(client)
        # A frontend that never stops asking, over both adapters.
        async with process("frontend_process.py", address, *NAMES) as other:
            stats = await client.refresh()
            assert busy(stats) > 0 and {s.leases > 0 for s in stats.slots if s.name} == {True}
            other.send_signal(signal.SIGKILL)
            with anyio.fail_after(10):
                while busy(stats):
                    stats = await client.refresh()
        assert [s.leases for s in stats.slots] == [0] * len(stats.slots)
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
        assert stats.submitted == stats.ended
        await answers(client)

        # The engine, while a replace stages and eight streams run, none of which is read on.
        failed: list[rota.RotaError] = []

        async def replace() -> None:
            port = listener.extra(anyio.abc.SocketAttribute.local_port)
            try:
                await client.replace(NAMES[0], rota.Peer(f"127.0.0.1:{port}", "any"))
            except rota.RotaError as error:
                failed.append(error)

        tasks.start_soon(replace)
        with anyio.fail_after(10):
            await asked.wait()
        params = rota.SamplingParams(max_tokens=500, ignore_eos=True)
        streams = [client.generate([1], NAMES[i % 2], params) for i in range(8)]
        for stream in streams:
            await stream.__anext__()
        first.send_signal(signal.SIGKILL)
        await end_without_their_engine(streams)
        async with process(*engine):
            with anyio.fail_after(10):
                await client.wait_connected()
            assert [error.code for error in failed] == ["engine-gone"]
            await answers(client)
            stats = await client.refresh()
            assert [s.leases for s in stats.slots] == [0] * len(stats.slots)
        tasks.cancel_scope.cancel()
