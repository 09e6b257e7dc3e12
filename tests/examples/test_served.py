"""``rota serve`` as its users meet it: the command, curl, OpenAI's client, a signal."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx2
import openai
import pytest

from rota.sched.cli import main

ROOT = Path(__file__).resolve().parents[2]
ORACLE = ROOT / "tests" / "data" / "oracle" / "llama"
ADAPTER = ORACLE / "adapters" / "attn_mlp_r8"
OTHER = ORACLE / "adapters" / "rslora_r16_bf16"
KEY = "a-key-for-adapters"
MANY = 450


class Served:
    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url


@pytest.fixture(scope="module")
def served(model: str) -> Iterator[Served]:
    command = [
        *(sys.executable, "-m", "rota.sched.cli", "serve", model, "--port", "0"),
        *("--dtype", "float32", "--kv-bytes", str(1 << 22), "--threads", "1"),
        *("--max-lora-rank", "16", "--model-name", "tiny"),
        *("--lora-adapter", f"first={OTHER}", "--max-loras", "12"),
        *("--admin-key", KEY, "--directory", str(ORACLE)),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        url = next(line.split()[-1] for line in lines if line.startswith("serving tiny at "))
        yield Served(process, url)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, "a signal is an orderly end"
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_curl(served: Served) -> None:
    script = str(ROOT / "examples" / "curl.sh")
    command = ["sh", script, served.url, KEY, str(ADAPTER)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for part in (
        '{"status":"ok"}',
        "Success: LoRA adapter 'sql' added successfully.",
        '"parent":"tiny"',
        '"object":"chat.completion"',
        "data: [DONE]",
        '"object":"lora.replaced"',
        '"code":"unknown-adapter"',
        "Success: LoRA adapter 'sql' removed successfully.",
        'running_lora_adapters="first"',
    ):
        assert part in done.stdout, part


def test_openais_client(served: Served) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as client:
        assert [m.id for m in client.models.list()] == ["tiny", "first"]
        for name in ("tiny", "first"):
            whole = client.completions.create(
                model=name, prompt="hello", max_tokens=12, temperature=0
            )
            stream = client.completions.create(
                model=name, prompt="hello", max_tokens=12, temperature=0, stream=True
            )
            assert "".join(c.choices[0].text for c in stream) == whole.choices[0].text
        chat = client.chat.completions.create(
            model="first",
            messages=[{"role": "user", "content": "hi"}],
            max_completion_tokens=5,
            n=2,
            logprobs=True,
            top_logprobs=3,
        )
        assert len(chat.choices) == 2
        logprobs = chat.choices[0].logprobs
        assert logprobs is not None and logprobs.content
        assert all(len(t.top_logprobs) == 3 and t.logprob <= 0 for t in logprobs.content)
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="tiny", prompt="x" * 1000)
        assert caught.value.code == "prompt-too-long"

        seeded = [
            client.completions.create(model="tiny", prompt="hello", max_tokens=20, seed=seed)
            for seed in (3, 3, 4)
        ]
        texts = [s.choices[0].text for s in seeded]
        assert texts[0] == texts[1] != texts[2]


def total(served: Served, name: str) -> int:
    """A counter or gauge of the server's, summed over its labels."""
    lines = httpx2.get(f"{served.url}/metrics").text.splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith(name + " ")))


def settled(served: Served) -> None:
    until = time.monotonic() + 30
    while total(served, "rota_requests_running") or total(served, "rota_requests_waiting"):
        assert time.monotonic() < until, "something still runs"


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_left_in_the_middle_is_cancelled(served: Served, chat: bool) -> None:
    settled(served)
    tokens = total(served, "rota_generated_tokens_total")
    extra: dict[str, Any] = {"ignore_eos": True}
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as client:
        for _ in range(3):
            stream: Any
            if chat:
                stream = client.chat.completions.create(
                    model="first",
                    messages=[{"role": "user", "content": "hi"}],
                    stream=True,
                    max_tokens=MANY,
                    extra_body=extra,
                )
            else:
                stream = client.completions.create(
                    model="first", prompt="hi", stream=True, max_tokens=MANY, extra_body=extra
                )
            next(iter(stream))
            stream.close()
    settled(served)
    assert total(served, "rota_generated_tokens_total") - tokens < 3 * MANY


async def _replaced_under_load(served: Served) -> None:
    names = [f"tenant{i}" for i in range(8)]
    admin = {"Authorization": f"Bearer {KEY}"}
    open_ = anyio.Event()
    seen: list[tuple[str, str]] = []
    async with (
        httpx2.AsyncClient(base_url=served.url, headers=admin, timeout=60) as http,
        openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as client,
    ):

        async def command(verb: str, name: str, **more: Any) -> None:
            got = await http.post(f"/v1/lora/{verb}", json={"name": name, **more})
            assert got.status_code == 200, got.text

        async def ask(name: str) -> str:
            stream = await client.completions.create(
                model=name, prompt="hello", max_tokens=24, temperature=0, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        expected = set()
        for path in (OTHER, ADAPTER):
            await command("load" if path is OTHER else "replace", names[0], path=str(path))
            expected.add(await ask(names[0]))
        assert len(expected) == 2
        for name in names[1:]:
            await command("load", name, path=str(ADAPTER))

        async def one(name: str) -> None:
            seen.append((name, await ask(name)))
            if len(seen) == 100:
                open_.set()

        async def replaces(name: str) -> None:
            turn = 0
            while turn < 2 or not open_.is_set():
                turn += 1
                await command("replace", name, path=str(OTHER if turn % 2 else ADAPTER))

        async with anyio.create_task_group() as tasks:
            for i in range(100):
                tasks.start_soon(one, names[i % 8])
            for name in names[:3]:
                tasks.start_soon(replaces, name)
        assert len(seen) == 100
        assert {text for _, text in seen} <= expected, "one answer, one version"
        assert {text for name, text in seen if name in names[3:]} == {await ask(names[7])}
        for name in names:
            await command("unload", name)


def test_a_hundred_streams_over_eight_adapters_while_they_are_replaced(served: Served) -> None:
    anyio.run(_replaced_under_load, served)
    settled(served)


def test_bench_of_a_model_directory_and_of_a_server(
    model: str, served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--requests", "4", "--warmup", "1", "--max-tokens", "3", "--prompt-tokens", "5"]
    own = ["--adapter", "base", "--lora-adapter", f"x={ADAPTER}", "--max-lora-rank", "16"]
    assert main(["bench", model, *flags, *own, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["adapters"].keys() == {"base", "x"} and found["total"]["tokens"] == 12
    assert main(["bench", served.url, *flags, "--adapter", "first", "--rate", "50"]) == 0
    shown = capsys.readouterr().out
    assert "first" in shown and "late at p99" in shown
