"""The host's linears of one model, on matrix tiles and by the library, in milliseconds a step.

    python bench/linears_cpu.py [--layers 30] [--write]

One thread, bf16, shapes of SmolLM2-135M: the four linears of every layer with weights of their own
and the head, so that a step reads 270 MB as decoding does. Both ways take turns, sample by sample;
a figure is their median. Where a processor has no tiles, both are the library's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from machine import describe

from rota.gpu.kernels.host import HostKernels
from rota.gpu.kernels.linear import Linear

ROOT = Path(__file__).resolve().parent.parent
HIDDEN, INNER, VOCAB = 576, 1536, 49152
LAYER = ((960, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER))
ROWS = (1, 8, 16, 32, 64, 256)
SAMPLES = 9


def pack(kernels: HostKernels, layers: int) -> list[Linear]:
    """The linears of a step, in order."""
    shapes = [*LAYER * layers, (VOCAB, HIDDEN)]
    made = [kernels.linear(torch.full(shape, 0.01, dtype=torch.bfloat16)) for shape in shapes]
    kernels.settle()
    return made


def step_ms(linears: Sequence[Linear], inputs: dict[int, torch.Tensor]) -> float:
    """Milliseconds of one call of each."""
    begin = time.perf_counter()
    for linear in linears:
        linear(inputs[linear.k_in])
    return 1e3 * (time.perf_counter() - begin)


def main() -> int:
    """Time both ways."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=30, help="layers of the model")
    parser.add_argument("--write", action="store_true", help="keep the record")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kernels = {
        True: HostKernels(torch.bfloat16),
        False: HostKernels(torch.bfloat16, use_tiles=False),
    }
    results: list[dict[str, Any]] = []
    with torch.inference_mode():
        linears = {tiles: pack(own, options.layers) for tiles, own in kernels.items()}
        for rows in ROWS:
            inputs = {k: torch.full((rows, k), 0.5, dtype=torch.bfloat16) for k in (HIDDEN, INNER)}
            times: dict[bool, list[float]] = {True: [], False: []}
            for sample in range(SAMPLES + 1):
                for tiles, own in linears.items():
                    took = step_ms(own, inputs)
                    if sample:  # the first may compile
                        times[tiles].append(took)
            ours, theirs = (round(statistics.median(times[tiles]), 2) for tiles in (True, False))
            results.append({"rows": rows, "ms": ours, "library_ms": theirs})
            print(f"{rows:>4} rows {ours:8.2f} ms {theirs:8.2f} ms of the library", flush=True)
    if options.write:
        record = {
            "what": f"linears of a step of {options.layers} layers and the head, one thread, bf16",
            **describe(ROOT),
            "torch": torch.__version__,
            "tiles": kernels[True].uses_tiles,
            "weight_bytes": sum(2 * linear.n_out * linear.k_in for linear in linears[True]),
            "results": results,
        }
        path = ROOT / "bench/results/linears-cpu.json"
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
