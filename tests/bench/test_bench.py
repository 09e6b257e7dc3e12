"""``rota bench``: its arithmetic by hand, and every kind of target for real."""

from __future__ import annotations

import argparse
import io
import random
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from rich.console import Console

from rota.errors import CommandError, RequestError
from rota.sched.bench.command import table
from rota.sched.bench.drive import Load, asks, figures, quantile, run
from rota.sched.bench.targets import Ask, EngineTarget, engine_target, http_target
from rota.sched.cli import main
from rota.sched.serve import add_serve_parser
from rota.sched.serve.command import serve
from rota.sched.serve.options import read_options
from rota.sched.sim.engine import SimEngine


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def asked(adapter: str, due: float, *came: float, error: str | None = None) -> Ask:
    ask = Ask(adapter, "", 10, 8)
    ask.due, ask.sent, ask.came, ask.tokens, ask.error = due, due + 0.001, [*came], len(came), error
    return ask


def test_figures_are_what_the_hand_computes() -> None:
    done = [
        asked("a", 1.0, 1.5, 1.6, 1.7),
        asked("a", 2.0, 2.1),
        asked("b", 3.0, error="POOL_FULL"),
    ]
    found = figures(done, 4.0)
    total = found["total"]
    assert (total["requests"], total["errors"], total["tokens"]) == (3, {"POOL_FULL": 1}, 4)
    assert total["tokens_per_s"] == 1.0
    assert (total["ttft_p50_ms"], total["ttft_p99_ms"]) == (pytest.approx(100), pytest.approx(500))
    assert total["per_token_p50_ms"] == pytest.approx(100)
    assert total["whole_p99_ms"] == pytest.approx(700)
    assert found["late_p99_ms"] == pytest.approx(1.0)
    assert found["adapters"]["b"]["ttft_p50_ms"] is None
    text = io.StringIO()
    Console(file=text, width=160).print(table(found))
    assert all(name in text.getvalue() for name in ("a", "b", "all"))


def test_the_table_is_whole_on_a_terminal_of_80_columns() -> None:
    slow = [asked(name, 0.0, 1.5, 3.0, 8.25) for name in ("sentiment", "base")]
    text = io.StringIO()
    Console(file=text, width=80).print(table(figures(slow, 4.0)))
    assert "…" not in text.getvalue()
    heads, *rows = [line.split() for line in text.getvalue().splitlines() if line.strip()]
    assert heads[0] == "adapter" and {"sentiment", "base", "all"} <= {row[0] for row in rows}


def test_quantiles() -> None:
    assert quantile([], 0.5) is None
    assert [quantile(range(1, 101), q) for q in (0.0, 0.5, 0.99, 1.0)] == [1, 50, 99, 100]
    assert quantile([7.0], 0.99) == 7.0


def test_requests_are_a_function_of_the_seed() -> None:
    load = Load(adapters=("a", "b"), prompt_tokens=5)
    one, two = (asks(load, 10, random.Random(3)) for _ in range(2))
    assert [a.prompt for a in one] == [a.prompt for a in two]
    assert [a.adapter for a in one[:3]] == ["a", "b", "a"]
    assert len({a.prompt for a in one}) == 10


@pytest.mark.anyio
@pytest.mark.parametrize("rate", [None, 2000.0])
async def test_an_engine_is_driven_and_every_token_counted(rate: float | None) -> None:
    async with SimEngine() as engine:
        await engine.load("a", (b"a", b"{}"))
        load = Load(adapters=("base", "a", "nobody"), requests=30, max_tokens=7, rate=rate)
        found = await run(EngineTarget(engine), load)
    assert found["adapters"]["a"]["tokens"] == found["adapters"]["base"]["tokens"] == 70
    assert found["adapters"]["a"]["prompt_tokens"] == 640
    assert found["total"]["errors"] == {"unknown-adapter": 10}


@pytest.mark.anyio
async def test_a_server_and_an_engine_process_are_driven(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_serve_parser(parser.add_subparsers())
    where = f"unix:{tmp_path / 'rota.sock'}"
    flags = ["serve", "m", "--port", "0", "--ipc", where, "--api-key", "a-key-of-ours"]
    options = read_options(parser.parse_args(flags))
    quiet = Console(file=io.StringIO())
    load = Load(requests=8, concurrency=3, max_tokens=6, warmup=1)
    async with anyio.create_task_group() as tasks:
        url = await tasks.start(partial(serve, options, quiet, engine=lambda *_: SimEngine()))
        async with http_target(url, "a-key-of-ours") as target:
            over_http = await run(target, load)
        with pytest.raises(RequestError) as refused:
            async with http_target(f"{url}/v1", None):
                pass
        async with engine_target(where, {}, {}, None) as engine:
            over_ipc = await run(engine, load)
        tasks.cancel_scope.cancel()
    assert refused.value.code == "unauthorized"
    for found in (over_http, over_ipc):
        assert found["total"]["errors"] == {} and found["total"]["tokens"] == 48
        assert found["total"]["ttft_p50_ms"] > 0
    with pytest.raises(CommandError) as nobody:
        async with http_target(url, None):
            pass
    assert nobody.value.code == "no-server"


@pytest.mark.parametrize(
    "flags", [["--requests", "0"], ["--rate", "-1"], ["--lora-adapter", "x=/nowhere"]]
)
def test_wrong_flags_are_named(flags: list[str], capsys: Any) -> None:
    assert main(["bench", "http://127.0.0.1:1", *flags]) == 1
    assert "[bad-option]" in capsys.readouterr().err
