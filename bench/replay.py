"""Replay of the Azure conversation head: 2,000 requests, 1,000 adapters, 32 slots, simulated.

Run as a file: ``python bench/replay.py``. The real core and shell run in virtual time; what is
measured is their CPU time and the memory they need, the latter also for the first 500 and 1,000 of
the requests: what grows is the prefix cache until it has a node for every block of KV memory
(40,000 here), a name for each adapter, and 8 bytes a token for the report's exact quantiles. Writes
bench/results/replay.json.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import sys
import time
from pathlib import Path

import msgspec
from machine import describe

from rota.sched.core import CoreConfig
from rota.sched.replay.arrivals import read_azure, with_adapters
from rota.sched.replay.drive import Report, run_simulated

ROOT = Path(__file__).resolve().parent.parent


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def one(requests: int) -> tuple[float, float, Report]:
    """The first ``requests`` of the trace: seconds of CPU, MiB more at the most, and the report.
    In a process of its own, or the peak would be another run's."""
    rows = read_azure(ROOT / "tests/data/traces/azure2023_conv_head2000.csv", requests)
    rows = with_adapters(rows, adapters=1000, alpha=0.5, base_share=0.1, seed=1)
    config = CoreConfig(
        max_loras=32,
        num_blocks=40_000,
        max_context=8192,
        max_running=128,
        max_step_tokens=2048,
        mixed_step_tokens=1024,
        image_cache_bytes=64_000,
    )
    before = _peak_mib()
    begin = time.process_time()
    report = run_simulated(rows, config)
    return time.process_time() - begin, round(_peak_mib() - before, 1), report


def main() -> int:
    counts = (500, 1000, 2000)
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        runs = dict(zip(counts, pool.map(one, counts, chunksize=1), strict=True))
    seconds, _, report = runs[2000]
    grown = {requests: mib for requests, (_, mib, _) in runs.items()}
    record = {
        "what": "2,000 requests of the Azure 2023 conversation trace, 1,000 adapters, 32 slots",
        **describe(ROOT),
        "cpu_seconds": round(seconds, 2),
        "memory_grown_mib": grown,
        "report": msgspec.to_builtins(msgspec.structs.replace(report, stats=None)),
    }
    sys.stdout.write(f"{seconds:.2f} s of CPU; MiB more, by requests: {grown}\n")
    for label, value in report.rows():
        sys.stdout.write(f"{label:34} {value}\n")
    target = ROOT / "bench" / "results" / "replay.json"
    target.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
