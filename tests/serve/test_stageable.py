"""Names that are known but not staged: from directories and a weight peer, over real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest

import rota

ROOT = Path(__file__).resolve().parents[2]
LLAMA = ROOT / "tests/data/oracle/llama"
ONE, TWO = "attn_mlp_r8", "rslora_r16_bf16"
KEY = {"Authorization": "Bearer an-admin-key"}
LIMIT_S = 120
"""Only a process that hangs runs into it."""


class Started:
    """``rota ...`` as a process of its own; its output, line by line."""

    def __init__(self, *argv: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rota.sched.cli", *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"COLUMNS": "200", "PYTHONUNBUFFERED": "1"},
        )
        self.seen: list[str] = []

    def find(self, pattern: str) -> str:
        """What the pattern's group matches in the next line that has it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.seen.append(line)
            if found := re.search(pattern, line):
                return found[1]
        raise AssertionError("".join(self.seen))

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send the signal and wait."""
        self.process.send_signal(number)
        self.seen += self.process.communicate(timeout=LIMIT_S)[0].splitlines(keepends=True)
        return self.process.returncode


@pytest.fixture
def start() -> Iterator[Callable[..., Started]]:
    running: list[Started] = []

    def begin(*argv: str) -> Started:
        running.append(Started(*argv))
        return running[-1]

    yield begin
    for one in running:
        if one.process.poll() is None:
            one.process.kill()
        one.process.communicate(timeout=LIMIT_S)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.anyio
async def test_known_names_come_from_a_peer_when_asked(
    start: Callable[..., Started], tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret of the tests\n")
    adapters = [str(LLAMA / "adapters" / name) for name in (ONE, TWO)]

    def start_peer(port: str) -> tuple[Started, str]:
        peer = start("peer", *adapters, "--no-rdma", "--port", port, "--secret-file", str(secret))
        return peer, peer.find(r"peer at (\S+):\s")

    peer, address = start_peer("0")
    config = tmp_path / "rota.toml"
    config.write_text(
        f'[stageable]\none = "peer://{address}/{ONE}"\ntwo = "peer://{address}/{TWO}"\n'
        f'late = "peer://{address}/{TWO}"\ngone = "peer://{address}/nothing"\n'
        f'disk = "{adapters[0]}"\n'
    )
    ipc = f"unix:{tmp_path / 'rota.sock'}"
    sizes = ("--max-loras", "2", "--max-lora-rank", "16", "--kv-bytes", str(1 << 22))
    served = start(
        *("serve", str(LLAMA / "base"), "--config", str(config), "--port", "0", "--ipc", ipc),
        *("--dtype", "float32", "--use-numba", "false", "--threads", "1", *sizes),
        *("--admin-key", "an-admin-key", "--peer-secret-file", str(secret)),
    )
    url = served.find(r"at (http://\S+)")
    cases = json.loads((LLAMA / "ref.json").read_text())["cases"]
    sampling = rota.SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    async with httpx2.AsyncClient(base_url=url, headers=KEY, timeout=LIMIT_S) as http:
        async with rota.connect(ipc) as engine:

            async def states() -> dict[str, str]:
                models = (await http.get("/v1/models")).json()["data"]
                return {m["id"]: m["state"] for m in models if m["state"] != "base"}

            async def ids(name: str, case: str) -> list[int | None]:
                prompt = cases[case]["ids"]
                return [e.token_id async for e in engine.generate(prompt, name, sampling)][:8]

            cold = dict.fromkeys(("one", "two", "late", "gone", "disk"), "cold")
            assert await states() == cold
            # A miss: the first request brings it in.
            assert await ids("one", ONE) == cases[ONE]["greedy_f32"][:8]
            assert await states() == cold | {"one": "resident"}
            # A prefetch: staged in host memory, and in a slot without the peer.
            answer = await http.post("/v1/lora/prefetch", json={"name": "two"})
            assert answer.status_code == 200 and answer.json()["outcome"] == "prefetched"
            assert await states() == cold | {"one": "resident", "two": "staged"}
            # What the peer does not have is refused by name and stays known.
            with pytest.raises(rota.RotaError) as caught:
                await ids("gone", ONE)
            assert caught.value.code == "unknown-adapter"
            assert peer.end() == 0
            assert await ids("two", TWO) == cases[TWO]["greedy_f32"][:8]
            assert await ids("disk", ONE) == cases[ONE]["greedy_f32"][:8]
            with pytest.raises(rota.RotaError) as caught:
                await ids("late", TWO)
            assert caught.value.code == "peer-unreachable"
            assert (await states())["late"] == "cold"
            # The peer is back, and so is what it serves; the name was never lost.
            start_peer(address.rpartition(":")[2])
            assert (await engine.promote("late")).outcome == "done"
            assert await ids("late", TWO) == cases[TWO]["greedy_f32"][:8]
    assert served.end() == 0
