"""``rota serve`` and ``rota top``: options, starting, signals."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx2
import msgspec
import pytest
from rich.console import Console

from rota.errors import CommandError, EngineClosedError
from rota.sched.config import EngineConfig
from rota.sched.core import Core, CoreConfig
from rota.sched.core.snapshot import AdapterStats, SlotStats
from rota.sched.engine import Engine
from rota.sched.face import AdapterReply
from rota.sched.ipc.client import connect
from rota.sched.serve import run_serve
from rota.sched.serve.command import Opening, progress, serve
from rota.sched.serve.options import HELP, Options, ServeConfig
from rota.sched.serve.top import draw, watch
from rota.sched.sim.engine import SimEngine
from rota.sched.web.settings import HttpSettings

from .command_line import options, parse, quiet, simulated


def test_every_option_is_explained_and_none_is_named_twice() -> None:
    names = [n for k in (ServeConfig, HttpSettings, EngineConfig) for n in k.__struct_fields__]
    assert len(names) == len(set(names))
    assert set(names) - {"model"} == set(HELP)


def test_flags_go_before_the_file_and_the_file_before_defaults(tmp_path: Path) -> None:
    file = tmp_path / "rota.toml"
    file.write_text(
        'model = "somewhere/tiny"\nmax_loras = 3\nport = 1234\npin_adapters = false\n'
        'admin_keys = ["a-secret-key"]\n[adapters]\nsql = "dir/sql"\n'
    )
    got = options("--config", str(file), "--port", "99", "--directory", "/a", "--directory", "/b")
    assert (got.serve.model, got.serve.port) == ("somewhere/tiny", 99)
    assert got.serve.adapters == {"sql": "dir/sql"}
    assert got.engine == {"max_loras": 3, "pin_adapters": False}
    assert got.http.admin_keys == ("a-secret-key",)
    assert got.http.directories == ("/a", "/b")
    assert got.http.model_name == "tiny"


def test_flags_become_values() -> None:
    got = options(
        *("m", "--lora-adapter", "a=x=y", "--drain-after-s", "0.25", "--use-numba", "false"),
        *("--kv-bytes", "1048576", "--model-name", "base"),
    )
    assert got.serve.adapters == {"a": "x=y"}
    assert got.engine == {"drain_after_s": 0.25, "use_numba": False, "kv_bytes": 1 << 20}
    assert got.http.model_name == "base"


@pytest.mark.parametrize(
    ("argv", "text", "code", "subject"),
    [
        ([], "", "no-model", None),
        (["m", "--connect", "unix:x"], "", "no-model", None),
        (["--connect", "unix:x", "--max-loras", "2"], "", "option-not-here", "max_loras"),
        (["--connect", "unix:x", "--lora-adapter", "a=b"], "", "option-not-here", "adapters"),
        (
            ["--connect", "unix:x", "--peer-arena-bytes", "1"],
            "",
            "option-not-here",
            "peer_arena_bytes",
        ),
        (["m", "--lora-stageable", "a=peer://h/x"], "", "bad-option", "--lora-stageable a"),
        (["m", "--lora-adapter", "a=peer://h:1"], "", "bad-option", "--lora-adapter a"),
        (["m"], '[stageable]\na = "peer://h:1/"', "bad-option", "--lora-stageable a"),
        (["m", "--lora-adapter", "nopath"], "", "bad-option", "--lora-adapter"),
        (["m", "--max-loras", "many"], "", "bad-option", "max_loras"),
        (["m", "--port", "99999"], "", "bad-option", "port"),
        (["m", "--device", "tpu"], "", "bad-option", "device"),
        (["m"], "max_lora = 3", "unknown-option", "max_lora"),
        (["m"], "max_loras = [", "bad-config-file", None),
    ],
)
def test_wrong_options_are_refused_by_name(
    tmp_path: Path, argv: list[str], text: str, code: str, subject: str | None
) -> None:
    file = tmp_path / "rota.toml"
    file.write_text(text)
    with pytest.raises(CommandError) as caught:
        options(*argv, "--config", str(file))
    assert caught.value.code == code
    assert subject is None or caught.value.subject == subject


def test_check_prints_the_options_without_secrets() -> None:
    out = io.StringIO()
    args = parse("serve", "m", "--admin-key", "a-secret-key", "--ipc-token", "hush", "--check")
    assert run_serve(args, Console(file=out, width=200)) == 0
    shown = json.loads(out.getvalue())
    assert shown["http"]["admin_keys"] == "1 keys" and shown["serve"]["port"] == 8000
    assert "a-secret-key" not in out.getvalue() and "hush" not in out.getvalue()


ORACLE = Path(__file__).resolve().parents[1] / "data" / "oracle"


@pytest.mark.anyio
async def test_an_engine_process_a_frontend_and_top(tmp_path: Path) -> None:
    where = f"unix:{tmp_path / 'rota.sock'}"
    console = quiet()
    async with anyio.create_task_group() as tasks:
        engine = options("m", "--port", "0", "--ipc", where)
        own = await tasks.start(partial(serve, engine, quiet(), engine=simulated))
        front = options("--connect", where, "--port", "0", "--model-name", "base")
        other = await tasks.start(serve, front, console)
        async with httpx2.AsyncClient() as http:
            body = {"prompt": "abc", "max_tokens": 5}
            answers = [(await http.post(f"{u}/v1/completions", json=body)) for u in (own, other)]
            texts = [a.json()["choices"][0]["text"] for a in answers]
            assert texts[0] == texts[1] and len(texts[0]) == 5
            # Cut off while it still sends, so the 400 may be lost on the way.
            with suppress(httpx2.TransportError):
                large = await http.get(f"{own}/health", headers={"x": "y" * 200_000})
                assert large.status_code == 400
            assert (await http.get(f"{own}/health")).status_code == 200
        await watch(where, None, 0.1, True, console)
        shown = console.file.getvalue()
        assert "EMPTY" in shown and "KV 0/4096" in shown
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_over_tcp_frontends_name_directories_of_the_allow_list_only(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_text("tensors")
    out = quiet()
    flags = ("--http", "false", "--ipc", "127.0.0.1:0", "--ipc-token", "between friends")
    async with anyio.create_task_group() as tasks:
        engine = options("m", *flags, "--directory", str(inside))
        await tasks.start(partial(serve, engine, out, engine=simulated))
        where = out.file.getvalue().split()[-1]
        async with connect(where, token="between friends") as client:
            assert (await client.load("a", inside)).outcome == "done"
            with pytest.raises(CommandError) as caught:
                await client.load("b", outside)
            assert caught.value.code == "path-not-allowed"
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_several_frontends_of_one_engine_share_a_port(tmp_path: Path) -> None:
    where = f"unix:{tmp_path / 'rota.sock'}"
    async with anyio.create_task_group() as tasks:
        engine = options("m", "--http", "false", "--ipc", where)
        await tasks.start(partial(serve, engine, quiet(), engine=simulated))
        shared = ("--connect", where, "--share-port", "true")
        url = await tasks.start(
            serve, options(*shared, "--port", "0", "--model-name", "x"), quiet()
        )
        port = url.rpartition(":")[2]
        same = options(*shared, "--port", port, "--model-name", "y")
        assert await tasks.start(serve, same, quiet()) == url
        seen: set[str] = set()
        with anyio.fail_after(30):
            while seen != {"x", "y"}:  # the kernel deals out connections
                async with httpx2.AsyncClient() as http:
                    seen.add((await http.get(f"{url}/v1/models")).json()["data"][0]["id"])
                    body = {"prompt": "abc", "max_tokens": 5}
                    answer = (await http.post(f"{url}/v1/completions", json=body)).json()
                    assert len(answer["choices"][0]["text"]) == 5
        with pytest.raises(EngineClosedError) as caught:
            await serve(options("--connect", where, "--port", port), quiet())
        assert caught.value.code == "cannot-listen"
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_what_can_be_refused_at_once_is_refused_before_a_model_is_read() -> None:
    def never(*_: object) -> Any:
        raise AssertionError("the engine was opened")

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(EngineClosedError) as held:
            await serve(options("m", "--port", port), quiet(), engine=never)
        assert held.value.code == "cannot-listen"
    with pytest.raises(CommandError) as caught:
        await serve(options("m", "--ipc", "127.0.0.1:0"), quiet(), engine=never)
    assert caught.value.code == "token-needed"


@pytest.mark.anyio
async def test_who_serves_is_told_between_opening_and_serving(tmp_path: Path) -> None:
    """When the heap is settled: after the weights are there, before anybody waits for an answer."""
    order: list[str] = []
    where = tmp_path / "rota.sock"

    class Opened(SimEngine):
        async def __aenter__(self) -> Any:
            entered = await super().__aenter__()
            order.append("opened")
            return entered

    config = options("m", "--http", "false", "--ipc", f"unix:{where}")
    run = partial(
        serve,
        config,
        quiet(),
        engine=lambda *_: Opened(),
        ready=lambda: order.append("served" if where.exists() else "ready"),
    )
    async with anyio.create_task_group() as tasks:
        await tasks.start(run)
        assert order == ["opened", "ready"] and await anyio.Path(where).exists()
        tasks.cancel_scope.cancel()


def test_help_calls_values_by_their_flag_or_unit(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        parse("serve", "--help")
    words = capsys.readouterr().out.split()
    for flag, value in (
        ("--directory", "DIRECTORY"),
        ("--keep-alive-s", "SECONDS"),
        ("--kv-bytes", "BYTES"),
        ("--max-loras", "MAX_LORAS"),
    ):
        assert value in {words[i + 1].rstrip("]") for i, w in enumerate(words) if flag in w}


def test_top_shows_leases_waits_and_what_is_coming() -> None:
    slots = (
        SlotStats(0, "DRAINING", "sql", 2, 7, 3, False, coming="legal"),
        SlotStats(1, "READY", "tax", 1, 8, 0, True),
    )
    adapters = (
        AdapterStats("sql", 2, "device", 0, 0),
        AdapterStats("legal", 0, "cold", -1, 2, doing="PLACING", job="load"),
    )
    empty = Core(CoreConfig(max_loras=2, num_blocks=16, max_context=64)).stats()
    before = msgspec.structs.replace(empty, tokens=100)
    stats = msgspec.structs.replace(
        empty, slots=slots, adapters=adapters, tokens=150, waiting=4, slot_wait_s=1.25
    )
    out = Console(file=io.StringIO(), width=160)
    out.print(draw(stats, before, 2.0, "here"))
    shown = " ".join(out.file.getvalue().replace("│", " ").split())
    for part in (
        "tokens 25.0/s",
        "waiting 4",
        "slots waited for 1.2 s",
        "0 DRAINING sql 2 ■■■ 3 legal",
        "1 READY tax 1 pinned",
        "legal cold 0 load placing and 1 more",
    ):
        assert part in shown, part


@pytest.mark.parametrize("terminal", [False, True])
def test_opening_is_told_and_on_a_terminal_there_are_bars(terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=terminal, color_system=None)
    with progress("[tiny]", 2, console) as told:
        told.weights(3, 12)
        told.weights(12, 12)
        for slot, name in enumerate(("sql", "[red]")):
            told.loaded(name, AdapterReply("done", name, slot, 1, 7, None, None, 0.251))
    shown = out.getvalue()
    assert "loaded sql into slot 0 in 0.25 s" in shown and "loaded [red] into slot 1" in shown
    for part in ("2/2", "adapters", "12/12", "tensors", "opening [tiny]"):
        assert (part in shown) == terminal, part


@pytest.mark.anyio
@pytest.mark.parametrize("family", ["llama", "qwen35"])
async def test_an_engine_tells_how_many_tensors_it_has_read(family: str) -> None:
    """Each once, and all of them in the end."""
    told: list[tuple[int, int]] = []
    sizes: dict[str, Any] = {"dtype": "float32", "max_lora_rank": 8, "kv_bytes": 1 << 22}
    async with Engine(ORACLE / family / "base", on_weights=lambda *at: told.append(at), **sizes):
        pass
    total = told[0][1]
    assert told == [(done, total) for done in range(1, total + 1)]


@pytest.mark.anyio
async def test_a_signal_ends_everything_in_order(tmp_path: Path) -> None:
    config = options("m", "--port", "0", "--ipc", str(tmp_path / "rota.sock"))
    kept: list[SimEngine] = []

    def remembered(given: Options, adapters: Mapping[str, Any], told: Opening) -> SimEngine:
        kept.append(SimEngine())
        return kept[0]

    async with anyio.create_task_group() as tasks:
        await tasks.start(partial(serve, config, quiet(), engine=remembered))
        os.kill(os.getpid(), signal.SIGTERM)
    assert kept[0].core.idle()
    assert not await anyio.Path(tmp_path / "rota.sock").exists()
