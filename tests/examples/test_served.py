"""``rota serve`` as its users meet it: the command, curl, OpenAI's client, a signal."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from rota.sched.cli import main

ROOT = Path(__file__).resolve().parents[2]
ORACLE = ROOT / "tests" / "data" / "oracle" / "llama"
ADAPTER = ORACLE / "adapters" / "attn_mlp_r8"
KEY = "a-key-for-adapters"


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
        *("--lora-adapter", f"first={ORACLE / 'adapters' / 'rslora_r16_bf16'}"),
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
