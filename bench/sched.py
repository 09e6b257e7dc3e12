"""Planning cost: what the pure core takes per step, by rows, registered adapters and who waits.

Run as a file: ``python bench/sched.py [--quick]``. Writes bench/results/sched.json: microseconds
of CPU of one step's work in the core (``Plan`` that makes the step, ``next_wake``, then its
``StepDone``), the median over steps, with the interpreter's garbage collector on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from machine import describe

from rota.sched.core import Core, CoreConfig
from rota.sched.core import effects as fx
from rota.sched.core import events as ev

ROOT = Path(__file__).resolve().parent.parent
SLOTS = 32


class Bench:
    """A core kept at ``rows`` decoding sequences, with others waiting behind them."""

    def __init__(self, rows: int, registered: int, waiting: int, depth: int) -> None:
        self.core = Core(
            CoreConfig(
                max_loras=SLOTS,
                num_blocks=rows * 40 + 64,
                max_context=600,
                max_running=rows,
                max_waiting=max(waiting, 16) + rows,
                max_step_tokens=4096,
                mixed_step_tokens=max(512, 2 * rows),
                max_names=registered + 1,
                log_size=4096,
                step_depth=depth,
            )
        )
        self.now = 0.0
        self.ids = 0
        self.steps: deque[fx.RunStep] = deque()
        self.registered = registered
        resident = min(SLOTS, registered)
        for index in range(registered):
            self.send(ev.Register(self.new_id(), f"a{index}", index))
        self.pending: list[Any] = []
        for index in range(resident):
            self.settle_effects(self.send(ev.Promote(self.new_id(), f"a{index}")))
        for index in range(rows):
            self.submit(f"a{index % resident}")
        self.waiting = waiting
        for index in range(waiting):
            # Who waits: base, hot adapters, and cold ones of every name there is.
            name = None if index % 16 == 0 else f"a{(index * 7919) % registered}"
            self.submit(name)

    def new_id(self) -> int:
        self.ids += 1
        return self.ids

    def send(self, event: ev.Event) -> list[fx.Effect]:
        return self.core.handle(event, self.now)

    def submit(self, name: str | None) -> None:
        self.send(ev.Submit(self.new_id(), tuple(range(8)), name, False, 500))

    def settle_effects(self, effects: list[fx.Effect]) -> None:
        """Carry out what is not a step; steps are kept in :attr:`steps`."""
        for effect in effects:
            if isinstance(effect, fx.StartStage):
                done = ev.StageDone(effect.stage, effect.stage, f"d{effect.source}", 1000)
                self.settle_effects(self.send(done))
            elif isinstance(effect, fx.Commit):
                self.settle_effects(self.send(ev.CommitDone(effect.commit)))
            elif isinstance(effect, fx.RunStep):
                self.steps.append(effect)

    def measure(self, steps: int) -> list[float]:
        """Microseconds of core time for each of ``steps`` steps."""
        took = []
        for _ in range(steps):
            self.now += 0.02
            begin = time.process_time()
            effects = self.send(ev.Plan())
            wake = self.core.next_wake()
            half = time.process_time() - begin
            assert wake is None or wake >= 0
            self.settle_effects(effects)
            step = self.steps.popleft()
            done = ev.StepDone(step.step, tuple(ev.RowDone(r.seq, 7) for r in step.rows))
            begin = time.process_time()
            self.send(done)
            took.append((half + time.process_time() - begin) * 1e6)
        return took


def measure(rows: int, registered: int, waiting: int, steps: int, depth: int) -> dict[str, Any]:
    bench = Bench(rows, registered, waiting, depth)
    for _ in range(3):
        bench.measure(20)  # admissions and misses settle first
    took = bench.measure(steps)
    p99 = sorted(took)[int(len(took) * 0.99)]
    return {
        "rows": rows,
        "registered": registered,
        "waiting": waiting,
        "steps": steps,
        "depth": depth,
        "ahead": bench.core.stats().steps_ahead,
        "median_us": round(statistics.median(took), 1),
        "p99_us": round(p99, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer points, nothing written")
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    results = []
    for rows in (64,) if args.quick else (1, 16, 64, 256):
        for registered in (10, 10_000) if args.quick else (10, 1_000, 10_000):
            for waiting in (0, 10_000):
                for depth in (1, 2):
                    one = measure(rows, registered, waiting, args.steps, depth)
                    results.append(one)
                    sys.stdout.write(json.dumps(one) + "\n")
                    sys.stdout.flush()
    if args.quick:
        return 0
    at64 = {
        (r["registered"], r["waiting"], r["depth"]): r["median_us"]
        for r in results
        if r["rows"] == 64
    }
    record = {
        "what": "core time per step: Plan + next_wake + StepDone; decoding rows, 32 slots",
        **describe(ROOT),
        "median_us_at_64_rows": at64[(10_000, 10_000, 1)],
        "median_us_at_64_rows_ahead": at64[(10_000, 10_000, 2)],
        "ratio_10000_to_10_registered": round(at64[(10_000, 10_000, 1)] / at64[(10, 10_000, 1)], 2),
        "results": results,
    }
    target = ROOT / "bench" / "results" / "sched.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
