"""What ``/metrics`` says, against what was done to the engine."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

import rota
from rota.sched.sim.engine import SimEngine
from rota.sched.timings import Timings
from rota.sched.web.metrics import HttpMetrics

pytestmark = pytest.mark.anyio
ADMIN = "admin-key-for-tests"
A, B = b"tensors of a", b"tensors of b"
LAST = ("le", "+Inf")


async def said(face: Any, model: str) -> str:
    got = await face.post("/v1/completions", {"model": model, "prompt": "abc", "max_tokens": 6})
    assert got.status_code == 200, got.text
    return str(got.json()["choices"][0]["text"])


def samples(page: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(page)
        for s in family.samples
    }


@pytest.mark.parametrize("ipc", [False, True])
async def test_metrics_speak_the_gateways_protocol(serving: Any, adapter: Any, ipc: bool) -> None:
    async with serving(ipc=ipc) as face:
        for name in ("a", "b,c"):
            body = {"name": name, "path": adapter(name, name.encode())}
            assert (await face.post("/v1/lora/load", body, ADMIN)).status_code == 200
        await face.engine.register("cold", adapter("cold", b"c"))
        await said(face, "a")
        await face.settled()
        got = samples((await face.http.get("/metrics")).text)
        info = (
            ("max_lora", "4"),
            ("running_lora_adapters", "a,b%2Cc"),
            ("waiting_lora_adapters", ""),
        )
        assert got[("vllm:lora_requests_info", info)] == 1_700_000_000.0
        for name, value in (
            ("vllm:num_requests_waiting", 0),
            ("vllm:num_requests_running", 0),
            ("vllm:kv_cache_usage_perc", 0),
            ("rota_generated_tokens_total", 6),
            ("rota_commits_total", 2),
            ("rota_time_to_first_token_seconds_count", 1),
        ):
            assert got[(name, ())] == value, name
        assert got[("rota_adapters", (("level", "device"),))] == 2
        assert got[("rota_adapters", (("level", "cold"),))] == 1
        assert got[("rota_adapter_residency", (("adapter", "a"), ("level", "device")))] == 1
        assert got[("rota_adapter_command_seconds_count", ())] == 2
        assert (
            got[("rota_commit_seconds_count", ())] == got[("rota_barrier_seconds_count", ())] == 2
        )
        last = (("le", "+Inf"),)
        assert got[("rota_commit_seconds_bucket", last)] == 2
        assert got[("rota_slot_wait_seconds_total", ())] >= 0
        assert got[("rota_slots", (("state", "READY"),))] == 2
        for cause in ("idle", "drained", "swapped", "replaced"):
            assert got[("rota_evictions_total", (("cause", cause),))] == 0
        route = (("route", "/v1/completions"), ("status", "200"))
        assert got[("rota_http_requests_total", route)] == 1


async def test_evictions_are_counted_by_what_caused_them(serving: Any, adapter: Any) -> None:
    async with serving(engine={"max_loras": 1, "drain_after_s": 0.0}) as face:

        async def causes() -> dict[str, float]:
            got = samples((await face.http.get("/metrics")).text)
            return {
                labels[0][1]: value
                for (name, labels), value in got.items()
                if name == "rota_evictions_total" and value
            }

        await face.engine.load("a", adapter("a", A))
        await face.engine.replace("a", adapter("a2", b"another"))
        assert await causes() == {"replaced": 1}
        await face.engine.load("b", adapter("b", B))
        assert await causes() == {"replaced": 1, "idle": 1}
        await face.engine.swap("a", None, 0)
        assert await causes() == {"replaced": 1, "idle": 1, "swapped": 1}
        busy = face.engine.generate([1], "a")
        await busy.__anext__()
        await face.engine.promote("b")
        assert (await causes())["drained"] == 1
        busy.cancel()


async def test_metrics_stay_few_however_many_names_and_paths(serving: Any, adapter: Any) -> None:
    async with serving(metrics_adapters=5) as face:
        path = adapter("a", A)
        await face.engine.load("loaded", path)

        async def series() -> int:
            return len(samples((await face.http.get("/metrics")).text))

        for i in range(10):
            await face.engine.register(f"n{i}", path)
            await face.http.get(f"/v1/models/{i}")
        await face.http.get("/metrics")
        before = await series()
        for i in range(200):
            await face.engine.register(f"m{i}", path)
            await face.http.get(f"/v1/models/{i}")
            await face.http.get(f"/nowhere/{i}")
        page = (await face.http.get("/metrics")).text
        assert 'adapter="loaded"' in page
        assert len(samples(page)) <= before + 1  # one status, 404, that was not seen before


async def test_what_runs_and_waits_now(serving: Any, adapter: Any) -> None:
    """Two requests on one adapter's only slot, and a third for an adapter that must wait for it."""
    step = threading.Event()
    engine = {"max_loras": 1, "drain_after_s": 1e6}
    async with serving(engine=engine) as face:
        await face.engine.load("busy", (A, b"{}"))
        await face.engine.register("cold,one", adapter("cold", b"c"))
        real = face.engine.executor.step

        def held(rows: Any) -> Any:
            step.wait(20)
            return real(rows)

        face.engine.executor.step = held
        prompt = list(range(40))  # two blocks and a half
        sampling = rota.SamplingParams(max_tokens=60)
        running = [face.engine.generate(prompt, "busy", sampling) for _ in range(2)]
        waiting = face.engine.generate([1], "cold,one", sampling)
        with anyio.fail_after(20):
            while face.engine.stats().prefilling < 2 or face.engine.stats().waiting < 1:
                await anyio.lowlevel.checkpoint()
        got = samples((await face.http.get("/metrics")).text)
        info = {
            "max_lora": "1",
            "running_lora_adapters": "busy",
            "waiting_lora_adapters": "cold%2Cone",
        }
        assert got[("vllm:lora_requests_info", tuple(sorted(info.items())))] > 0
        for prefix in ("vllm:num_", "rota_"):
            assert got[(f"{prefix}requests_running", ())] == 2
            assert got[(f"{prefix}requests_waiting", ())] == 1
        total, free = got[("rota_kv_blocks_total", ())], got[("rota_kv_blocks_free", ())]
        used = got[("vllm:kv_cache_usage_perc", ())]
        assert 0 < used < 1 and used == pytest.approx(1 - free / total)
        assert got[("rota_slots", (("state", "IN_USE"),))] == 1
        assert got[("rota_slot_leases", (("slot", "0"),))] == 2
        assert got[("rota_adapter_jobs", ())] == 1
        step.set()
        for stream in (*running, waiting):
            stream.cancel()
        await face.settled()
        got = samples((await face.http.get("/metrics")).text)
        assert got[("rota_requests_running", ())] == got[("rota_requests_waiting", ())] == 0
        assert got[("rota_requests_ended_total", ())] == 3


async def test_prefix_hits_are_counted_by_adapter(serving: Any) -> None:
    async with serving() as face:
        await face.engine.load("a", (A, b"{}"))
        await face.engine.load("b", (B, b"{}"))
        prompt = "x" * 40  # its last block is not full
        for model, times in (("a", 3), ("b", 1), ("base", 2)):
            for _ in range(times):
                body = {"model": model, "prompt": prompt, "max_tokens": 1}
                assert (await face.post("/v1/completions", body)).status_code == 200
        got = samples((await face.http.get("/metrics")).text)

        def of(field: str) -> list[float]:
            name = f"rota_adapter_prefix_{field}_tokens_total"
            return [got[(name, (("adapter", a),))] for a in ("a", "b", "")]

        assert of("queried") == [120, 40, 80] and of("hit") == [64, 0, 32]
        assert got[("rota_prefix_queried_tokens_total", ())] == 240
        assert got[("rota_prefix_hit_tokens_total", ())] == 96


@pytest.mark.parametrize("stream", [False, True])
async def test_gaps_are_those_between_tokens_of_one_request(serving: Any, stream: bool) -> None:
    async with serving(engine={"step_s": 0.002}) as face:
        for _ in range(2):
            body = {"prompt": "abc", "max_tokens": 6, "stream": stream}
            await face.post("/v1/completions", body)
        got = samples((await face.http.get("/metrics")).text)
        assert got[("rota_time_to_first_token_seconds_count", ())] == 2
        assert got[("rota_inter_token_seconds_count", ())] == 10
        assert got[("rota_inter_token_seconds_bucket", (LAST,))] == 10
        # Each is as long as a step at least, where tokens are read as they come.
        assert got[("rota_inter_token_seconds_sum", ())] > 0


async def test_staging_is_told_by_phase() -> None:
    async with SimEngine() as engine:
        stats = engine.stats()
    timings = Timings(lambda: 0.0)
    timings.staged({"read": 0.25, "audit": 0.5})
    timings.staged({"resolve": 0.03, "transfer": 2.0, "verify": 0.125})
    stats = msgspec.structs.replace(stats, times=timings.snapshot())
    got = samples(HttpMetrics().render(stats, 5, lambda: 0.0).decode())
    seconds = {
        labels[0][1]: value
        for (name, labels), value in got.items()
        if name == "rota_adapter_load_seconds_sum" and value
    }
    assert seconds == {
        **{"read": 0.25, "audit": 0.5},
        **{"resolve": 0.03, "transfer": 2.0, "verify": 0.125},
    }
    one = ("phase", "transfer")
    name = "rota_adapter_load_seconds_bucket"
    assert [got[(name, tuple(sorted((("le", le), one))))] for le in ("1.0", "2.5", "+Inf")] == [
        *(0, 1, 1),
    ]
