"""The real model and the real adapters, against transformers + PEFT (recorded, tests/data/smol)."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

import rota

pytestmark = [pytest.mark.anyio, pytest.mark.real_model, pytest.mark.timeout(900)]

ADAPTERS = ("pirate", "json", "sentiment")


@pytest.fixture(scope="module")
def recorded() -> list[dict[str, Any]]:
    path = Path(__file__).resolve().parents[1] / "data" / "smol" / "oracle.json"
    prompts: list[dict[str, Any]] = json.loads(path.read_text())["prompts"]
    assert len(prompts) == 20
    return prompts


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def smol(smol_dir: Path, examples: Path, dtype: str) -> AsyncIterator[rota.Engine]:
    adapters = {name: examples / name for name in ADAPTERS}
    async with rota.Engine(
        smol_dir, adapters, dtype=dtype, max_loras=4, max_lora_rank=8, kv_bytes=128 << 20
    ) as engine:
        yield engine


async def answer(engine: rota.Engine, ids: list[int], adapter: str | None, n: int) -> list[int]:
    params = rota.SamplingParams(max_tokens=n)
    return [
        e.token_id async for e in engine.generate(ids, adapter, params) if e.token_id is not None
    ]


def cases(recorded: list[dict[str, Any]], dtype: str, margin: float) -> list[tuple[Any, ...]]:
    return [
        (prompt["ids"], target, prompt[dtype][target]["ids"])
        for prompt in recorded
        for target in ("base", *ADAPTERS)
        if prompt[dtype][target]["margin"] >= margin
    ]


async def run_mixed(engine: rota.Engine, work: list[tuple[Any, ...]], width: int) -> None:
    """Run every case, ``width`` at a time, each row another adapter than its neighbour."""
    for first in range(0, len(work), width):
        got: dict[int, list[int]] = {}

        async def one(index: int, got: dict[int, list[int]]) -> None:
            ids, target, want = work[index]
            adapter = None if target == "base" else target
            got[index] = await answer(engine, ids, adapter, len(want))

        async with anyio.create_task_group() as tasks:
            for index in range(first, min(first + width, len(work))):
                tasks.start_soon(one, index, got)
        for index, tokens in got.items():
            assert tokens == work[index][2], work[index][1]


async def test_fp32_text_equals_peft_in_mixed_batches_of_eight(
    smol_dir: Path, examples: Path, recorded: list[dict[str, Any]]
) -> None:
    work = cases(recorded, "float32", 0.0)
    assert len(work) == 80
    async with smol(smol_dir, examples, "float32") as engine:
        await run_mixed(engine, work, 8)


async def test_fp32_text_equals_peft_alone(
    smol_dir: Path, examples: Path, recorded: list[dict[str, Any]]
) -> None:
    async with smol(smol_dir, examples, "float32") as engine:
        await run_mixed(engine, cases(recorded, "float32", 0.0), 1)


async def test_bf16_text_equals_peft_where_its_margin_says_something(
    smol_dir: Path, examples: Path, recorded: list[dict[str, Any]]
) -> None:
    work = cases(recorded, "bfloat16", 0.25)
    assert len(work) >= 30
    async with smol(smol_dir, examples, "bfloat16") as engine:
        await run_mixed(engine, work, 8)


async def test_a_row_is_bit_equal_alone_and_in_a_mixed_batch_and_base_with_lora_off(
    smol_dir: Path, examples: Path, recorded: list[dict[str, Any]]
) -> None:
    """bf16, log-probabilities compared to the last bit."""
    params = rota.SamplingParams(max_tokens=8, logprobs=3, ignore_eos=True)

    async def trace(engine: rota.Engine, ids: list[int], adapter: str | None) -> list[Any]:
        stream = engine.generate(ids, adapter, params)
        return [(e.token_id, e.logprob, e.top_logprobs) async for e in stream]

    prompts = [p["ids"] for p in recorded[:8]]
    rows = [None, *ADAPTERS, None, *ADAPTERS]
    async with smol(smol_dir, examples, "bfloat16") as engine:
        alone = [await trace(engine, ids, a) for ids, a in zip(prompts, rows, strict=True)]
        together: dict[int, Any] = {}

        async def one(index: int) -> None:
            together[index] = await trace(engine, prompts[index], rows[index])

        async with anyio.create_task_group() as tasks:
            for index in range(8):
                tasks.start_soon(one, index)
    assert [together[i] for i in range(8)] == alone
    async with rota.Engine(smol_dir, max_loras=0, kv_bytes=64 << 20) as plain:
        for index in (0, 4):
            assert await trace(plain, prompts[index], None) == alone[index]


async def test_text_streams_whole_and_stops_at_stop_strings(smol_dir: Path, examples: Path) -> None:
    async with smol(smol_dir, examples, "bfloat16") as engine:
        ask = engine.chat_prompt([{"role": "user", "content": "What is the capital of France?"}])
        assert re.match(r"Arr, matey!", await engine.complete(ask, "pirate"))
        assert json.loads(await engine.complete(ask, "json"))
        stop = rota.SamplingParams(stop=("Paris",))
        events = [e async for e in engine.generate(ask, None, stop)]
        assert "".join(e.text for e in events) == "The capital of France is "
        assert events[-1].finish_reason == "stop"


async def test_replace_pirate_by_its_small_form(
    smol_dir: Path, examples: Path, recorded: list[dict[str, Any]]
) -> None:
    async with smol(smol_dir, examples, "float32") as engine:
        await engine.replace("pirate", examples / "pirate-small")
        for prompt in recorded[:8]:
            want = prompt["float32"]["pirate-small"]["ids"]
            assert await answer(engine, prompt["ids"], "pirate", len(want)) == want
