"""Loads on a real engine over time: the first one waits for no compiler, the last one costs as
little memory as the first."""

from __future__ import annotations

import gc
import os
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import anyio
import pytest

import rota
from rota.gpu.kernels.compiled import Compiled
from rota.sched.core.spread import PHASES

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]
PROMPT = [(7 * n) % 120 + 3 for n in range(20)]
GREEDY = rota.SamplingParams(max_tokens=3, ignore_eos=True)
CYCLES = 100


async def ask(engine: rota.Engine, adapter: str | None) -> list[int | None]:
    return [e.token_id async for e in engine.generate(PROMPT, adapter, GREEDY)]


async def test_the_first_requests_of_an_adapter_compile_nothing_and_share_one_copy(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom elsewhere: the first request of an adapter took a minute, and each process loaded a
    copy of its own."""
    loaded: list[str] = []
    real = Compiled._load

    def load(self: Compiled, arguments: tuple[float, ...]) -> Any:
        loaded.append(self.__name__)
        return real(self, arguments)

    monkeypatch.setattr(Compiled, "_load", load)
    for thing in gc.get_objects():
        if type(thing) is Compiled:  # as in a new process: nothing is linked in yet
            monkeypatch.setattr(thing, "_entries", {})
    async with rota.Engine(llama.model, max_loras=2, max_lora_rank=16, device="cpu") as engine:
        assert loaded, "starting links the kernels in"
        await engine.register("cold", llama.adapter("attn_mlp_r8"))
        loaded.clear()
        answers: list[Any] = []

        async def one() -> None:
            answers.append(await ask(engine, "cold"))

        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(one)
        stats = engine.stats()
        assert len({str(answer) for answer in answers}) == 1
        assert not loaded, "the first requests wait for no compiler"
        assert (stats.stages, stats.commits) == (1, 1), "one copy, for all who wait"
        counts = [sum(phase.counts) for phase in stats.times.phases]
        from_disk = {"read", "digest", "audit", "pack"}
        assert dict(zip(PHASES, counts, strict=True)) == {p: p in from_disk for p in PHASES}


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def test_loading_and_unloading_for_long_costs_no_memory(llama: Any) -> None:
    """Symptom elsewhere: host memory grew with every load, for a registry kept each version."""
    sources = [llama.adapter("attn_mlp_r8"), llama.adapter("rslora_r16_bf16")]
    async with rota.Engine(
        llama.model,
        max_loras=1,
        max_lora_rank=256,
        device="cpu",
        image_cache_bytes=0,
        stage_workers=1,
        kv_bytes=1 << 20,
    ) as engine:
        slot = engine.info.pool_bytes
        stories = engine._live().core._state.log._lines

        async def cycles(count: int) -> tuple[int, int, int, int]:
            """Traced bytes, resident bytes, open files and threads after so many more."""
            for turn in range(count):
                name = f"x{turn % 7}"
                await engine.load(name, sources[turn % 2])
                await ask(engine, name)
                await engine.replace(name, sources[(turn + 1) % 2])
                await engine.unload(name)
            stories.clear()  # bounded, and not full yet
            gc.collect()
            files = len(os.listdir("/proc/self/fd"))
            traced, _ = tracemalloc.get_traced_memory()
            return traced, resident_bytes(), files, threading.active_count()

        tracemalloc.start()
        try:
            await cycles(20)
            traced, resident, files, threads = await cycles(10)
            later = await cycles(CYCLES)
        finally:
            tracemalloc.stop()
        stats = engine.stats()
        assert stats.stages == 2 * (30 + CYCLES) and stats.image_bytes == 0
        assert not stats.adapters and not any(s.leases for s in stats.slots)
        # A load's report alone is some thousand bytes of objects; an image is as large as a slot.
        assert later[0] - traced < 2 * CYCLES * 500
        assert later[1] - resident < 2 * CYCLES * slot // 20
        # What tests before this one left behind may end meanwhile.
        assert later[2] <= files and later[3] <= threads
