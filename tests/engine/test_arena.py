"""Expert adapters through a small arena, on the host's runner and on the accelerator's (with torch
on the CPU): they rotate, and answer as PEFT does."""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import pytest

import rota
from rota.errors import CommandError, RejectError
from rota.gpu.host import HostDevice
from rota.gpu.model.torch_runner import TorchRunner
from rota.sched import lifecycle

from .conftest import load_oracle

pytestmark = pytest.mark.anyio

CASES = ("experts", "experts_down_only", "experts_router_attn", "router")
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_loras": 4,
    "max_lora_rank": 16,
    "max_expert_rank": 8,
    "expert_adapters": True,
    "max_running": 8,
    "kv_bytes": 1 << 20,
    "drain_after_s": 0.05,
}


@pytest.fixture(params=["host", "torch"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who serves. The accelerator's runner, over a host device, copies its images."""
    if request.param == "torch":

        def load(config: Any, model_dir: Any, told: Any) -> TorchRunner:
            options = lifecycle._options(config)
            return TorchRunner.load(model_dir, HostDevice(allow_foreign=True), options)

        monkeypatch.setattr(lifecycle, "_load_runner", load)
    return str(request.param)


async def answer(engine: rota.Engine, prompt: list[int], adapter: str | None) -> list[int]:
    sampling = rota.SamplingParams(max_tokens=12, ignore_eos=True)
    events = [event async for event in engine.generate(prompt, adapter, sampling)]
    return [event.token_id for event in events if event.token_id is not None]


async def largest(oracle: Any) -> dict[str, int]:
    """Bytes of each case's annex."""
    async with rota.Engine(oracle.model, device="cpu", **OPTIONS) as engine:
        found = {}
        for case in CASES:
            report = (await engine.load(case, oracle.adapter(case))).report
            assert report is not None
            found[case] = report.annex_bytes
        assert engine.stats().arena.used == sum(found.values())
        return found


async def test_more_experts_than_the_arena_holds_take_turns_in_it(device: str) -> None:
    oracle = load_oracle("qwen35_moe")
    sizes = await largest(oracle)
    assert sizes["router"] == 0 < sizes["experts_down_only"] < sizes["experts"]
    arena = max(sizes.values()) + 256
    assert arena < sizes["experts"] + sizes["experts_down_only"]
    async with rota.Engine(
        oracle.model, device="cpu", adapter_arena_bytes=arena + 100, **OPTIONS
    ) as engine:
        assert engine.stats().arena.total == arena
        for case in CASES:
            await engine.register(case, oracle.adapter(case))
        # One after the other: who is idle makes room.
        for case in (*CASES, *CASES[:2]):
            assert await answer(engine, oracle.prompt(case), case) == oracle.greedy(case)
        assert engine.stats().evicted >= 4
        # All at once, twice over: they wait for each other, and drain each other.
        got: dict[tuple[str, int], list[int]] = {}

        async def ask(case: str, turn: int) -> None:
            got[case, turn] = await answer(engine, oracle.prompt(case), case)

        async with anyio.create_task_group() as tasks:
            for turn in range(2):
                for case in CASES:
                    tasks.start_soon(ask, case, turn)
        assert all(tokens == oracle.greedy(case) for (case, _), tokens in got.items())
        assert len(got) == 8
        stats = engine.stats()
        assert stats.arena.used == sum(slot.annex for slot in stats.slots) <= arena
        # A new version under a running request, with no room beside the old one.
        sampling = rota.SamplingParams(max_tokens=12, ignore_eos=True)
        running = engine.generate(oracle.prompt("experts"), "experts", sampling)
        tokens = [(await anext(running)).token_id]
        async with anyio.create_task_group() as tasks:
            new = oracle.adapter("experts_down_only")
            tasks.start_soon(partial(engine.replace, "experts", new))
            tokens += [event.token_id async for event in running if event.token_id is not None]
        assert tokens == oracle.greedy("experts")
        down = oracle.prompt("experts_down_only")
        assert await answer(engine, down, "experts") == oracle.greedy("experts_down_only")


async def test_one_larger_than_the_arena_is_refused_with_its_bytes(device: str) -> None:
    oracle = load_oracle("qwen35_moe")
    async with rota.Engine(
        oracle.model, device="cpu", adapter_arena_bytes=512, **OPTIONS
    ) as engine:
        await engine.load("router", oracle.adapter("router"))
        with pytest.raises(RejectError) as caught:
            await engine.load("big", oracle.adapter("experts"))
        assert caught.value.code == "annex-exceeds-arena"
        need = (await largest(oracle))["experts"]
        assert caught.value.expected == f"an adapter_arena_bytes of at least {need}"
        assert caught.value.found == "512 bytes"
        prompt = oracle.prompt("router")
        assert await answer(engine, prompt, "router") == oracle.greedy("router")


async def test_a_resize_makes_the_arena_anew_and_residents_come_back(device: str) -> None:
    oracle = load_oracle("qwen35_moe")
    async with rota.Engine(oracle.model, device="cpu", **OPTIONS) as engine:
        await engine.load("experts", oracle.adapter("experts"))
        before = engine.stats().arena
        await engine.resize(max_loras=2)
        after = engine.stats().arena
        # Without a size of its own it has room for the largest in every slot.
        assert after.total == before.total // 2 and after.used == before.used > 0
        got = await answer(engine, oracle.prompt("experts"), "experts")
        assert got == oracle.greedy("experts")


async def test_a_pinned_adapter_is_not_lost_by_a_larger_rank(device: str) -> None:
    oracle = load_oracle("qwen35_moe")
    options = OPTIONS | {"max_lora_rank": 8, "max_expert_rank": 0}
    async with rota.Engine(oracle.model, device="cpu", **options) as engine:
        report = (await engine.load("experts", oracle.adapter("experts"))).report
        assert report is not None
        size = report.annex_bytes
        await engine.resize(max_lora_rank=16)
        need = engine.stats().arena.used
        assert need > size
    prompt, right = oracle.prompt("experts"), oracle.greedy("experts")
    for pin in (True, False):
        async with rota.Engine(
            oracle.model, device="cpu", adapter_arena_bytes=size + 1024, **options
        ) as engine:
            await engine.load("experts", oracle.adapter("experts"), pin=pin)
            before = engine.stats()
            with pytest.raises(CommandError) as refused:
                await engine.resize(max_lora_rank=16)
            assert refused.value.code == "resident-annex-too-large"
            assert refused.value.subject == "experts"
            assert refused.value.expected == f"an arena of at least {need} bytes"
            assert refused.value.found == f"{before.arena.total} bytes"
            after = engine.stats()
            assert (after.slots, after.arena) == (before.slots, before.arena)
            assert engine.info.max_lora_rank == 8
            assert await answer(engine, prompt, "experts") == right
            await engine.resize(max_loras=2)  # annexes of one size
            assert await answer(engine, prompt, "experts") == right
    async with rota.Engine(
        oracle.model, device="cpu", adapter_arena_bytes=2 * size + 1024, **options
    ) as engine:
        for name in ("one", "two"):
            await engine.load(name, oracle.adapter("experts"), pin=True)
        with pytest.raises(CommandError) as refused:
            await engine.resize(max_lora_rank=16)
        assert refused.value.code == "pinned-annexes-do-not-fit"
        assert refused.value.expected == f"an arena of at least {2 * need} bytes"
        await engine.unpin("two")
        await engine.resize(max_lora_rank=16)
        kept = [slot.name for slot in engine.stats().slots if slot.pinned]
        assert kept == ["one"]
        assert await answer(engine, prompt, "one") == right
