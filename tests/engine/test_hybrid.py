"""Engines over the tiny hybrid checkpoints: mixed adapters, a replace under decode, preemption."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

import rota

from .conftest import load_oracle

pytestmark = pytest.mark.anyio

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_loras": 3,
    "max_lora_rank": 16,
    "max_running": 8,
    "kv_bytes": 1 << 20,
}
CASES = {
    "qwen35": ("gdn_all_r4", "attn_mlp_r8", {}),
    "qwen35_moe": ("experts_router_attn", "attn_shared_r4", {"expert_adapters": True}),
}


async def answer(engine: rota.Engine, prompt: list[int], adapter: str | None, n: int) -> list[int]:
    sampling = rota.SamplingParams(max_tokens=n, ignore_eos=True)
    events = [event async for event in engine.generate(prompt, adapter, sampling)]
    assert len({event.adapter_id for event in events}) == 1, "one request, one version"
    return [event.token_id for event in events if event.token_id is not None]


@pytest.mark.parametrize("family", list(CASES))
async def test_base_and_two_adapters_with_a_replace_while_they_decode(family: str) -> None:
    oracle = load_oracle(family)
    first, second, more = CASES[family]
    adapters = {"one": oracle.adapter(first), "two": oracle.adapter(second)}
    async with rota.Engine(oracle.model, adapters, **OPTIONS, **more) as engine:
        prompts = {None: oracle.prompt("base")}
        prompts |= {"one": oracle.prompt(first), "two": oracle.prompt(second)}
        wanted = {None: oracle.greedy("base")}
        wanted |= {"one": oracle.greedy(first), "two": oracle.greedy(second)}
        alone = {name: await answer(engine, prompts[name], name, 40) for name in prompts}
        for name, tokens in alone.items():
            assert tokens[:12] == wanted[name]
        got: dict[str | None, list[int]] = {}
        started = {name: anyio.Event() for name in prompts}

        async def run(name: str | None) -> None:
            sampling = rota.SamplingParams(max_tokens=40, ignore_eos=True)
            got[name] = []
            async for event in engine.generate(prompts[name], name, sampling):
                started[name].set()
                if event.token_id is not None:
                    got[name].append(event.token_id)

        async with anyio.create_task_group() as tasks:
            for name in prompts:
                tasks.start_soon(run, name)
            for event in started.values():
                await event.wait()
            await engine.replace("one", oracle.adapter(second))
            # A new request is on the new version while the old one may still decode.
            assert await answer(engine, prompts["two"], "one", 12) == wanted["two"]
        assert got == alone


async def test_sequences_that_give_way_are_computed_again_to_the_same_tokens() -> None:
    oracle = load_oracle("qwen35")
    prompts = [oracle.prompt("base")[i:] for i in range(4)]
    adapters = {"one": oracle.adapter("gdn_all_r4")}
    names = [None, "one", None, "one"]
    async with rota.Engine(oracle.model, adapters, **OPTIONS) as engine:
        alone = [await answer(engine, p, a, 60) for p, a in zip(prompts, names, strict=True)]
    # 8 blocks of 16 tokens, 8 KiB each, for four sequences that grow to 5.
    small = OPTIONS | {"kv_bytes": 8 << 13}
    async with rota.Engine(oracle.model, adapters, **small) as engine:
        got: dict[int, list[int]] = {}

        async def run(index: int) -> None:
            got[index] = await answer(engine, prompts[index], names[index], 60)

        async with anyio.create_task_group() as tasks:
            for index in range(4):
                tasks.start_soon(run, index)
        stats = engine.stats()
    assert stats.preempted > 0 and stats.blocks_cached == 0
    assert [got[index] for index in range(4)] == alone
