"""The replay command: formats by content, views, records, differences, refusals, a real engine."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import anyio
import pytest

from rota.sched.core.lanes import Lanes
from rota.sched.replay.arrivals import read_azure, scaled, with_adapters
from rota.sched.replay.main import main_replay, sniff
from rota.sched.replay.real import against_engine


def run(*args: object) -> tuple[int, str]:
    lines: list[str] = []
    code = main_replay([str(a) for a in args], lines.append)
    return code, "\n".join(lines)


@pytest.mark.parametrize(
    "name, kind",
    [
        ("azure2023_conv_head2000.csv", "azure"),
        ("mooncake_conversation_head400.jsonl", "mooncake"),
        ("servegen_m-large_top13_day0.csv", "servegen"),
    ],
)
def test_public_traces_are_told_apart_and_served(name: str, kind: str, traces: Path) -> None:
    path = traces / name
    assert sniff(path) == kind
    code, out = run(path, "--limit", 20, "--context", 256, "--speed", 4)
    assert code == 0, out
    assert "ends                               length 20" in out


def test_a_simulated_run_is_recorded_told_drawn_and_replayed(
    traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, story, chrome = tmp_path / "r.jsonl", tmp_path / "s.txt", tmp_path / "p.json"
    code, out = run(
        *(traces / "azure2023_conv_head2000.csv", "--limit", 40, "--context", 256, "--speed", 60),
        *("--control-rate", 5, "--record", record, "--story", story, "--perfetto", chrome),
    )
    assert "time to first token" in out
    assert story.read_text().count("RunStep") > 10
    assert len(json.loads(chrome.read_text())["traceEvents"]) > 50
    code, out = run(record)
    assert (code, "the same decisions" in out) == (0, True)
    monkeypatch.setattr(Lanes, "took_turn", lambda self, lane: None)
    code, out = run(record)
    assert (code, "the first difference" in out) == (1, True)


def test_unreadable_and_wrong_calls_are_2(tmp_path: Path) -> None:
    path = tmp_path / "x"
    assert run(path)[0] == 2
    path.write_text("what is this\n")
    assert run(path)[0] == 2
    assert run()[0] == 2
    assert run(path, "--no-such-option")[0] == 2


def test_a_real_engine_needs_a_model(traces: Path) -> None:
    code, out = run(traces / "azure2023_conv_head2000.csv", "--limit", 2, "--against", "real")
    assert (code, "bad-option" in out) == (1, True)


def test_a_real_engine_is_measured_by_the_same_code(traces: Path, data_dir: Path) -> None:
    llama = data_dir / "oracle" / "llama"
    rows = read_azure(traces / "azure2023_conv_head2000.csv", limit=3)
    rows = scaled(with_adapters(rows, adapters=4, alpha=1.0, base_share=0.3, seed=1), 1000.0, 24)
    adapters = {"x": llama / "adapters" / "attn_mlp_r8"}
    main = partial(against_engine, llama / "base", adapters, rows, 2, use_numba=False)
    report = anyio.run(main)
    assert report.ends == {"length": 3}
    assert report.tokens == sum(r.tokens for r in rows) and report.ttft[0] > 0
