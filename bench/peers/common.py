"""What every peer script shares: its arguments and its one line of JSON.

A peer script runs in a venv of its own, beside this file, and prints exactly one JSON line on
standard output: ``{"peer", "task", "versions", "settings", "rows"}``. Decode rows are
``{"mode", "batch", "tok_s", "rounds"}``: tokens per second over the whole batch, decode steps only,
the median of the rounds. Swap rows are ``{"operation", "ms", "min_ms", "n"}``, the median too.

Modes: ``base`` (the engine without any adapter), ``single`` (every row the same adapter),
``mixed8`` (row i has adapter i mod 8), ``mixed_base`` (the same, every second row the base).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

MODES = ("base", "single", "mixed8", "mixed_base")


def parse(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--adapters", type=Path, nargs="+", required=True, help="adapter folders")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--prompt", type=int, default=32, help="prompt tokens")
    parser.add_argument("--new", type=int, default=32, help="decode steps timed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=10, help="swap operations timed")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def row_adapters(mode: str, batch: int, names: list[str]) -> list[str | None]:
    """The adapter of each row, ``None`` for the base."""
    if mode == "base":
        return [None] * batch
    if mode == "single":
        return [names[0]] * batch
    rows: list[str | None] = [names[i % len(names)] for i in range(batch)]
    if mode == "mixed_base":
        rows[1::2] = [None] * len(rows[1::2])
    return rows


def prompts(batch: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    """Seeded random token ids; the first hundred ids are left out, specials are among them."""
    rng = random.Random(seed)
    return [[rng.randrange(100, vocab) for _ in range(length)] for _ in range(batch)]


def decode_rows(
    options: argparse.Namespace, measure: Callable[[str, int], float]
) -> list[dict[str, Any]]:
    """Run every (mode, batch) once a round, round after round, so that drift meets all alike."""
    cases = [(m, b) for m in options.modes for b in options.batches if m != "mixed_base" or b > 1]
    rates: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for _ in range(options.rounds):
        for case in cases:
            rates[case].append(measure(*case))
    return [
        {
            "mode": mode,
            "batch": batch,
            "tok_s": round(statistics.median(values), 1),
            "rounds": [round(value, 1) for value in values],
        }
        for (mode, batch), values in rates.items()
    ]


def swap_row(operation: str, seconds: list[float]) -> dict[str, Any]:
    ms = [1000 * value for value in seconds]
    return {
        "operation": operation,
        "ms": round(statistics.median(ms), 3),
        "min_ms": round(min(ms), 3),
        "n": len(ms),
    }


@contextlib.contextmanager
def quiet_stdout() -> Iterator[TextIO]:
    """Send what libraries (native ones too) print to standard error; yield the real output."""
    sys.stdout.flush()
    real = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(real, "w", encoding="utf-8") as output:
            yield output
    finally:
        sys.stdout.flush()


def report(
    output: TextIO,
    peer: str,
    task: str,
    packages: tuple[str, ...],
    options: argparse.Namespace,
    rows: list[dict[str, Any]],
    **settings: Any,
) -> None:
    """Print the one JSON line."""
    line = {
        "peer": peer,
        "task": task,
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "settings": {
            "threads": options.threads,
            "prompt": options.prompt,
            "new": options.new,
            "adapters": len(options.adapters),
            "seed": options.seed,
            **settings,
        },
        "rows": rows,
    }
    output.write(json.dumps(line) + "\n")
    output.flush()
