"""Preemption by spill on the real engine: answers do not change, and nothing stays in memory."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
import torch

import rota
from rota.errors import InternalError
from rota.gpu.device import open_device
from rota.gpu.model.config import load_config
from rota.gpu.model.kv import kv_bytes_per_block
from rota.gpu.model.options import RunnerOptions
from rota.gpu.model.params import SamplingParams
from rota.gpu.model.rows import RowInput
from rota.gpu.model.runner import Runner

pytestmark = pytest.mark.anyio


def block_bytes(oracle: Any, dtype: torch.dtype) -> int:
    return kv_bytes_per_block(load_config(oracle.model), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("prefix_cache", [False, True])
async def test_greedy_answers_are_the_same_to_the_last_bit(
    llama: Any, dtype: str, prefix_cache: bool
) -> None:
    each = block_bytes(llama, getattr(torch, dtype))
    sampling = SamplingParams(max_tokens=70, logprobs=0, ignore_eos=True)

    async def run(**options: Any) -> tuple[dict[int, list[Any]], Any]:
        got: dict[int, list[Any]] = {}
        adapters = {"a": llama.adapter("attn_mlp_r8")}
        async with rota.Engine(
            llama.model, adapters, max_loras=2, max_lora_rank=16, dtype=dtype, **options
        ) as engine:

            async def one(index: int) -> None:
                prompt = [(index * 13 + i * 7) % 100 + 1 for i in range(45)]
                events = engine.generate(prompt, (None, "a")[index % 2], sampling)
                got[index] = [(e.token_id, e.logprob) async for e in events]

            async with anyio.create_task_group() as tasks:
                for index in range(6):
                    tasks.start_soon(one, index)
            return got, engine.stats()

    wide, calm = await run(prefix_cache=False)
    tight, stats = await run(
        prefix_cache=prefix_cache, kv_bytes=16 * each, spill_bytes=24 * each + 1
    )
    assert calm.preempted == 0 and stats.spilled > 0
    assert stats.spill_blocks_total == 24 and stats.spill_blocks_used == 0
    assert tight == wide


def test_the_runners_host_copies_are_exact_bounded_and_given_up(llama: Any) -> None:
    each = block_bytes(llama, torch.float32)
    runner = Runner.load(
        llama.model,
        open_device("cpu"),
        RunnerOptions(dtype="float32", max_loras=0, num_blocks=8, spill_bytes=3 * each),
        use_numba=False,
    )
    try:
        prompt = tuple(range(1, 41))
        runner.open_sequence(1, prompt, SamplingParams())
        runner.step([RowInput(1, -1, 0, prompt, (0, 1, 2), True)])
        (straight,) = runner.step([RowInput(1, -1, 40, (7,), (0, 1, 2), True)])
        with pytest.raises(InternalError, match="spill-full"):
            runner.spill(1, (0, 1, 2, 3))
        with pytest.raises(InternalError, match="bad-block"):
            runner.spill(1, (0, 8))
        runner.spill(1, (0, 1, 2))
        with pytest.raises(InternalError, match="sequence-spilled"):
            runner.spill(1, (0,))
        with pytest.raises(InternalError, match="spill-full"):
            runner.spill(2, (0,))
        runner.open_sequence(2, prompt[::-1], SamplingParams())
        runner.step([RowInput(2, -1, 0, prompt[::-1], (0, 1, 2), True)])
        runner.restore(1, ((0, 5), (1, 3), (2, 7)))
        (back,) = runner.step([RowInput(1, -1, 40, (7,), (5, 3, 7), True)])
        assert back == straight
        with pytest.raises(InternalError, match="sequence-not-spilled"):
            runner.restore(1, ())
        runner.spill(2, (0, 1, 2))
        runner.close_sequence(2)
        runner.spill(1, (5,))
        with pytest.raises(InternalError, match="bad-block"):
            runner.restore(1, ((1, 0),))
        runner.spill(1, (5, 3, 7))
    finally:
        runner.close()
