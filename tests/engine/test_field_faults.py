"""A name that gets other weights: never an answer, nor a cached block, of the weights before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rota

pytestmark = pytest.mark.anyio
ZOO = Path(__file__).resolve().parents[1] / "zoo" / "llama"
PROMPT = [(7 * n) % 120 + 3 for n in range(40)]  # two whole blocks and a half
SAMPLING = rota.SamplingParams(max_tokens=8, ignore_eos=True, logprobs=0)


async def answer(engine: Any, adapter: str | None) -> list[tuple[int, float]]:
    found = []
    async for event in engine.generate(PROMPT, adapter=adapter, sampling=SAMPLING):
        found.append((event.token_id, event.logprob))
    return found


async def cold(model: Path, name: str) -> list[tuple[int, float]]:
    async with rota.Engine(model, adapters={"x": ZOO / name}, max_loras=2) as engine:
        return await answer(engine, "x")


async def test_reloading_a_name_reuses_nothing_of_its_last_version(llama: Any) -> None:
    names = ["plain", "dora", "lora_bias"]
    wanted = {name: await cold(llama.model, name) for name in names}
    assert len({str(found) for found in wanted.values()}) == 3
    async with rota.Engine(llama.model, max_loras=2) as engine:
        base = await answer(engine, None)
        await engine.load("x", ZOO / names[0])
        for turn, name in enumerate([*names, *names]):
            if turn % 2:  # by unloading it, and by replacing it
                await engine.unload("x")
                await engine.load("x", ZOO / name)
            else:
                await engine.replace("x", ZOO / name)
            for _ in range(2):  # computed, and then from cached blocks
                assert await answer(engine, "x") == wanted[name], name
        assert await answer(engine, None) == base


async def test_two_names_with_one_prompt_share_no_block(llama: Any) -> None:
    wanted = {name: await cold(llama.model, name) for name in ("plain", "rslora")}
    adapters = {name: ZOO / name for name in wanted}
    async with rota.Engine(llama.model, adapters=adapters, max_loras=2) as engine:
        for _ in range(2):
            for name, expected in wanted.items():
                assert await answer(engine, name) == expected
            assert await answer(engine, None) not in wanted.values()


async def test_names_are_whatever_their_owner_writes(llama: Any) -> None:
    names = ["org/a@v1", "org/a@v2", "org/a:b"]
    async with rota.Engine(llama.model, max_loras=3) as engine:
        kinds = ["plain", "rslora", "regex"]
        for name, kind in zip(names, kinds, strict=True):
            await engine.load(name, ZOO / kind)
        found = [await answer(engine, name) for name in names]
        assert [await cold(llama.model, kind) for kind in kinds] == found
