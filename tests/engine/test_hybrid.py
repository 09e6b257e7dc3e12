"""Engines over the tiny hybrid checkpoints: mixed adapters, a replace under decode, preemption."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
import torch

import rota
from rota.gpu.model.config import load_config
from rota.gpu.model.kv import kv_bytes_per_block

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


#: Preempted sequences: computed again from nothing; behind a snapshot; brought back from the host.
WAYS: dict[str, dict[str, Any]] = {
    "recomputed": {"prefix_cache": False, "spill_bytes": 0},
    "resumed": {"spill_bytes": 0, "snapshot_tokens": 16},
    "spilled": {"prefix_cache": False, "spill_bytes_per_token": 1 << 30},
    "spilled, with snapshots": {"snapshot_tokens": 32, "spill_bytes_per_token": 1 << 30},
}


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("family", list(CASES))
async def test_sequences_that_give_way_come_back_to_the_same_bits(family: str, way: str) -> None:
    oracle = load_oracle(family)
    first, second, more = CASES[family]
    prompts = [(oracle.prompt("base") * 3)[i:] for i in range(4)]
    adapters = {"one": oracle.adapter(first), "two": oracle.adapter(second)}
    names = [None, "one", "two", "one"]
    greedy = rota.SamplingParams(max_tokens=60, logprobs=2, ignore_eos=True)
    seeded = rota.SamplingParams(
        max_tokens=60, logprobs=2, ignore_eos=True, temperature=1.0, seed=7
    )
    samplings = [greedy, seeded, greedy, greedy]

    async def bits(engine: rota.Engine, i: int) -> list[Any]:
        events = engine.generate(prompts[i], names[i], samplings[i])
        return [(e.token_id, e.logprob, e.top_logprobs) async for e in events]

    plain = OPTIONS | {"prefix_cache": False}
    async with rota.Engine(oracle.model, adapters, **plain, **more) as engine:
        alone = [await bits(engine, i) for i in range(4)]
    # 12 blocks of 16 tokens for four sequences that grow to more than 5.
    each = kv_bytes_per_block(load_config(oracle.model), torch.float32)
    small = OPTIONS | {"kv_bytes": 12 * each} | WAYS[way]
    async with rota.Engine(oracle.model, adapters, **small, **more) as engine:
        got: dict[int, list[Any]] = {}

        async def run(index: int) -> None:
            got[index] = await bits(engine, index)

        async with anyio.create_task_group() as tasks:
            for index in range(4):
                tasks.start_soon(run, index)
        stats = engine.stats()
    assert stats.preempted > 0 and stats.spill_blocks_used == 0
    assert (stats.spilled > 0) == way.startswith("spilled")
    assert "snapshot_tokens" in WAYS[way] or stats.snapshots_total == 0
    assert [got[index] for index in range(4)] == alone


@pytest.mark.parametrize(("family", "dtype"), [("qwen35", "float32"), ("qwen35_moe", "bfloat16")])
async def test_what_begins_behind_a_snapshot_is_the_same_to_the_last_bit(
    family: str, dtype: str
) -> None:
    oracle = load_oracle(family)
    first, second, more = CASES[family]
    shared = [(7 * i) % 90 + 1 for i in range(40)]
    prompts = [shared + tail for tail in ([5, 6, 7], [5, 6, 7], [8] * 20, [9], [])]
    sampling = rota.SamplingParams(max_tokens=24, logprobs=3, ignore_eos=True)
    drawn = rota.SamplingParams(
        max_tokens=6, temperature=1.5, seed=11, n=3, logprobs=0, ignore_eos=True
    )

    async def talk(**options: Any) -> tuple[list[Any], rota.sched.core.Stats]:
        said: list[Any] = []

        async def ask(engine: rota.Engine, prompt: list[int], name: str | None) -> list[int]:
            events = [e async for e in engine.generate(prompt, name, sampling)]
            said.append([(e.token_id, e.logprob, e.top_logprobs) for e in events])
            return [e.token_id for e in events if e.token_id is not None]

        async def all_of(engine: rota.Engine, name: str | None) -> None:
            for prompt in prompts:
                answer = await ask(engine, prompt, name)
            # A conversation: its blocks were filled by decoding.
            await ask(engine, [*prompt, *answer, 3, 4, 5], name)
            samples: dict[int, list[Any]] = {}
            async for e in engine.generate(prompts[2][::-1], name, drawn):
                samples.setdefault(e.sample, []).append((e.token_id, e.logprob))
            said.append(samples)

        kind = OPTIONS | {"dtype": dtype} | more | options
        adapters = {"one": oracle.adapter(first)}
        async with rota.Engine(oracle.model, adapters, **kind) as engine:
            await all_of(engine, None)
            await all_of(engine, "one")
            # Left in the middle of a prefill, and of decoding.
            async for _ in engine.generate([9, *shared], "one", sampling):
                break
            await ask(engine, [9, *shared], "one")
            await engine.replace("one", oracle.adapter(second))
            await all_of(engine, "one")
            return said, engine.stats()

    without, none = await talk(prefix_cache=False)
    cached, stats = await talk(snapshot_tokens=16, max_step_tokens=32, mixed_step_tokens=24)
    ends, few = await talk(state_snapshots=1)
    assert cached == without and ends == without
    assert none.prefix.hit == none.snapshots_total == 0 and few.snapshots_total == 1
    # Per version: 32 of 40 shared tokens four times, 48 of the conversation, 48 for two samples.
    assert stats.prefix.hit == 3 * (4 * 32 + 48 + 2 * 48) + 32 and stats.snapshots_kept > 0
    assert few.prefix.hit >= 3 * 2 * 48
