"""Options of an engine at odds with each other: what they allow together is served."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

import rota

pytestmark = pytest.mark.anyio


async def test_more_may_decode_than_a_step_of_prefill_has_tokens(llama: Any) -> None:
    options: dict[str, Any] = {"dtype": "float32", "kv_bytes": 1 << 22, "use_numba": False}
    options |= {"max_running": 24, "max_step_tokens": 8, "mixed_step_tokens": 4}
    sampling = rota.SamplingParams(max_tokens=60, ignore_eos=True)
    got: list[list[int]] = []
    most = 0
    async with rota.Engine(llama.model, None, **options) as engine:

        async def one() -> None:
            nonlocal most
            mine: list[int] = []
            async for event in engine.generate(llama.prompt("base"), None, sampling):
                most = max(most, engine.stats().decoding)
                mine.append(event.token_id or 0)
            got.append(mine)

        async with anyio.create_task_group() as tasks:
            for _ in range(30):
                tasks.start_soon(one)
    assert most == 24
    assert [tokens[:12] for tokens in got] == [llama.greedy("base")] * 30
