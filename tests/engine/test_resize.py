"""The pool resized under a real engine: answers before and after are the same tokens."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

import rota
from rota.errors import CapacityError, CommandError, DeviceError, RejectError

from .asking import greedy, ids

pytestmark = pytest.mark.anyio

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "max_loras": 2,
    "max_lora_rank": 8,
    "kv_bytes": 1 << 22,
}
R8, R16 = "attn_mlp_r8", "rslora_r16_bf16"


async def test_rank_and_slots_grow_and_shrink_while_it_serves(llama: Any) -> None:
    async with rota.Engine(llama.model, {"a": llama.adapter(R8)}, **SMALL) as engine:
        assert await ids(engine, llama.prompt(R8), "a") == llama.greedy(R8)
        with pytest.raises(RejectError) as small:
            await engine.load("big", llama.adapter(R16))
        assert small.value.code == "rank-exceeds-pool"
        before = engine.stats().slots[0].adapter_id
        running = engine.generate(llama.prompt(R8), "a", greedy(40))
        await running.__anext__()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: engine.resize(max_loras=4, max_lora_rank=16))
            await anyio.lowlevel.checkpoint()
            # One that was there before the barrier, one that waits behind it.
            waited = await ids(engine, llama.prompt(R8), "a")
            assert len([e async for e in running]) == 39
        assert waited == llama.greedy(R8)
        assert (engine.info.max_loras, engine.info.max_lora_rank) == (4, 16)
        assert len(engine.stats().slots) == 4
        assert engine.stats().slots[0].adapter_id == before, "the same version"
        await engine.load("big", llama.adapter(R16))
        for case, name in ((R8, "a"), (R16, "big"), ("base", None)):
            assert await ids(engine, llama.prompt(case), name) == llama.greedy(case), case
        with pytest.raises(CommandError) as refused:
            await engine.resize(max_lora_rank=8)
        assert (refused.value.code, refused.value.subject) == ("resident-rank-too-large", "big")
        await engine.unload("big")
        await engine.resize(max_loras=1, max_lora_rank=8)
        assert await ids(engine, llama.prompt(R8), "a") == llama.greedy(R8)


async def test_no_memory_and_no_time_leave_everything_as_it_was(llama: Any) -> None:
    async with rota.Engine(llama.model, {"a": llama.adapter(R8)}, **SMALL) as engine:
        with pytest.raises(DeviceError) as full:
            await engine.resize(max_loras=4096, max_lora_rank=1024)
        assert full.value.code == "pool-too-large"
        running = engine.generate(llama.prompt(R8), "a", greedy(200))
        await running.__anext__()
        with pytest.raises(CapacityError) as late:
            await engine.resize(max_loras=3, deadline_s=0.0)
        assert late.value.code == "resize-timeout"
        running.cancel()
        assert len(engine.stats().slots) == 2 and engine.info.max_lora_rank == 8
        assert await ids(engine, llama.prompt(R8), "a") == llama.greedy(R8)


async def test_closing_in_the_middle_answers_the_resize(llama: Any) -> None:
    engine = rota.Engine(llama.model, {"a": llama.adapter(R8)}, **SMALL)
    failed: list[str] = []

    async def resize() -> None:
        try:
            await engine.resize(max_loras=3)
        except rota.RotaError as error:
            failed.append(error.code)

    async with anyio.create_task_group() as tasks, engine:
        running = engine.generate(llama.prompt(R8), "a", greedy(200))
        await running.__anext__()
        tasks.start_soon(resize)
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
    assert failed == ["engine-closed"]
