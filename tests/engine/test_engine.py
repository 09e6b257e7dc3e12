"""The real engine on the tiny checkpoints, against transformers + PEFT, on asyncio and trio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import trio

import rota

from .asking import greedy, ids

pytestmark = pytest.mark.anyio

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "max_loras": 4,
    "max_lora_rank": 16,
    "kv_bytes": 1 << 22,
    "use_numba": True,
}


async def test_base_and_adapters_match_the_oracle_alone_and_mixed(llama: Any) -> None:
    cases = {"base": None, "attn_mlp_r8": "attn_mlp_r8", "rslora_r16_bf16": "rslora_r16_bf16"}
    adapters = {c: llama.adapter(c) for c in cases if c != "base"}
    async with rota.Engine(llama.model, adapters, **SMALL) as engine:
        alone = {c: await ids(engine, llama.prompt(c), a) for c, a in cases.items()}
        mixed: dict[str, list[int]] = {}

        async def one(case: str) -> None:
            mixed[case] = await ids(engine, llama.prompt(case), cases[case])

        async with anyio.create_task_group() as tasks:
            for case in cases:
                tasks.start_soon(one, case)
        for case in cases:
            assert alone[case] == llama.greedy(case), case
            assert mixed[case] == llama.greedy(case), case


async def test_other_families_match_the_oracle(oracle: Any) -> None:
    adapters = {"a": oracle.adapter("attn_mlp_r8")}
    async with rota.Engine(oracle.model, adapters, **SMALL) as engine:
        assert await ids(engine, oracle.prompt("base"), None) == oracle.greedy("base")
        case = "attn_mlp_r8"
        assert await ids(engine, oracle.prompt(case), "a") == oracle.greedy(case)


async def test_fifty_replaces_under_eight_streams(llama: Any) -> None:
    """No stream ends early, and no token comes from another version than the one leased."""
    versions = [llama.adapter("attn_mlp_r8"), llama.adapter("rslora_r16_bf16")]
    prompt = llama.prompt("attn_mlp_r8")
    other = llama.prompt("base")
    async with rota.Engine(llama.model, {"steady": versions[0]}, **SMALL) as engine:
        expected = {}
        for index, source in enumerate(versions):
            await engine.load(f"probe{index}", source)
            expected[index] = await ids(engine, prompt, f"probe{index}", 20)
            await engine.unload(f"probe{index}")
        steady = await ids(engine, other, "steady", 60)
        base = await ids(engine, other, None, 60)
        assert expected[0] != expected[1] and steady != base
        first = await engine.load("hot", versions[0])
        by_id = {first.adapter_id: 0}
        done = anyio.Event()
        hot_runs = 0

        async def stream(adapter: str | None, want: list[int]) -> None:
            while True:
                assert await ids(engine, other, adapter, 60) == want
                if done.is_set():
                    return

        async def hot() -> None:
            nonlocal hot_runs
            while not done.is_set():
                events = [e async for e in engine.generate(prompt, "hot", greedy(20))]
                seen = {e.adapter_id for e in events}
                assert len(seen) == 1, "a request never mixes versions"
                await anyio.lowlevel.checkpoint()
                runs.append((seen.pop(), [e.token_id for e in events if e.token_id is not None]))
                hot_runs += 1

        runs: list[tuple[int, list[int]]] = []
        async with anyio.create_task_group() as tasks:
            for index in range(8):
                adapter = "steady" if index % 2 else None
                tasks.start_soon(stream, adapter, steady if index % 2 else base)
            tasks.start_soon(hot)
            for turn in range(1, 51):
                reply = await engine.replace("hot", versions[turn % 2])
                assert (reply.outcome, reply.generation) == ("done", turn + 1)
                by_id[reply.adapter_id] = turn % 2
            done.set()
        assert len(by_id) == 51 and runs
        for ident, tokens in runs:
            assert tokens == expected[by_id[ident]], "the right weights for the version it leased"


async def test_a_bad_adapter_hurts_only_its_own_call(llama: Any, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"PK\x03\x04 not safetensors")
    async with rota.Engine(llama.model, {"a": llama.adapter("attn_mlp_r8")}, **SMALL) as engine:
        stream = engine.generate(llama.prompt("attn_mlp_r8"), "a", greedy())
        tokens = [(await stream.__anext__()).token_id]
        for call in (engine.load("bad", tmp_path), engine.replace("a", tmp_path)):
            with pytest.raises(rota.RejectError):
                await call
        with pytest.raises(rota.RotaError) as gone:
            await engine.load("none", tmp_path / "absent")
        assert isinstance(gone.value, rota.RejectError | rota.StagingError)
        tokens += [e.token_id async for e in stream]
        assert tokens == llama.greedy("attn_mlp_r8")
        assert [a.name for a in engine.stats().adapters] == ["a"]


async def test_refusals_are_named(llama: Any) -> None:
    async with rota.Engine(llama.model, {"a": llama.adapter("attn_mlp_r8")}, **SMALL) as engine:
        limit = engine.info.context_length
        refusals: list[tuple[Callable[[], Any], str]] = [
            (lambda: engine.generate([1] * (limit + 1), None), "prompt-too-long"),
            (lambda: engine.generate([1, 2], "nobody"), "unknown-adapter"),
            (lambda: engine.generate([], None), "empty-prompt"),
            (lambda: engine.generate([99999], None), "bad-token"),
            (lambda: engine.generate("text", None), "no-tokenizer"),
        ]
        for call, code in refusals:
            with pytest.raises(rota.RequestError) as caught:
                async for _ in call():
                    pass
            assert caught.value.code == code
        with pytest.raises(rota.CommandError) as taken:
            await engine.load("a", llama.adapter("attn_mlp_r8"))
        assert taken.value.code == "name-exists"
        with pytest.raises(rota.CommandError) as unknown:
            await engine.replace("nobody", llama.adapter("attn_mlp_r8"))
        assert unknown.value.code == "unknown-adapter"
        assert await ids(engine, llama.prompt("base"), None) == llama.greedy("base")


async def test_a_rank_over_the_pool_is_refused_with_both_numbers(llama: Any) -> None:
    options = {**SMALL, "max_lora_rank": 8}
    async with rota.Engine(llama.model, None, **options) as engine:
        with pytest.raises(rota.RejectError) as caught:
            await engine.load("big", llama.adapter("rslora_r16_bf16"))
        assert caught.value.code == "rank-exceeds-pool"
        assert "8" in str(caught.value.expected) and "16" in str(caught.value.found)


async def test_no_memory_for_the_pool_is_named_and_leaves_nothing(llama: Any) -> None:
    before = threading.active_count()
    options = {**SMALL, "max_loras": 4096, "max_lora_rank": 1024}
    with pytest.raises(rota.DeviceError) as caught:
        async with rota.Engine(llama.model, None, **options):
            raise AssertionError("must not start")
    assert caught.value.code == "pool-too-large"
    assert threading.active_count() <= before + 1  # anyio keeps an idle worker thread


async def test_a_bad_startup_adapter_stops_the_start_by_name(llama: Any, tmp_path: Path) -> None:
    with pytest.raises(rota.RotaError):
        async with rota.Engine(llama.model, {"bad": tmp_path}, **SMALL):
            raise AssertionError("must not start")


async def test_each_startup_adapter_is_told_when_it_is_loaded(llama: Any) -> None:
    told: list[tuple[str, int]] = []
    sources = {"a": llama.adapter("attn_mlp_r8"), "b": llama.adapter("rslora_r16_bf16")}
    options = {**SMALL, "max_lora_rank": 16}
    async with rota.Engine(
        llama.model, sources, on_load=lambda name, reply: told.append((name, reply.slot)), **options
    ) as engine:
        assert sorted(told) == sorted((s.name, s.index) for s in engine.stats().slots if s.name)
        await engine.load("c", sources["a"])
        assert len(told) == 2, "later loads have callers of their own"


async def test_bytes_and_directory_give_the_same_version(llama: Any) -> None:
    path = llama.adapter("attn_mlp_r8")
    raw = (
        (path / "adapter_model.safetensors").read_bytes(),
        (path / "adapter_config.json").read_bytes(),
    )
    async with rota.Engine(llama.model, {"a": path}, **SMALL) as engine:
        assert (await engine.replace("a", raw)).outcome == "unchanged", "same digest"
        await engine.load("b", raw)
        prompt = llama.prompt("attn_mlp_r8")
        assert await ids(engine, prompt, "b") == llama.greedy("attn_mlp_r8")


async def test_a_replaced_directory_comes_back_from_the_host_cache(llama: Any) -> None:
    one, two = llama.adapter("attn_mlp_r8"), llama.adapter("rslora_r16_bf16")
    options = {**SMALL, "max_lora_rank": 16}
    async with rota.Engine(llama.model, {"a": one}, **options) as engine:
        first = await engine.replace("a", two)
        await engine.replace("a", one)
        again = await engine.replace("a", two)
        assert again.report is first.report, "the image of the first replace, not a new one"
        assert again.adapter_id != first.adapter_id
        assert await ids(engine, llama.prompt("rslora_r16_bf16"), "a") == llama.greedy(
            "rslora_r16_bf16"
        )
        raw = tuple(
            (two / f"adapter_{n}").read_bytes() for n in ("model.safetensors", "config.json")
        )
        held = engine.stats().image_bytes
        for source in (raw, one, raw, one):
            assert (await engine.replace("a", source)).outcome in ("done", "unchanged")
        assert engine.stats().image_bytes == held, "bytes nobody can find again are not kept"


async def test_default_adapter_rotates_for_later_requests_only(llama: Any) -> None:
    prompt = llama.prompt("attn_mlp_r8")
    async with rota.Engine(llama.model, {"a": llama.adapter("attn_mlp_r8")}, **SMALL) as engine:
        running = engine.generate(prompt, rota.DEFAULT, greedy(12))
        first = await running.__anext__()
        await engine.rotate("a")
        assert await ids(engine, prompt, rota.DEFAULT) == llama.greedy("attn_mlp_r8")
        rest = [e.token_id async for e in running]
        assert [first.token_id, *rest] == await ids(engine, prompt, None)


async def test_close_ends_running_requests_by_name(llama: Any) -> None:
    engine = rota.Engine(llama.model, None, **SMALL)
    async with engine:
        stream = engine.generate(llama.prompt("base"), None, greedy(200))
        await stream.__anext__()
    with pytest.raises(rota.EngineClosedError):
        async for _ in stream:
            pass
    with pytest.raises(rota.EngineClosedError):
        engine.stats()
    with pytest.raises(rota.EngineClosedError):
        engine.generate([1], None)


async def test_cancelling_the_embedder_closes_in_order(llama: Any) -> None:
    with anyio.CancelScope() as scope:
        async with rota.Engine(llama.model, None, **SMALL) as engine:
            async for event in engine.generate(llama.prompt("base"), None, greedy(200)):
                if event.index == 3:
                    scope.cancel()
                    await anyio.lowlevel.checkpoint()
    assert scope.cancelled_caught


async def test_two_engines_live_side_by_side(llama: Any) -> None:
    async with rota.Engine(llama.model, None, **SMALL) as one:
        async with rota.Engine(llama.model, None, **SMALL) as two:
            assert await ids(two, llama.prompt("base"), None) == llama.greedy("base")
        assert await ids(one, llama.prompt("base"), None) == llama.greedy("base")


async def test_prefetch_makes_promotion_one_copy(llama: Any) -> None:
    async with rota.Engine(llama.model, None, **SMALL) as engine:
        reply = await engine.prefetch("a", llama.adapter("attn_mlp_r8"))
        assert (reply.outcome, reply.slot) == ("prefetched", -1)
        stages = engine.stats().stages
        assert (await engine.promote("a")).outcome == "done"
        assert engine.stats().stages == stages
        prompt = llama.prompt("attn_mlp_r8")
        assert await ids(engine, prompt, "a") == llama.greedy("attn_mlp_r8")


async def test_unknown_options_are_refused(llama: Any) -> None:
    with pytest.raises(rota.RequestError) as caught:
        rota.Engine(llama.model, None, max_lorras=3)
    assert caught.value.code == "bad-option"


async def test_a_broken_engine_says_so_to_a_health_check(llama: Any) -> None:
    async with rota.Engine(llama.model, None, **SMALL) as engine:
        assert engine._parts is not None
        engine._parts.shell.abort("for the test")
        with pytest.raises(rota.EngineClosedError) as caught:
            engine.stats()
        assert caught.value.code == "close-timeout"


@pytest.mark.parametrize("program", ["asyncio", "trio"])
def test_an_engine_lives_in_a_program_that_knows_nothing_of_anyio(llama: Any, program: str) -> None:
    async def main() -> list[int]:
        async with rota.Engine(llama.model, **SMALL) as engine:
            await engine.load("x", llama.adapter("attn_mlp_r8"))
            return await ids(engine, llama.prompt("attn_mlp_r8"), "x", 4)

    got = asyncio.run(main()) if program == "asyncio" else trio.run(main)
    assert got == llama.greedy("attn_mlp_r8")[:4]
