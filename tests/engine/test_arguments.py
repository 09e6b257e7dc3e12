"""Wrong types from a caller are refused by name and hurt nobody else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import pytest

import rota

pytestmark = pytest.mark.anyio

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "max_loras": 2,
    "max_lora_rank": 8,
    "kv_bytes": 1 << 20,
    "use_numba": False,
}
WRONG_REQUESTS: list[tuple[str, Callable[[rota.Engine], Any]]] = [
    ("bad-argument", lambda e: e.generate(None, None)),
    ("bad-argument", lambda e: e.generate(b"bytes", None)),
    ("bad-token", lambda e: e.generate(["a"], None)),
    ("bad-token", lambda e: e.generate([1.5], None)),
    ("bad-argument", lambda e: e.generate([1], 7)),
    ("bad-argument", lambda e: e.generate([1], None, {"max_tokens": 3})),
    ("bad-argument", lambda e: e.generate([1], None, priority="high")),
    ("bad-argument", lambda e: e.generate([1], None, deadline_s=float("nan"))),
]
WRONG_COMMANDS: list[Callable[[rota.Engine], Any]] = [
    lambda e: e.load(7, "dir"),
    lambda e: e.load("a", None),
    lambda e: e.load("a", ("text", "text")),
    lambda e: e.load("a", "with\0nul"),
    lambda e: e.replace(["a"], "dir"),
    lambda e: e.swap("a", "dir", "first"),
    lambda e: e.rotate(7),
    lambda e: e.pin(None),
    lambda e: e.unload("a", deadline_s=float("nan")),
]


async def test_wrong_types_are_refused_and_the_engine_goes_on(llama: Any) -> None:
    params = rota.SamplingParams(max_tokens=12, ignore_eos=True)
    async with rota.Engine(llama.model, None, **SMALL) as engine:
        running = engine.generate(llama.prompt("base"), None, params)
        tokens = [(await running.__anext__()).token_id]
        for code, call in WRONG_REQUESTS:
            with pytest.raises(rota.RequestError) as caught:
                async for _ in call(engine):
                    pass
            assert caught.value.code == code
        for command in WRONG_COMMANDS:
            with pytest.raises(rota.RequestError) as caught:
                await command(engine)
            assert caught.value.code == "bad-argument"
        tokens += [e.token_id async for e in running if e.token_id is not None]
        assert tokens == llama.greedy("base")
        assert engine.stats().adapters == ()


async def test_an_array_of_ids_is_a_prompt(llama: Any) -> None:
    params = rota.SamplingParams(max_tokens=12, ignore_eos=True)
    async with rota.Engine(llama.model, None, **SMALL) as engine:
        prompt = np.array(llama.prompt("base"))
        got = [e.token_id async for e in engine.generate(prompt, None, params)]
        assert got == llama.greedy("base")


async def test_two_readers_of_one_generation_share_its_events(llama: Any) -> None:
    params = rota.SamplingParams(max_tokens=12, ignore_eos=True)
    async with rota.Engine(llama.model, None, **SMALL) as engine:
        stream = engine.generate(llama.prompt("base"), None, params)
        seen: list[tuple[int, int | None]] = []

        async def read() -> None:
            seen.extend([(e.index, e.token_id) async for e in stream])

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read)
                tasks.start_soon(read)
        assert [t for _, t in sorted(seen)] == llama.greedy("base")
