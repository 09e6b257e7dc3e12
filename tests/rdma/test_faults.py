"""What goes wrong in weight transfer elsewhere, in a serving engine that reads one-sidedly."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import rota
from rota.rdma.hosts import VerbsClient, VerbsPeer
from rota.sched.web.failures import status_of

from .fabric import MIB, Fabric, FakeDevice

ONE, TWO = "attn_mlp_r8", "rslora_r16_bf16"


class Rig:
    """A peer and an engine's arena on one fabric, and what the adapters must answer."""

    def __init__(self, kit: Any, serve: Callable[..., Any]) -> None:
        root = kit.root / "tests/data/oracle/llama"
        self.base, self.adapters = root / "base", root / "adapters"
        self.cases = json.loads((root / "ref.json").read_text())["cases"]
        self.fabric = Fabric()
        folders = {name: self.adapters / name for name in (ONE, TWO)}
        self.running = serve(folders, verbs=VerbsPeer([FakeDevice(self.fabric)]))
        self.client = VerbsClient([FakeDevice(self.fabric)], 16 * MIB)
        self.secret = kit.secret

    def engine(self, **more: Any) -> rota.Engine:
        sizes = {"max_loras": 2, "max_lora_rank": 16, "kv_bytes": 1 << 22, "use_numba": False}
        return rota.Engine(self.base, dtype="float32", **(sizes | more))

    def peer(self, name: str) -> rota.Peer:
        return rota.Peer(
            self.running.address,
            name,
            secret=self.secret,
            packed="always",
            transport=self.client,
        )

    async def answers(self, engine: rota.Engine, name: str, case: str, n: int = 6) -> bool:
        sampling = rota.SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True)
        events = engine.generate(self.cases[case]["ids"], name, sampling)
        ids = [e.token_id async for e in events if e.token_id is not None]
        return ids == self.cases[case]["greedy_f32"][:n]


@pytest.fixture
def rig(kit: Any, serve: Callable[..., Any]) -> Rig:
    return Rig(kit, serve)


pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"]),
]


@pytest.mark.parametrize("status", [4, 5, 10, 12])
async def test_an_error_completion_costs_one_promotion(rig: Rig, status: int) -> None:
    async with rig.engine() as engine:
        await engine.load("disk", rig.adapters / TWO)
        await engine.register("x", rig.peer(ONE))
        rig.fabric.status = dict.fromkeys(range(100), status)
        async with anyio.create_task_group() as tasks:
            right: list[bool] = []

            async def others() -> None:
                right.append(await rig.answers(engine, "disk", TWO, 12))

            tasks.start_soon(others)
            with pytest.raises(rota.RotaError) as caught:
                await rig.answers(engine, "x", ONE)
        assert caught.value.code == "rdma-read-failed" and status_of(caught.value) == 502
        assert right == [True]
        stats = engine.stats()
        assert [slot.state for slot in stats.slots] == ["READY", "EMPTY"]
        with anyio.fail_after(30):  # the peer's end goes when its thread hears of it
            while rig.fabric.open:
                await anyio.lowlevel.checkpoint()
        rig.fabric.status = {}
        assert (await engine.promote("x")).outcome == "done"
        assert await rig.answers(engine, "x", ONE)


async def test_what_a_completion_brought_is_whole_when_first_used(rig: Rig) -> None:
    """No image is kept, so every replace reads; the first step after it must see all of it."""
    async with rig.engine(image_cache_bytes=0) as engine:
        await engine.load("x", rig.peer(ONE))
        for _ in range(5):
            for case in (TWO, ONE):
                before = rig.fabric.posted
                assert (await engine.replace("x", rig.peer(case))).outcome == "done"
                assert rig.fabric.posted > before
                assert await rig.answers(engine, "x", case, 2)


async def test_the_first_of_many_waiters_leaves(rig: Rig) -> None:
    async with rig.engine() as engine:
        rig.fabric.stuck = True
        outcomes: list[str] = []

        async def promote(scope: anyio.CancelScope) -> None:
            with scope:
                outcomes.append((await engine.promote("x", rig.peer(ONE))).outcome)

        first = anyio.CancelScope()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(promote, first)
            with anyio.fail_after(60):
                while not rig.fabric.posted:
                    await anyio.lowlevel.checkpoint()
            for _ in range(8):
                tasks.start_soon(promote, anyio.CancelScope())
            await anyio.lowlevel.checkpoint()
            first.cancel()
            await anyio.lowlevel.checkpoint()
            rig.fabric.stuck = False
        assert outcomes == ["done"] * 8
        assert rig.running.peer.store.counters()["opens"] == 1 and engine.stats().stages == 1
        assert await rig.answers(engine, "x", ONE)
