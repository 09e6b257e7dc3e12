"""Misuse and bad luck: cancels at every await, closes from anywhere, churn."""

from __future__ import annotations

import gc
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from safetensors.torch import load_file, save_file

import rota

from ..cancelling import CancelAt
from .asking import greedy, ids

pytestmark = pytest.mark.anyio

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "max_loras": 4,
    "max_lora_rank": 16,
    "kv_bytes": 1 << 22,
    "use_numba": False,
}


@asynccontextmanager
async def nothing_left() -> AsyncIterator[None]:
    """No device thread outlives the block."""
    yield
    assert not [t for t in threading.enumerate() if t.name == "rota-device"]


async def idle(engine: rota.Engine) -> rota.sched.core.Stats:
    """The snapshot once nothing runs any more."""
    with anyio.fail_after(30):
        while True:
            stats = engine.stats()
            if stats.submitted == stats.ended and not any(s.leases for s in stats.slots):
                return stats
            await anyio.lowlevel.checkpoint()


async def every_cancel(make: Callable[[], Awaitable[Any]]) -> int:
    """Run ``make()`` again and again, cancelled at its first, second, ... suspension, until one
    run ends before its turn; how many suspensions there were."""
    k = 0
    while True:
        k += 1
        with anyio.fail_after(60), anyio.CancelScope() as scope:
            run = CancelAt(make(), k, scope)
            await run
        if not scope.cancelled_caught and run.count < k:
            return k


async def test_a_cancel_at_every_await_from_open_to_close(llama: Any) -> None:
    async def life() -> None:
        async with rota.Engine(llama.model, {"a": llama.adapter("attn_mlp_r8")}, **SMALL) as engine:
            await ids(engine, llama.prompt("base"), "a", 4)
            await engine.replace("a", llama.adapter("rslora_r16_bf16"))
            await engine.unload("a")

    async with nothing_left():
        assert await every_cancel(life) > 8


async def test_a_cancel_at_every_await_of_one_call_leaves_the_engine_whole(llama: Any) -> None:
    one, two = llama.adapter("attn_mlp_r8"), llama.adapter("rslora_r16_bf16")
    prompt = llama.prompt("attn_mlp_r8")
    async with rota.Engine(llama.model, {"a": one}, **SMALL) as engine:
        turn = 0

        async def calls() -> None:
            nonlocal turn
            turn += 1
            await ids(engine, prompt, "a", 4)
            await engine.load(f"n{turn}", two)
            await engine.replace("a", two if turn % 2 else one)
            await engine.prefetch(f"p{turn}", one)
            await engine.promote(f"p{turn}")
            await engine.unload(f"p{turn}")
            await engine.unload(f"n{turn}")

        assert await every_cancel(calls) > 6
        await idle(engine)
        await engine.replace("a", two)
        await engine.replace("a", one)
        assert await ids(engine, prompt, "a") == llama.greedy("attn_mlp_r8")


async def test_entering_in_a_cancelled_scope_ends_and_leaves_nothing(llama: Any) -> None:
    async with nothing_left():
        with anyio.fail_after(60), anyio.CancelScope() as scope:
            scope.cancel()
            async with rota.Engine(llama.model, None, **SMALL):
                await anyio.sleep_forever()
        assert scope.cancelled_caught


async def test_streams_that_are_dropped_or_left_by_an_exception_end(llama: Any) -> None:
    prompt = llama.prompt("base")
    async with rota.Engine(llama.model, {"a": llama.adapter("attn_mlp_r8")}, **SMALL) as engine:
        for _ in range(20):
            engine.generate(prompt, "a", greedy(200))
        with pytest.raises(LookupError):
            async for _ in engine.generate(prompt, "a", greedy(200)):
                raise LookupError
        gc.collect()
        stats = await idle(engine)
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total


async def test_any_task_may_close_and_the_one_that_entered_frees(llama: Any) -> None:
    async with nothing_left():
        async with rota.Engine(llama.model, None, **SMALL) as engine:
            running = engine.generate(llama.prompt("base"), None, greedy(400))
            await running.__anext__()
            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(engine.aclose)
            with pytest.raises(rota.EngineClosedError):
                async for _ in running:
                    pass
            with pytest.raises(rota.EngineClosedError):
                await ids(engine, [1], None, 4)
            with pytest.raises(rota.EngineClosedError):
                await engine.load("a", llama.adapter("attn_mlp_r8"))
            await engine.aclose()
            await engine.aclose()
        async with engine:  # and it can be opened again
            assert await ids(engine, llama.prompt("base"), None) == llama.greedy("base")


async def test_entering_twice_is_refused_and_the_first_goes_on(llama: Any) -> None:
    async with nothing_left(), rota.Engine(llama.model, None, **SMALL) as engine:
        with pytest.raises(rota.CommandError) as caught:
            await engine.__aenter__()
        assert caught.value.code == "already-running"
        assert await ids(engine, llama.prompt("base"), None) == llama.greedy("base")


async def test_leaving_in_another_task_is_named(llama: Any) -> None:
    codes: list[str] = []

    async def leave(engine: rota.Engine) -> None:
        try:
            await engine.__aexit__(None, None, None)
        except rota.CommandError as error:
            codes.append(error.code)

    async with nothing_left(), rota.Engine(llama.model, None, **SMALL) as engine:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(leave, engine)
    assert codes == ["wrong-task"]


async def test_close_in_the_middle_of_prefill_stage_and_commit(llama: Any) -> None:
    one, two = llama.adapter("attn_mlp_r8"), llama.adapter("rslora_r16_bf16")
    ended: list[str] = []

    async def heard(call: Callable[[], Awaitable[Any]]) -> None:
        try:
            await call()
        except rota.EngineClosedError as error:
            ended.append(error.code)

    async with nothing_left():
        for ticks in range(8):
            ended.clear()
            async with anyio.create_task_group() as tasks:
                async with rota.Engine(llama.model, {"a": one}, **SMALL) as engine:
                    for call in (
                        lambda e=engine: ids(e, llama.prompt("base") * 4, "a", 400),
                        lambda e=engine: e.replace("a", two),
                        lambda e=engine: e.load("b", one),
                        lambda e=engine: e.prefetch("c", two),
                    ):
                        tasks.start_soon(heard, call)
                    for _ in range(ticks):
                        await anyio.lowlevel.checkpoint()
            assert "engine-closed" in ended and len(set(ended)) == 1


async def test_two_hundred_requests_over_thirty_adapters_in_four_slots(llama: Any) -> None:
    one, two = llama.adapter("attn_mlp_r8"), llama.adapter("rslora_r16_bf16")
    prompt = llama.prompt("attn_mlp_r8")
    rng = random.Random(7)
    options = {**SMALL, "image_cache_bytes": 0, "max_running": 16}
    refused = {"unknown-adapter", "adapter-unloaded", "not-resident", "name-exists", "slot-pinned"}
    async with rota.Engine(llama.model, None, **options) as engine:
        await engine.load("x", one)
        await engine.load("y", two)
        right = [await ids(engine, prompt, name, 8) for name in ("x", "y")]
        assert right[0] != right[1]
        for name in ("x", "y"):
            await engine.unload(name)
        names = [f"n{i}" for i in range(30)]
        for index, name in enumerate(names):
            await engine.register(name, (one, two)[index % 2])
        served = 0

        async def request(name: str) -> None:
            nonlocal served
            try:
                assert await ids(engine, prompt, name, 8) in right
                served += 1
            except rota.RotaError as error:
                assert error.code in refused, error

        async def commands() -> None:
            for _ in range(60):
                name, source = rng.choice(names), rng.choice((one, two))
                call: Callable[[], Awaitable[Any]] = rng.choice(
                    (
                        lambda n=name, s=source: engine.replace(n, s),
                        lambda n=name, s=source: engine.swap(n, s, rng.randrange(4)),
                        lambda n=name, s=source: engine.load(n, s),
                        lambda n=name: engine.unload(n),
                        lambda n=name: engine.promote(n),
                        lambda n=name: engine.unpin(n),
                    )
                )
                try:
                    await call()
                except rota.RotaError as error:
                    assert error.code in refused, error

        with anyio.fail_after(120):
            async with anyio.create_task_group() as tasks:
                for _ in range(200):
                    tasks.start_soon(request, rng.choice(names))
                tasks.start_soon(commands)
        assert served > 100
        stats = await idle(engine)
        assert (
            stats.blocks_free + stats.blocks_cached == stats.blocks_total and stats.image_bytes == 0
        )


async def test_a_directory_that_changes_is_a_new_version_and_a_lost_one_an_error(
    llama: Any, tmp_path: Path
) -> None:
    one, two = llama.adapter("attn_mlp_r8"), llama.adapter("rslora_r16_bf16")
    prompt, place = llama.prompt("attn_mlp_r8"), tmp_path / "a"
    shutil.copytree(one, place)
    options = {**SMALL, "max_loras": 1, "image_cache_bytes": 0}
    async with rota.Engine(llama.model, None, **options) as engine:
        first = await engine.load("a", place)
        await engine.load("b", two)  # takes the only slot
        other = await ids(engine, prompt, "b")
        shutil.rmtree(place)
        shutil.copytree(two, place)
        assert await ids(engine, prompt, "a") == other
        second = next(a for a in engine.stats().adapters if a.name == "a")
        assert second.generation == first.generation + 1, "new content is never the old identity"
        await engine.promote("b")
        shutil.rmtree(place)
        with pytest.raises(rota.StagingError) as gone:
            await ids(engine, prompt, "a", 4)
        assert gone.value.code == "adapter-unreadable"
        shutil.copytree(one, place)
        await engine.promote("a")
        assert await ids(engine, prompt, "a") == llama.greedy("attn_mlp_r8")


async def test_an_adapter_with_a_nan_is_refused_by_tensor(llama: Any, tmp_path: Path) -> None:
    place = tmp_path / "nan"
    shutil.copytree(llama.adapter("attn_mlp_r8"), place)
    tensors = load_file(place / "adapter_model.safetensors")
    key = sorted(tensors)[0]
    tensors[key][0, 0] = float("nan")
    save_file(tensors, place / "adapter_model.safetensors")
    async with rota.Engine(llama.model, None, **SMALL) as engine:
        with pytest.raises(rota.RejectError) as caught:
            await engine.load("nan", place)
        assert (caught.value.code, caught.value.subject) == ("non-finite", key)


@pytest.mark.parametrize(
    "tight",
    [
        {"max_step_tokens": 1},
        {"mixed_step_tokens": 1},
        {"max_running": 1},
        {"max_step_tokens": 1, "mixed_step_tokens": 1, "max_running": 1},
        {"kv_bytes": 20000},
    ],
)
async def test_tight_limits_change_no_token(llama: Any, tight: dict[str, int]) -> None:
    options = {**SMALL, **tight}
    async with rota.Engine(llama.model, {"a": llama.adapter("attn_mlp_r8")}, **options) as engine:

        async def one(case: str, adapter: str | None) -> None:
            assert await ids(engine, llama.prompt(case), adapter) == llama.greedy(case)

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(one, "base", None)
                    tasks.start_soon(one, "attn_mlp_r8", "a")


def test_thirty_engines_one_after_the_other_in_a_thread_of_their_own(llama: Any) -> None:
    """Threads and open files stay as they were after the first one."""
    seen: list[tuple[int, int]] = []

    async def life() -> None:
        async with rota.Engine(llama.model, {"a": llama.adapter("attn_mlp_r8")}, **SMALL) as engine:
            assert await ids(engine, llama.prompt("base"), None) == llama.greedy("base")

    def lives() -> None:
        for turn in range(30):
            anyio.run(life, backend=("asyncio", "trio")[turn % 2])
            gc.collect()
            seen.append((threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))))

    thread = threading.Thread(target=lives)
    thread.start()
    thread.join()
    assert len(seen) == 30 and max(seen[2:]) <= max(seen[:2]), seen


def test_a_process_killed_with_a_running_engine_leaves_nothing(llama: Any, tmp_path: Path) -> None:
    program = (
        "import anyio, rota, sys\n"
        "async def main():\n"
        f"    async with rota.Engine({str(llama.model)!r}, None, use_numba=False, "
        "kv_bytes=1 << 22, max_lora_rank=16) as engine:\n"
        "        async for event in engine.generate([1, 2], None,\n"
        "                rota.SamplingParams(max_tokens=400, ignore_eos=True)):\n"
        "            print('token', flush=True)\n"
        "anyio.run(main)\n"
    )
    shared = set(Path("/dev/shm").iterdir())
    with subprocess.Popen(
        [sys.executable, "-P", "-c", program], stdout=subprocess.PIPE, cwd=tmp_path
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"token\n"
        process.kill()
        assert process.wait(60) == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []
    assert set(Path("/dev/shm").iterdir()) <= shared
