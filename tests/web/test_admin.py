"""Adapter routes, keys, limits and health."""

from __future__ import annotations

import math
import threading
from collections.abc import AsyncIterator
from typing import Any

import anyio
import httpx2
import msgspec
import pytest

from rota.errors import DeviceError
from rota.gpu.lora.safefile import FileLimits
from rota.gpu.lora.source import DirectorySource
from rota.sched.sim.engine import SimEngine, sim_content, sim_text
from rota.sched.web.app import create_app
from rota.sched.web.settings import HttpSettings

pytestmark = pytest.mark.anyio
ADMIN = "admin-key-for-tests"
API = "api-key-for-tests"
A, B = b"tensors of a", b"tensors of b"


async def said(face: Any, model: str) -> str:
    got = await face.post("/v1/completions", {"model": model, "prompt": "abc", "max_tokens": 6})
    assert got.status_code == 200, got.text
    return str(got.json()["choices"][0]["text"])


def text(tensors: bytes) -> str:
    return sim_text(sim_content(tensors, b"{}"), 3, 6)


@pytest.mark.parametrize("ipc", [False, True])
async def test_vllms_dynamic_calls_as_documented(serving: Any, adapter: Any, ipc: bool) -> None:
    a, b = adapter("a", A), adapter("b", B)
    async with serving(ipc=ipc) as face:
        load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
        got = await face.post(load, {"lora_name": "sql", "lora_path": a}, ADMIN)
        assert (got.status_code, got.text) == (
            200,
            "Success: LoRA adapter 'sql' added successfully.",
        )
        assert await said(face, "sql") == text(A)
        again = await face.post(load, {"lora_name": "sql", "lora_path": b}, ADMIN)
        assert (again.status_code, again.json()["error"]["code"]) == (409, "name-exists")
        inplace = {"lora_name": "sql", "lora_path": b, "load_inplace": True}
        assert (await face.post(load, inplace, ADMIN)).status_code == 200
        assert await said(face, "sql") == text(B)
        fresh = {"lora_name": "new", "lora_path": a, "load_inplace": True}
        assert (await face.post(load, fresh, ADMIN)).status_code == 200
        gone = await face.post(unload, {"lora_name": "sql"}, ADMIN)
        assert gone.text == "Success: LoRA adapter 'sql' removed successfully."
        missing = await face.post(unload, {"lora_name": "sql"}, ADMIN)
        assert missing.status_code == 404


@pytest.mark.parametrize("ipc", [False, True])
async def test_rotas_own_routes(serving: Any, adapter: Any, ipc: bool) -> None:
    a, b = adapter("a", A), adapter("b", B)
    async with serving(ipc=ipc) as face:

        async def post(what: str, **body: Any) -> Any:
            got = await face.post(f"/v1/lora/{what}", body, ADMIN)
            assert got.status_code == 200, got.text
            return got.json()

        loaded = await post("load", name="x", path=a)
        assert (loaded["object"], loaded["loaded"], loaded["slot"]) == ("lora.loaded", "x", 0)
        assert loaded["adapter_id"].isdigit()
        assert (await post("load", name="y", path=b, slot=2))["slot"] == 2
        assert (await post("active", adapter="y")) == {"object": "lora.active", "active": "y"}
        auth = {"Authorization": f"Bearer {ADMIN}"}
        active = await face.http.get("/v1/lora/active", headers=auth)
        assert active.json()["active"] == "y"
        await post("active", adapter=None)
        await post("pin", name="x")
        await post("unpin", name="x")
        assert (await post("register", name="z", path=a))["outcome"] == "registered"
        assert (await post("prefetch", name="z"))["outcome"] == "prefetched"
        assert (await post("promote", name="z"))["slot"] == 1
        assert (await post("replace", name="z", path=b))["generation"] == 2
        assert await said(face, "z") == text(B)
        seen = (await face.http.get("/v1/lora/inspect/z", headers=auth)).json()
        assert seen["state"] == "resident" and seen["generation"] == 2 and seen["story"]
        assert seen["staged"] == {
            "digest": DirectorySource(b).read(FileLimits()).digest(),
            "report": None,
        }  # a simulated engine
        await post("register", name="later", path=a)
        cold = (await face.http.get("/v1/lora/inspect/later", headers=auth)).json()
        assert cold["staged"] is None
        assert (await post("unload", name="z"))["outcome"] == "unloaded"
        assert (await face.http.get("/v1/lora/inspect/z", headers=auth)).status_code == 404


async def test_paths_are_taken_from_the_allow_list_only(
    serving: Any, adapter: Any, tmp_path: Any
) -> None:
    a, outside = adapter("a", A), adapter("outside", B)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "link").symlink_to(outside)
    async with serving(directories=(str(tmp_path / "in"),)) as face:
        for path in (a, outside, str(tmp_path / "in" / "link"), "/etc", f"{tmp_path}/in/../a"):
            got = await face.post("/v1/lora/load", {"name": "x", "path": path}, ADMIN)
            assert (got.status_code, got.json()["error"]["code"]) == (403, "path-not-allowed")
        bad = await face.post("/v1/lora/load", {"name": "x", "path": "relative"}, ADMIN)
        assert bad.json()["error"]["code"] == "bad-path"
    async with serving(directories=()) as face:
        got = await face.post("/v1/lora/load", {"name": "x", "path": a}, ADMIN)
        assert got.status_code == 403


async def test_a_refused_adapter_is_a_named_400(serving: Any, adapter: Any) -> None:
    async with serving() as face:
        path = adapter("bad", A, b'"refuse"')
        got = await face.post("/v1/lora/load", {"name": "x", "path": path}, ADMIN)
        error = got.json()["error"]
        assert (got.status_code, error["code"], error["rota"]["kind"]) == (
            400,
            "sim-refused",
            "RejectError",
        )
        page = (await face.http.get("/metrics")).text
        assert 'rota_adapter_commands_refused_total{kind="RejectError"} 1.0' in page


async def test_admin_routes_are_off_without_an_admin_key(serving: Any, adapter: Any) -> None:
    async with serving(admin_keys=(), api_keys=(API,)) as face:
        for key in (None, API, ADMIN):
            got = await face.post("/v1/lora/load", {"name": "x", "path": "/x"}, key)
            assert (got.status_code, got.json()["error"]["code"]) == (403, "admin-disabled")


async def test_keys(serving: Any) -> None:
    async with serving(api_keys=(API,)) as face:
        body = {"prompt": "abc"}
        for key, status in ((None, 401), ("wrong", 401), (API, 200), (ADMIN, 200)):
            assert (await face.post("/v1/completions", body, key)).status_code == status
        for key, status in ((None, 401), (API, 401), (ADMIN, 200)):
            got = await face.post("/v1/lora/active", {"adapter": None}, key)
            assert got.status_code == status
        assert (await face.http.get("/v1/models")).status_code == 401
        basic = {"Authorization": f"Basic {API}"}
        assert (await face.http.get("/v1/models", headers=basic)).status_code == 401
        assert got.headers.get("www-authenticate") is None
        for path in ("/health", "/version", "/metrics"):
            assert (await face.http.get(path)).status_code == 200


async def test_full_queues_say_when_to_come_back(serving: Any) -> None:
    engine = {"max_running": 1, "max_waiting": 1, "step_s": 0.001}
    async with serving(engine=engine) as face:
        held = [face.engine.generate([1], None) for _ in range(2)]
        await held[0].__anext__()
        held.append(face.engine.generate([1], None))
        got = await face.post("/v1/completions", {"prompt": "abc"})
        assert (got.status_code, got.json()["error"]["code"]) == (503, "QUEUE_FULL")
        assert int(got.headers["retry-after"]) >= 1
        for stream in held:
            stream.cancel()


async def test_a_full_pool_is_503(serving: Any, adapter: Any) -> None:
    async with serving(engine={"max_loras": 1}) as face:
        await face.engine.load("a", (A, b"{}"), pin=True)
        got = await face.post("/v1/lora/load", {"name": "b", "path": adapter("b", B)}, ADMIN)
        assert (got.status_code, got.json()["error"]["code"]) == (503, "POOL_FULL")
        hint = got.json()["error"]["rota"]["retry_after_s"]
        assert hint > 0 and int(got.headers["retry-after"]) == max(1, math.ceil(hint))


@pytest.mark.parametrize("ipc", [False, True])
async def test_a_failed_adapter_says_when_it_is_tried_again(serving: Any, ipc: bool) -> None:
    async with serving(ipc=ipc, engine={"failure_backoff_s": 50.0}) as face:
        await face.engine.register("bad", (A, b"refuse"))
        await face.engine.register("gone", "/nowhere/at/all")
        body = {"model": "bad", "prompt": "x"}
        assert (await face.post("/v1/completions", body)).status_code == 400
        again = await face.post("/v1/completions", body)
        assert (again.status_code, again.json()["error"]["code"]) == (400, "sim-refused")
        assert 1 <= int(again.headers["retry-after"]) <= 50
        body = {"model": "gone", "prompt": "x"}
        assert (await face.post("/v1/completions", body)).status_code in (400, 502)
        again = await face.post("/v1/completions", body)
        hint = again.json()["error"]["rota"]["retry_after_s"]
        assert 0 < hint <= 50 and int(again.headers["retry-after"]) == math.ceil(hint)


@pytest.mark.parametrize("ipc", [False, True])
async def test_the_pool_is_resized(serving: Any, adapter: Any, ipc: bool) -> None:
    async with serving(ipc=ipc, engine={"max_loras": 1}) as face:
        await face.engine.load("a", (A, b"{}"), pin=True)
        got = await face.post("/v1/lora/resize", {"max_loras": 2}, ADMIN)
        assert (got.status_code, got.json()["outcome"]) == (200, "resized")
        path = {"name": "b", "path": adapter("b", B)}
        assert (await face.post("/v1/lora/load", path, ADMIN)).status_code == 200
        assert await said(face, "a") == text(A) and await said(face, "b") == text(B)
        got = await face.post("/v1/lora/resize", {"max_lora_rank": 0}, ADMIN)
        assert (got.status_code, got.json()["error"]["code"]) == (400, "bad-resize")
        got = await face.post("/v1/lora/resize", {"max_loras": 3})
        assert got.status_code in (401, 403)


async def test_bodies_have_limits(serving: Any) -> None:
    async with serving(max_body_bytes=1000, body_timeout_s=0.05) as face:
        json_type = {"content-type": "application/json"}

        async def send(content: Any, headers: Any) -> tuple[int, str]:
            got = await face.http.post("/v1/completions", content=content, headers=headers)
            return got.status_code, got.json()["error"]["code"]

        async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
            for part in parts:
                yield part

        large = b'{"prompt": "' + b"x" * 2000 + b'"}'
        assert await send(large, json_type) == (413, "body-too-large")
        assert await send(chunks(large), json_type) == (413, "body-too-large")
        assert await send(b"{}", {"content-type": "text/plain"}) == (415, "unsupported-media-type")
        assert await send(b"{nope", json_type) == (400, "bad-json")
        assert await send(b"\xff\xfe", json_type) == (400, "bad-json")
        assert await send(b"[" * 900, json_type) == (400, "bad-request")


async def test_a_body_that_never_comes_times_out(serving: Any) -> None:
    async with serving(socket=True, body_timeout_s=0.05) as face:
        host, port = face.base_url.removeprefix("http://").split(":")
        async with await anyio.connect_tcp(host, int(port)) as stream:
            await stream.send(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"content-length: 100\r\n\r\n{"
            )
            assert b" 408 " in (await stream.receive()).partition(b"\r\n")[0]


async def test_a_request_that_takes_too_long_ends(serving: Any) -> None:
    async with serving(engine={"step_s": 0.005}, request_timeout_s=0.05) as face:
        body = {"prompt": "abc", "max_tokens": 2000}
        got = await face.post("/v1/completions", body)
        assert (got.status_code, got.json()["error"]["code"]) == (504, "deadline")
        streamed = await face.post("/v1/completions", body | {"stream": True})
        assert streamed.status_code == 200
        assert '"code":"deadline"' in streamed.text and streamed.text.endswith("data: [DONE]\n\n")


async def test_a_command_that_takes_too_long_goes_on_alone(serving: Any, adapter: Any) -> None:
    gate = threading.Event()
    async with serving(engine={"gate": gate}, command_timeout_s=0.05) as face:
        body = {"name": "x", "path": adapter("x", A)}
        got = await face.post("/v1/lora/load", body, ADMIN)
        assert (got.status_code, got.json()["error"]["code"]) == (504, "command-timeout")
        gate.set()
        await face.settled()
        assert await said(face, "x") == text(A)


async def test_unknown_routes_and_methods_keep_the_shape(serving: Any) -> None:
    async with serving() as face:
        got = await face.http.get("/v1/nothing")
        assert (got.status_code, got.json()["error"]["code"]) == (404, "not-found")
        got = await face.http.get("/v1/completions")
        assert (got.status_code, got.json()["error"]["code"]) == (405, "method-not-allowed")
        assert "POST" in got.headers["allow"]


async def test_health_version_and_an_engine_that_is_gone(serving: Any) -> None:
    async with serving() as face:
        assert (await face.http.get("/health")).json() == {"status": "ok"}
        assert "version" in (await face.http.get("/version")).json()
        await face.engine.aclose()
        got = await face.http.get("/health")
        assert (got.status_code, got.json()["error"]["code"]) == (503, "engine-closed")
        got = await face.post("/v1/completions", {"prompt": "abc"})
        assert got.status_code == 503 and "retry-after" in got.headers
        assert (await face.http.get("/metrics")).status_code == 200


async def test_every_route_is_described_and_every_description_has_a_route(serving: Any) -> None:
    async with serving() as face:
        described = (await face.http.get("/openapi.json")).json()
        routed = {
            (method.lower(), route.path.replace("{name:path}", "{name}"))
            for route in face.app.routes
            for method in route.methods - {"HEAD"}
        }
        paths = described["paths"]
        assert routed == {(method, path) for path, ways in paths.items() for method in ways}
        chat = described["components"]["schemas"]["ChatRequest"]
        assert chat["required"] == ["messages"] and chat["additionalProperties"] is False


@pytest.mark.parametrize("ipc", [False, True])
async def test_a_dead_device_is_not_healthy(serving: Any, ipc: bool) -> None:
    async with serving(ipc=ipc) as face:
        dead = DeviceError("gone", code="device-dead")
        face.engine.executor.faults.before = lambda kind: dead if kind == "step" else None
        got = await face.post("/v1/completions", {"prompt": "abc"})
        assert (got.status_code, got.json()["error"]["code"]) == (500, "device-dead")
        health = await face.http.get("/health")
        assert (health.status_code, health.json()["error"]["code"]) == (503, "device-dead")


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"modle_name": "x"}, HttpSettings)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"admin_keys": ["short"]}, HttpSettings)


async def test_embedding_by_lifespan() -> None:
    engine = SimEngine()
    app = create_app(engine, manage=True)
    async with app.router.lifespan_context(app):
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://rota") as http:
            assert (await http.get("/health")).status_code == 200
    async with httpx2.AsyncClient(transport=transport, base_url="http://rota") as http:
        assert (await http.get("/health")).status_code == 503
