"""Replay of the Azure conversation head: 2,000 requests, 1,000 adapters, 32 slots, simulated.

Run as a file: ``python bench/replay.py``. The real core and shell run in virtual time; what is
measured is their CPU time and the memory they need. Writes bench/results/replay.json.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

import msgspec
from machine import describe

from rota.sched.core import CoreConfig
from rota.sched.replay.arrivals import read_azure, with_adapters
from rota.sched.replay.drive import run_simulated

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    rows = read_azure(ROOT / "tests/data/traces/azure2023_conv_head2000.csv")
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
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.process_time()
    report = run_simulated(rows, config)
    seconds = time.process_time() - begin
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    record = {
        "what": "2,000 requests of the Azure 2023 conversation trace, 1,000 adapters, 32 slots",
        **describe(ROOT),
        "cpu_seconds": round(seconds, 2),
        "memory_grown_mib": round(grown / 1024, 1),
        "report": msgspec.to_builtins(msgspec.structs.replace(report, stats=None)),
    }
    sys.stdout.write(f"{seconds:.2f} s of CPU, {grown / 1024:.1f} MiB more\n")
    for label, value in report.rows():
        sys.stdout.write(f"{label:34} {value}\n")
    target = ROOT / "bench" / "results" / "replay.json"
    target.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
