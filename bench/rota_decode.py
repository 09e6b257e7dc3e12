"""Decode speed of rota through its public Engine: base, base rows with LoRA on, one adapter, mixed.

    python bench/rota_decode.py --model DIR --adapters DIR...      (rota's own venv)

Prints one JSON line in the form of the peer scripts (bench/peers/common.py), with one more mode,
``base_lora_on``: base rows in an engine that holds all the adapters. Timed from the moment every
stream has its second token to the moment every stream has its last.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import anyio
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))
import common

import rota

common.MODES = ("base", "base_lora_on", "single", "mixed8", "mixed_base")


async def measure(engine: rota.Engine, adapters: list[str | None], prompts: Any, new: int) -> float:
    """Tokens per second of one lockstep run."""
    import time

    params = rota.SamplingParams(max_tokens=new + 2, ignore_eos=True)
    starts: list[float] = []
    ends: list[float] = []

    async def follow(stream: Any) -> None:
        async for event in stream:
            if event.index == 1:
                starts.append(time.perf_counter())
        ends.append(time.perf_counter())

    async with anyio.create_task_group() as tasks:
        # Submitted in one turn of the loop, so that all of them prefill in the same step.
        for stream in [
            engine.generate(p, a, params) for p, a in zip(prompts, adapters, strict=True)
        ]:
            tasks.start_soon(follow, stream)
    return len(prompts) * new / (max(ends) - max(starts))


async def run(options: Any) -> dict[str, Any]:
    names = [path.name for path in options.adapters]
    size = {"max_lora_rank": options.rank, "kv_bytes": 256 << 20}
    loaded = dict(zip(names, options.adapters, strict=True))
    rates: dict[tuple[str, int], list[float]] = {}
    async with (
        rota.Engine(options.model, max_loras=0, **size) as plain,
        rota.Engine(options.model, loaded, max_loras=len(names), **size) as engine,
    ):
        vocab = json.loads((options.model / "config.json").read_text())["vocab_size"]
        for turn in range(options.rounds + 1):
            # Modes of one batch size follow each other, so that drift meets what is compared alike.
            for batch, mode in itertools.product(options.batches, options.modes):
                if mode == "mixed_base" and batch == 1:
                    continue
                rows = common.row_adapters("base" if mode == "base_lora_on" else mode, batch, names)
                feed = common.prompts(batch, options.prompt, vocab, options.seed)
                which = plain if mode == "base" else engine
                rate = await measure(which, rows, feed, options.new)
                if turn:  # the first round warms caches and kernels
                    rates.setdefault((mode, batch), []).append(rate)
    return rates


def main() -> None:
    options = common.parse(__doc__.splitlines()[0])
    options.rank = 16
    if options.modes == ["base", "single", "mixed8", "mixed_base"]:
        options.modes = list(common.MODES)
    torch.set_num_threads(options.threads)
    with common.quiet_stdout() as output:
        rates = anyio.run(run, options)
        import statistics

        rows = [
            {
                "mode": mode,
                "batch": batch,
                "tok_s": round(statistics.median(values), 1),
                "rounds": [round(value, 1) for value in values],
            }
            for (mode, batch), values in rates.items()
        ]
        common.report(output, "rota", "decode", ("rota", "torch"), options, rows, dtype="bfloat16")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
