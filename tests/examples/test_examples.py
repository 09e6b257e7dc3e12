"""Every example runs, on a tiny checkpoint that has been given a tokenizer of single bytes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import httpx2
import pytest
import trio

ROOT = Path(__file__).resolve().parents[2]
ORACLE = ROOT / "tests" / "data" / "oracle" / "llama"
ADAPTER = str(ORACLE / "adapters" / "attn_mlp_r8")
OTHER = str(ORACLE / "adapters" / "rslora_r16_bf16")
SMALL: dict[str, Any] = {"dtype": "float32", "max_lora_rank": 16, "kv_bytes": 1 << 22}


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tested() -> None:
    names = {path.stem for path in (ROOT / "examples").glob("*.py")}
    source = Path(__file__).read_text()
    assert names and all(f'example("{name}")' in source for name in names)


def test_embed_in_starlette(model: str) -> None:
    async def run() -> None:
        app = example("embed_in_starlette").build(model, {"sql": ADAPTER}, **SMALL)
        async with app.router.lifespan_context(app):
            transport = httpx2.ASGITransport(app=app)
            async with httpx2.AsyncClient(transport=transport, base_url="http://x") as http:
                mine = await http.get("/ask", params={"q": "hello", "adapter": "sql"})
                assert mine.status_code == 200
                body = {"model": "sql", "prompt": "hello", "max_tokens": 32, "temperature": 0}
                theirs = await http.post("/llm/v1/completions", json=body)
                assert theirs.json()["choices"][0]["text"] == mine.text
                chat = {"model": "base", "messages": [{"role": "user", "content": "hi"}]}
                got = await http.post("/llm/v1/chat/completions", json=chat | {"max_tokens": 4})
                assert got.json()["usage"]["completion_tokens"] <= 4

    anyio.run(run)


def test_trio_program(model: str) -> None:
    main = example("trio_program").main

    async def run() -> dict[str | None, str]:
        found: dict[str | None, str] = await main(model, {"a": ADAPTER, "b": OTHER}, **SMALL)
        return found

    answers = trio.run(run)
    assert set(answers) == {None, "a", "b"} and len(set(answers.values())) == 3


def test_two_processes(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    anyio.run(example("two_processes").main, model, ADAPTER)
    out = capsys.readouterr().out
    assert "loaded into slot 0" in out and "the engine was killed: engine-gone" in out


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_replace_every_step(model: str, backend: str) -> None:
    main = example("replace_every_step").main

    async def run() -> list[int]:
        seen: list[int] = await main(model, ADAPTER, 4, max_loras=3, **SMALL)
        return seen

    assert len(set(anyio.run(run, backend=backend))) >= 3, "rollouts follow the policy"


def test_many_tenants(model: str) -> None:
    async def run() -> dict[str, int]:
        found: dict[str, int] = await example("many_tenants").main(model, ADAPTER, 6, 12, **SMALL)
        return found

    answered = anyio.run(run)
    assert len(answered) == 6 and sum(answered.values()) == 18


def test_offline_batch(model: str, tmp_path: Path) -> None:
    lines = [
        {"prompt": "one", "max_tokens": 5},
        {"prompt": "two", "adapter": "sql", "max_tokens": 5},
        {"prompt": "three", "adapter": "nobody"},
        {"promt": "four"},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(json.dumps(line) for line in lines))
    main = example("offline_batch").main

    async def run() -> int:
        count: int = await main(model, str(source), str(target), {"sql": ADAPTER}, **SMALL)
        return count

    assert anyio.run(run) == 4
    got = [json.loads(line) for line in target.read_text().splitlines()]
    assert "text" in got[0] and "text" in got[1]
    assert [g.get("error") for g in got[2:]] == ["unknown-adapter", "bad-line"]
