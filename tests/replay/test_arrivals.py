"""Readers of public traces and the generators: shapes, laws, seeds, refusals."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev

import msgspec
import pytest

from rota.errors import RequestError
from rota.sched.core import CoreConfig
from rota.sched.core import effects as fx
from rota.sched.core import events as ev
from rota.sched.replay.arrivals import (
    Arrival,
    controls,
    prompt_of,
    read_azure,
    read_mooncake,
    read_recorded,
    read_servegen,
    scaled,
    slora,
    with_adapters,
)
from rota.sched.replay.drive import Costs, run_simulated
from rota.sched.replay.record import Recorder

CONFIG = CoreConfig(
    max_loras=32,
    num_blocks=40_000,
    max_context=8192,
    max_running=128,
    max_step_tokens=2048,
    mixed_step_tokens=1024,
    image_cache_bytes=64_000,
)


def test_azure_rows_and_times(traces: Path) -> None:
    rows = read_azure(traces / "azure2023_conv_head2000.csv")
    assert len(rows) == 2000
    assert (rows[0].at, rows[0].prompt, rows[0].tokens) == (0.0, 374, 44)
    assert rows[1].at == pytest.approx(4.314579, abs=1e-6)
    assert all(a.at <= b.at for a, b in pairwise(rows))


def test_mooncake_rows_keep_their_prefixes(traces: Path) -> None:
    rows = read_mooncake(traces / "mooncake_conversation_head400.jsonl", limit=100)
    assert len(rows) == 100
    assert (rows[0].prompt, rows[0].tokens, rows[0].prefix[:3]) == (6758, 500, (0, 1, 2))
    named = with_adapters(rows, adapters=8, alpha=1.0, base_share=0.2, seed=3)
    sessions: dict[int, set[str | None]] = {}
    for row in named:
        sessions.setdefault(row.prefix[1], set()).add(row.adapter)
    assert all(len(adapters) == 1 for adapters in sessions.values())


def test_servegen_clients_are_adapters_at_their_rates(traces: Path) -> None:
    path = traces / "servegen_m-large_top13_day0.csv"
    rows = read_servegen(path, seconds=1200.0, seed=5, speed=20.0)
    assert rows == read_servegen(path, seconds=1200.0, seed=5, speed=20.0)
    counts = Counter(r.adapter for r in rows)
    # Client 61: 87.2 and 93.6 requests a second in the first two windows, here a 20th of it.
    assert counts["c61"] == pytest.approx((87.2 + 93.6) * 600 / 20, rel=0.15)


def test_slora_arrivals_have_the_asked_rate_spread_and_skew() -> None:
    for cv in (0.5, 1.0, 2.0):
        rows = slora(adapters=100, rate=50.0, seconds=200.0, seed=1, cv=cv, alpha=0.5)
        gaps = [b.at - a.at for a, b in pairwise(rows)]
        assert len(rows) / 200.0 == pytest.approx(50.0, rel=0.1)
        assert pstdev(gaps) / fmean(gaps) == pytest.approx(cv, rel=0.15)
        # P(index < N/4) = (1/4)**alpha
        low = sum(int(r.adapter[1:]) < 25 for r in rows if r.adapter) / len(rows)
        assert low == pytest.approx(0.25**0.5, abs=0.03)


@pytest.mark.parametrize(
    "content", ["a,b\n1,2\n", "TIMESTAMP,ContextTokens,GeneratedTokens\nx,1,2\n"]
)
def test_other_files_are_refused_by_name(content: str, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text(content)
    with pytest.raises(RequestError) as caught:
        read_azure(path)
    assert caught.value.code == "bad-trace"
    with pytest.raises(RequestError):
        read_mooncake(path)
    with pytest.raises(RequestError):
        read_servegen(path, seconds=10.0, seed=0)


def test_a_day_with_commands_is_served_and_replays_from_its_record(tmp_path: Path) -> None:
    load = slora(adapters=40, rate=30.0, seconds=8.0, seed=2, prompt=(4, 64), tokens=(2, 24))
    names = [f"a{i}" for i in range(40)]
    commands = list(controls(names, rate=6.0, seconds=8.0, seed=3))
    path = tmp_path / "day.jsonl"
    with Recorder(path, CONFIG) as recorder:
        report = run_simulated(load, CONFIG, commands=commands, observers=(recorder,))
    served = report.ends.get("length", 0)
    assert served >= 0.5 * len(load)
    verbs = {key.partition(":")[0] for key in report.ends if ":" in key}
    assert verbs <= {"load", "replace", "unload", "cancel"}
    assert report.stats is not None and report.stats.commits > 20
    again = read_recorded(path)
    assert len(again) >= len(load)
    same = run_simulated(load, CONFIG, commands=commands)
    assert (same.ends, same.ttft, same.seconds) == (report.ends, report.ttft, report.seconds)


def test_a_thousand_adapters_in_32_slots(traces: Path) -> None:
    """An eighth of the Azure head (bench/replay.py takes all of it): nobody is refused, and
    every cold start is bounded by staging, one commit and the steps in between."""
    rows = read_azure(traces / "azure2023_conv_head2000.csv", limit=250)
    rows = with_adapters(rows, adapters=1000, alpha=0.5, base_share=0.1, seed=1)
    report = run_simulated(scaled(rows, 1.0, 8192), CONFIG, costs=Costs())
    assert report.ends == {"length": 250}
    assert report.stats is not None and report.stats.evicted > 60
    assert report.ttft[2] < 1.0 and report.gap[2] < 0.05


def test_memory_does_not_grow_with_the_trace() -> None:
    """Bursts that end before the next begins. Once every bounded thing is full (the prefix cache
    has a node for each of 256 blocks, the log its 64 lines), nothing more is held than before:
    not the requests, their tokens, effects, images or streams. Names are known from the start."""
    config = msgspec.structs.replace(CONFIG, num_blocks=256, log_size=64, max_loras=4)
    load = [
        Arrival(60.0 * burst, f"a{(burst * 7 + i) % 12}", 40 + i, 20)
        for burst in range(60)
        for i in range(12)
    ]
    held: list[int] = []
    moments = [60.0 * 20, 60.0 * 59]

    def count(event: ev.Event, effects: list[fx.Effect], now: float) -> None:
        if isinstance(event, ev.Submit) and moments and now >= moments[0]:
            moments.pop(0)
            gc.collect()
            held.append(sys.getallocatedblocks())

    report = run_simulated(load, config, observers=(count,))
    assert report.ends == {"length": len(load)}
    # 468 requests: one object kept of each, or one of every second token, would be far more.
    assert held[1] - held[0] < 234


def test_prompts_begin_alike_as_far_as_their_prefix_ids_do() -> None:
    one = prompt_of(Arrival(0.0, None, 1200, 1, (4, 9)), 1, 50_000)
    two = prompt_of(Arrival(0.0, None, 1300, 1, (4, 9, 11)), 2, 50_000)
    assert (len(one), len(two)) == (1200, 1300)
    assert one[:1024] == two[:1024] and one[1024:1040] != two[1024:1040]
    assert one[:512] != one[512:1024]
    assert prompt_of(Arrival(0.0, None, 64, 1), 1, 256) != prompt_of(
        Arrival(0.0, None, 64, 1), 2, 256
    )


def test_conversations_of_a_trace_are_found_in_the_prefix_cache(traces: Path) -> None:
    rows = scaled(read_mooncake(traces / "mooncake_conversation_head400.jsonl", 60), 4.0, 2048)
    rows = with_adapters(rows, adapters=4, alpha=1.0, base_share=0.2, seed=3)
    with_cache = run_simulated(rows, CONFIG)
    without = run_simulated(rows, msgspec.structs.replace(CONFIG, prefix_cache=False))
    assert with_cache.stats is not None and without.stats is not None
    assert with_cache.ends == without.ends
    prefix = with_cache.stats.prefix
    assert 0.05 < prefix.hit / prefix.queried < 1 and without.stats.prefix.hit == 0
    assert with_cache.stats.steps <= without.stats.steps
