"""Recording a run and replaying it: the same decisions, or the first difference, named."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rota.errors import RequestError
from rota.sched.core import CoreConfig, planning
from rota.sched.core.lanes import Lanes
from rota.sched.replay.perfetto import ChromeTrace
from rota.sched.replay.record import Recorder, read_trace
from rota.sched.replay.replay import replay
from rota.sched.sim.scenario import Ask, Do, Scenario, SourceSpec, scenario_of
from rota.sched.sim.world import run_scenario

#: Preempts, and has two lanes that take turns.
TIGHT = Scenario(
    0,
    "tight",
    "asyncio",
    CoreConfig(max_loras=1, num_blocks=12, max_context=160, watermark_blocks=0, max_running=4),
    (
        Do(0.0, "load", "a", SourceSpec("A")),
        *(Ask(0.1, "a", prompt=40, tokens=30) for _ in range(6)),
        *(Ask(0.1, None, prompt=40, tokens=30) for _ in range(6)),
    ),
)


def record(path: Path, seed: int | None, **options: Any) -> int:
    """Run the scenario of ``seed``, or :data:`TIGHT`."""
    scenario = TIGHT if seed is None else scenario_of(seed)
    with Recorder(path, scenario.config, **options) as recorder:
        run_scenario(scenario, (recorder,))
    return recorder.events


@pytest.mark.parametrize("seed", range(10))
def test_a_recorded_run_replays_to_the_same_decisions(seed: int, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    events = record(path, seed)
    replayed = replay(path)
    assert replayed.difference is None and replayed.events == events > 50


@pytest.mark.parametrize("keep", [False, True])
def test_the_first_difference_is_named(
    keep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.jsonl"
    record(path, None, keep_effects=keep)
    # Another policy: lanes do not take turns.
    monkeypatch.setattr(Lanes, "took_turn", lambda self, lane: None)
    found = replay(path).difference
    assert found is not None
    numbered = path.read_text().splitlines()[found.line - 1]
    assert json.loads(numbered)[0] == found.now
    text = found.text()
    assert text.startswith(f"line {found.line}, ") and "today" in text and "recorded" in text
    assert ("effect" in text) == keep or not keep


def test_a_core_that_breaks_on_the_trace_is_a_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.jsonl"
    record(path, None)
    real = planning._preempt

    def preempt(state: Any, seq: Any) -> None:
        real(state, seq)
        state.memory.blocks.give_back([0, 0])

    monkeypatch.setattr(planning, "_preempt", preempt)
    found = replay(path).difference
    assert found is not None and found.broken is not None and "given back twice" in found.text()


def test_the_recorder_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    events = record(path, 0, max_bytes=20_000)
    assert path.stat().st_size <= 20_000
    replayed = replay(path)
    assert (replayed.events, replayed.difference) == (events, None)


@pytest.mark.parametrize(
    "content",
    [b"", b"{}\n", b"not json\n", b'{"format":"rota-trace","version":99,"config":{}}\n'],
)
def test_files_that_are_no_trace_are_refused_by_name(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(RequestError) as caught:
        replay(path)
    assert caught.value.code == "bad-trace"


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path, 0)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:5]) + b"[1.0, [\n")
    _, rest = read_trace(path)
    with pytest.raises(RequestError) as caught:
        list(rest)
    assert caught.value.subject == "line 6"


def test_a_run_can_be_drawn(tmp_path: Path) -> None:
    chrome = ChromeTrace()
    outcome = run_scenario(scenario_of(0), (chrome,))
    path = tmp_path / "run.json"
    chrome.write(path)
    events = json.loads(path.read_text())["traceEvents"]
    steps = [e for e in events if e.get("cat") == "step"]
    assert len(steps) == outcome.steps and all(e["dur"] > 0 for e in steps)
    # One device: its steps never overlap.
    ends = [(e["ts"], e["ts"] + e["dur"]) for e in steps]
    assert all(a[1] <= b[0] + 0.2 for a, b in pairwise(ends))
    slots = [e for e in events if e.get("cat") == "slot"]
    for slot in {e["tid"] for e in slots}:
        spans = [(e["ts"], e["ts"] + e["dur"]) for e in slots if e["tid"] == slot]
        assert all(a[1] <= b[0] + 0.2 for a, b in pairwise(spans))
    assert {e["cat"] for e in events if "cat" in e} >= {
        "step",
        "commit",
        "stage",
        "slot",
        "request",
    }


def test_drawing_is_bounded() -> None:
    chrome = ChromeTrace(limit=50)
    run_scenario(scenario_of(0), (chrome,))
    assert len(json.loads(chrome.json())["traceEvents"]) <= 54 and chrome.dropped > 0


@pytest.mark.parametrize("size", ["more than a buffer", "less than a buffer"])
def test_a_full_disk_ends_the_recording_not_the_engine(
    size: str, caplog: pytest.LogCaptureFixture
) -> None:
    scenario = scenario_of(0)
    with Recorder("/dev/full", scenario.config) as recorder:
        if size == "more than a buffer":
            assert run_scenario(scenario, (recorder,)).violation is None
            assert "recording stops" in caplog.text
    assert caplog.text.count("recording stops") == 1 and "No space left" in caplog.text
    recorder.close()
