"""Spans of requests and adapter commands."""

from __future__ import annotations

import sys
from typing import Any

import httpx2
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rota.errors import CommandError
from rota.sched.core.identity import adapter_id
from rota.sched.sim.engine import SimEngine
from rota.sched.web.app import create_app
from rota.sched.web.settings import HttpSettings
from rota.sched.web.tracing import open_tracer, version_of

pytestmark = pytest.mark.anyio
ADMIN = {"Authorization": "Bearer admin-key-for-tests"}


async def test_a_span_names_adapter_version_and_tokens(adapter: Any, tmp_path: Any) -> None:
    found = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(found))
    settings = HttpSettings(admin_keys=("admin-key-for-tests",), directories=(str(tmp_path),))
    async with SimEngine() as engine:
        app = create_app(engine, settings, tracer=provider.get_tracer("test"))
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://rota") as http:
            load = {"name": "sql", "path": adapter("a", b"a")}
            await http.post("/v1/lora/load", json=load, headers=ADMIN)
            load["path"] = adapter("b", b"b")
            await http.post("/v1/lora/replace", json=load, headers=ADMIN)
            body = {"model": "sql", "prompt": "a secret", "max_tokens": 5, "stream": True}
            parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
            await http.post("/v1/completions", json=body, headers={"traceparent": parent})
            await http.post("/v1/completions", json=body | {"model": "nobody"})
            await http.get("/v1/models")
        load_span, replace, asked, refused = found.get_finished_spans()
        assert (load_span.name, replace.name) == ("rota.load", "rota.replace")
        told = dict(replace.attributes or {})
        assert (told["rota.adapter"], told["rota.generation"], told["rota.slot"]) == ("sql", 2, 1)
        assert told["rota.outcome"] == "done" and told["http.response.status_code"] == 200
        told = dict(asked.attributes or {})
        assert asked.context is not None
        assert f"{asked.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
        assert (told["rota.adapter"], told["rota.generation"]) == ("sql", 2)
        assert told["rota.adapter_id"] == str(adapter_id("sql", 2))
        assert told["gen_ai.usage.input_tokens"] == len("a secret")
        assert told["gen_ai.usage.output_tokens"] == 5
        assert "secret" not in str(told)
        told = dict(refused.attributes or {})
        assert told["error.type"] == "unknown-adapter"
        assert told["http.response.status_code"] == 404


async def test_an_older_version_is_known_by_its_id() -> None:
    async with SimEngine() as engine:
        await engine.load("sql", (b"a", b"{}"))
        for content in (b"b", b"c"):
            await engine.replace("sql", (content, b"{}"))
        stats = engine.stats()
        assert version_of(stats, adapter_id("sql", 2)) == ("sql", 2)
        assert version_of(stats, 0) == ("", 0)
        assert version_of(stats, 12345) == ("", 0)


async def test_missing_packages_are_named_only_when_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(CommandError) as caught:
        open_tracer("http://127.0.0.1:1/v1/traces")
    assert caught.value.code == "extra-missing"
    assert "rota[otel]" in str(caught.value)
