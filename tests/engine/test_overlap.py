"""Steps that overlap change no answer: depth 2 against depth 1 on real engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

import rota
from rota.gpu.decorators import TracingDevice
from rota.gpu.host import HostDevice
from rota.gpu.model import torch_runner
from rota.gpu.model.config import load_config
from rota.gpu.model.kv import kv_bytes_per_block
from rota.gpu.model.options import RunnerOptions
from rota.gpu.model.torch_runner import TorchRunner
from rota.sched import lifecycle
from rota.sched.config import EngineConfig

pytestmark = pytest.mark.anyio

OPTIONS: dict[str, Any] = {"max_loras": 2, "max_lora_rank": 16, "seed": 1, "dtype": "float32"}
SHARED = [(7 * i) % 90 + 1 for i in range(33)]
HYBRID = Path(__file__).resolve().parents[1] / "data" / "oracle" / "qwen35" / "base"
#: Everything that makes a choice depend on the token before, and every way to end.
SAMPLINGS = {
    "greedy": rota.SamplingParams(max_tokens=24, logprobs=2, ignore_eos=True),
    "long": rota.SamplingParams(
        max_tokens=90, temperature=0.9, seed=4, logprobs=0, ignore_eos=True
    ),
    "short": rota.SamplingParams(max_tokens=1, logprobs=0),
    "two": rota.SamplingParams(max_tokens=2, logprobs=0),
    "drawn": rota.SamplingParams(max_tokens=24, temperature=1.3, top_p=0.9, seed=5, logprobs=0),
    "penalised": rota.SamplingParams(
        max_tokens=24,
        temperature=0.8,
        seed=9,
        repetition_penalty=1.4,
        presence_penalty=0.6,
        frequency_penalty=0.4,
        logprobs=0,
    ),
    "samples": rota.SamplingParams(max_tokens=16, temperature=1.1, seed=3, n=3, logprobs=0),
    "stopped": rota.SamplingParams(
        max_tokens=24, min_tokens=5, stop_token_ids=tuple(range(40)), logprobs=0
    ),
}
Answers = dict[Any, list[Any]]


async def read(events: Any, most: int = 1000) -> list[Any]:
    got = []
    async for e in events:
        got.append((e.sample, e.index, e.token_id, e.logprob, e.top_logprobs, e.finish_reason))
        if len(got) == most:
            break
    return sorted(got)


async def day(oracle: Any, **options: Any) -> tuple[Answers, Any]:
    """Every sampling on base and on an adapter side by side, twice, the first behind a cancelled
    one, with a replacement in between."""
    got: Answers = {}
    adapters = {"a": oracle.adapter("attn_mlp_r8")}
    async with rota.Engine(oracle.model, adapters, **{**OPTIONS, **options}) as engine:

        async def one(turn: int, name: str, adapter: str | None) -> None:
            prompt = [*SHARED, *range(1, 1 + len(name))]
            events = engine.generate(prompt, adapter, SAMPLINGS[name])
            got[turn, name, adapter] = await read(events)

        async def leave(turn: int) -> None:
            events = engine.generate(SHARED, "a", SAMPLINGS["greedy"])
            got[turn, "leave"] = await read(events, most=7)

        for turn in range(2):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(leave, turn)
                for name in SAMPLINGS:
                    for adapter in (None, "a"):
                        tasks.start_soon(one, turn, name, adapter)
            await engine.replace("a", oracle.adapter("rslora_r16_bf16"))
        return got, engine.stats()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_answers_are_the_same_to_the_last_bit(llama: Any, dtype: str) -> None:
    alone, one = await day(llama, dtype=dtype, step_depth=1)
    over, two = await day(llama, dtype=dtype, step_depth=2)
    assert over == alone
    assert one.steps_ahead == 0 < two.steps_ahead and two.wasted_rows > 0
    assert over[0, "greedy", "a"] != over[1, "greedy", "a"], "the versions do differ"
    assert two.prefix.hit > 0


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("prefix_cache", [False, True])
async def test_in_memory_so_small_that_sequences_spill(llama: Any, prefix_cache: bool) -> None:
    each = kv_bytes_per_block(load_config(llama.model), torch.float32)
    wide, _ = await day(llama, step_depth=1)
    tight, stats = await day(
        llama,
        step_depth=2,
        kv_bytes=12 * each,
        spill_bytes=24 * each,
        spill_bytes_per_token=1 << 24,
        prefix_cache=prefix_cache,
    )
    assert tight == wide
    assert stats.spilled > 0 and stats.steps_ahead > 0 and stats.spill_blocks_used == 0


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_recurrent_states_too() -> None:
    async def run(depth: int) -> tuple[Answers, Any]:
        got: Answers = {}
        async with rota.Engine(HYBRID, **OPTIONS, step_depth=depth) as engine:

            async def one(name: str) -> None:
                got[name] = await read(engine.generate(SHARED, None, SAMPLINGS[name]))

            async with anyio.create_task_group() as tasks:
                for name in SAMPLINGS:
                    tasks.start_soon(one, name)
            return got, engine.stats()

    alone, _ = await run(1)
    over, stats = await run(2)
    assert over == alone and stats.steps_ahead > 0


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_accelerators_runner_too(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch on the CPU. A row's last bits may depend on its batch there, and its batch on
    when a request came: ids and reasons are equal, log-probabilities close."""

    def load(config: EngineConfig, model_dir: Path, told: object) -> TorchRunner:
        return TorchRunner.load(
            model_dir,
            HostDevice(allow_foreign=True),
            RunnerOptions(
                dtype=config.dtype,
                max_loras=config.max_loras,
                max_lora_rank=config.max_lora_rank,
                max_step_tokens=512,
                kv_bytes=1 << 20,
            ),
        )

    monkeypatch.setattr(lifecycle, "_load_runner", load)
    alone, one = await day(llama, step_depth=1)
    over, two = await day(llama)
    assert one.steps_ahead == 0 < two.steps_ahead, "there, two is what one gets unasked"
    assert over.keys() == alone.keys()
    for key, events in over.items():
        for mine, other in zip(events, alone[key], strict=True):
            assert (*mine[:3], mine[5]) == (*other[:3], other[5])
            assert mine[3] == pytest.approx(other[3], abs=1e-4)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("depth", [1, 2])
async def test_on_an_accelerator_a_step_is_queued_before_the_last_is_waited_for(
    llama: Any, cuda_machine: Any, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """Of greedy rows beside drawn ones: between the launches of two steps, no call waits."""
    if cuda_machine.fake is None:
        pytest.skip("runs torch on the test driver")
    from rota.gpu.fakecuda.torch_queue import QueueSpace

    driver = cuda_machine.fake.reset()
    trace: list[str] = []
    spaces: list[QueueSpace] = []

    def space_of(device: Any) -> QueueSpace:
        spaces.append(QueueSpace(device.inner, driver))
        return spaces[-1]

    monkeypatch.setattr(
        lifecycle, "open_device", lambda spec: TracingDevice(cuda_machine.open(), trace.append)
    )
    monkeypatch.setattr(torch_runner, "open_space", space_of)
    options = {**OPTIONS, "kv_bytes": 1 << 20, "max_running": 4, "step_depth": depth}
    adapters = {"a": llama.adapter("attn_mlp_r8")}
    counts = []
    async with rota.Engine(llama.model, adapters, device="cuda", **options) as engine:

        async def one(adapter: str | None, temperature: float) -> None:
            sampling = rota.SamplingParams(
                max_tokens=24, temperature=temperature, seed=1, ignore_eos=True
            )
            counts.append(len(await read(engine.generate([1, 2, 3], adapter, sampling))))

        async with anyio.create_task_group() as tasks:
            for adapter, temperature in ((None, 0.0), ("a", 0.0), ("a", 1.0)):
                tasks.start_soon(one, adapter, temperature)
        ahead = engine.stats().steps_ahead
    for space in spaces:
        space.close()
    assert driver.live() == {}, driver.story
    assert counts[0] >= 24 and counts == counts[:1] * 3
    queued = overlapped = 0  # steps whose results are on their way; launched behind one of them
    for line in trace:
        queued += line.startswith("copy_d2h step arrays (host)")
        queued -= line.startswith("synchronize_event")
        overlapped += queued > 0 and line.startswith("replay")
    assert queued == 0
    assert overlapped == 0 if depth == 1 else overlapped >= 10 <= ahead, trace[-20:]
