"""The prefix cache on real models: what is read from it changes no bit of any answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rota
from rota.gpu.model.config import load_config
from rota.gpu.model.kv import kv_bytes_per_block
from rota.sched.core import Stats

pytestmark = pytest.mark.anyio

OPTIONS: dict[str, Any] = {"max_loras": 2, "max_lora_rank": 16, "seed": 1}
SAMPLING = rota.SamplingParams(max_tokens=6, logprobs=3, ignore_eos=True)
Answer = list[tuple[int, float | None, tuple[tuple[int, float], ...]]]


def prompts() -> list[list[int]]:
    """Four that begin alike for 40 tokens, one of them twice, one a prefix of the others."""
    shared = [(7 * i) % 90 + 1 for i in range(40)]
    tails = [[5, 6, 7], [5, 6, 7], [8] * 20, [9], []]
    return [shared + tail for tail in tails]


async def answer(engine: rota.Engine, prompt: list[int], adapter: str | None) -> Answer:
    events = [e async for e in engine.generate(prompt, adapter, SAMPLING)]
    return [(e.token_id or 0, e.logprob, e.top_logprobs) for e in events]


async def answers(oracle: Any, **options: Any) -> tuple[list[Answer], Stats]:
    """Of every prompt, on base, on an adapter, and on another version of its name."""
    adapters = {"a": oracle.adapter("attn_mlp_r8")}
    got: list[Answer] = []
    async with rota.Engine(oracle.model, adapters, **OPTIONS, **options) as engine:
        for adapter in (None, "a"):
            got += [await answer(engine, prompt, adapter) for prompt in prompts()]
        await engine.replace("a", oracle.adapter("rslora_r16_bf16"))
        got += [await answer(engine, prompt, "a") for prompt in prompts()]
        return got, engine.stats()


@pytest.mark.parametrize("use_numba", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_answers_are_the_same_to_the_last_bit(
    llama: Any, dtype: str, use_numba: bool
) -> None:
    kind = {"dtype": dtype, "use_numba": use_numba}
    without, none = await answers(llama, prefix_cache=False, **kind)
    cached, stats = await answers(llama, max_step_tokens=16, mixed_step_tokens=16, **kind)
    assert cached == without
    assert none.prefix.hit == 0
    # Two blocks of 16 for every prompt but the first of each version.
    assert stats.prefix.hit == 3 * 4 * 32
    assert stats.base_prefix.hit == 4 * 32
    assert cached[:5] != cached[5:10] != cached[10:], "the versions do differ"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_conversation_goes_on_behind_the_answer_it_got(oracle: Any, dtype: str) -> None:
    """Blocks that decoding filled are read as prefill would have filled them."""

    async def talk(**options: Any) -> tuple[list[Answer], Stats]:
        adapters = {"a": oracle.adapter("attn_mlp_r8")}
        sampling = rota.SamplingParams(max_tokens=40, logprobs=2, ignore_eos=True)
        said: list[Answer] = []
        async with rota.Engine(oracle.model, adapters, dtype=dtype, **OPTIONS, **options) as engine:
            for adapter in (None, "a"):
                prompt = prompts()[0]
                for _ in range(3):
                    events = [e async for e in engine.generate(prompt, adapter, sampling)]
                    said.append([(e.token_id or 0, e.logprob, e.top_logprobs) for e in events])
                    prompt = [*prompt, *(e.token_id or 0 for e in events), 3, 4, 5]
            return said, engine.stats()

    without, _ = await talk(prefix_cache=False)
    cached, stats = await talk()
    assert cached == without
    # 43 tokens, 86, 129; all but the last token of each answer is in KV.
    assert stats.prefix.hit == 2 * (80 + 112)


async def test_in_small_memory_with_preemption_too(llama: Any) -> None:
    async def run(**options: Any) -> tuple[dict[int, list[int]], Any]:
        got: dict[int, list[int]] = {}
        sampling = rota.SamplingParams(max_tokens=60, ignore_eos=True)
        async with rota.Engine(
            llama.model, {"a": llama.adapter("attn_mlp_r8")}, **OPTIONS, **options
        ) as engine:
            streams = [
                engine.generate(prompt, (None, "a")[i % 2], sampling)
                for i, prompt in enumerate(prompts() * 2)
            ]
            for index, stream in enumerate(streams):
                got[index] = [e.token_id async for e in stream if e.token_id is not None]
            return got, engine.stats()

    wide, calm = await run(dtype="float32", prefix_cache=False)
    each = block_bytes(llama)
    tight, stats = await run(dtype="float32", kv_bytes=14 * each)
    assert calm.preempted == 0 and stats.preempted > 0 and stats.prefix.hit > 0
    assert tight == wide


def block_bytes(oracle: Any) -> int:
    """Bytes of one KV block of the checkpoint in fp32."""
    return kv_bytes_per_block(load_config(oracle.model), torch.float32)


@pytest.mark.parametrize("adapter", [None, "a"])
async def test_samples_are_what_single_requests_with_their_seeds_are(
    llama: Any, adapter: str | None
) -> None:
    sampling = rota.SamplingParams(
        max_tokens=12, temperature=1.5, seed=2**64 - 2, n=4, logprobs=0, ignore_eos=True
    )
    async with rota.Engine(llama.model, {"a": llama.adapter("attn_mlp_r8")}, **OPTIONS) as engine:
        got: dict[int, list[Any]] = {}
        ends: list[int] = []
        async for event in engine.generate(prompts()[2], adapter, sampling):
            got.setdefault(event.sample, []).append((event.token_id, event.logprob))
            assert event.index == len(got[event.sample]) - 1
            if event.finish_reason is not None:
                ends.append(event.sample)
        stats = engine.stats()
        assert sorted(ends) == [0, 1, 2, 3]
        assert (stats.prefix.queried, stats.prefix.hit) == (4 * 60, 3 * 48)
        for sample in range(4):
            alone = engine.generate(prompts()[2], adapter, sampling.of_sample(sample))
            assert got[sample] == [(e.token_id, e.logprob) async for e in alone]
        assert len({str(answer) for answer in got.values()}) == 4
        async for event in engine.generate(prompts()[2], adapter, sampling):
            if event.sample == 3:
                break
