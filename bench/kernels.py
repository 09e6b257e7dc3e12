"""Microseconds of every host kernel at the shapes of SmolLM2-135M, beside its torch reference.

One thread. Prints a table and, with `--write`, leaves `results/kernels-smol.json`. LoRA weights of
30 layers are walked in turn, so that they come from where a real step would find them.

    python bench/kernels.py [--rows 1 8 16] [--context 128] [--write]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path

import torch

from rota.gpu.kernels.bgmv import LoraGroup, LoraSlice
from rota.gpu.kernels.host import HostKernels

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTER, VOCAB = 30, 576, 9, 3, 64, 1536, 49152
RANK, SLOTS = 16, 8
DTYPE = torch.bfloat16
GROUPS = {
    "lora qkv": (HIDDEN, (576, 192, 192)),
    "lora o": (HIDDEN, (576,)),
    "lora gate_up": (HIDDEN, (1536, 1536)),
    "lora down": (INTER, (576,)),
}
LINEARS = {
    "linear qkv": (HIDDEN, 960),
    "linear o": (HIDDEN, 576),
    "linear gate_up": (HIDDEN, 3072),
    "linear down": (INTER, 576),
    "linear head": (HIDDEN, VOCAB),
}


def best(call: Callable[[], object], seconds: float = 0.3) -> float:
    """The least time of one call in microseconds, over about `seconds` of calls."""
    call()
    least, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        least = min(least, time.perf_counter() - start)
    return least * 1e6


class Adapters:
    """Tables of one fused linear for every layer and slot."""

    def __init__(self, k_in: int, outs: tuple[int, ...]) -> None:
        self.keep: list[torch.Tensor] = []
        self.k_in, self.outs = k_in, outs
        self.layers = [self._slices() for _ in range(LAYERS)]

    def _slices(self) -> tuple[LoraSlice, ...]:
        slices, column = [], 0
        for n_out in self.outs:
            a = torch.randn(SLOTS, RANK, self.k_in).to(DTYPE) * 0.1
            b = torch.randn(SLOTS, n_out, RANK).to(DTYPE) * 0.1
            cells = torch.tensor([[m[slot].data_ptr() for slot in range(SLOTS)] for m in (a, b)])
            scales = torch.ones(SLOTS)
            self.keep += [a, b, cells, scales]
            addresses = (cells[0].data_ptr(), cells[1].data_ptr(), scales.data_ptr())
            slices.append(LoraSlice(*addresses, n_out, column))
            column += n_out
        return tuple(slices)

    def groups(self, kernels: HostKernels) -> list[LoraGroup]:
        return [
            kernels.lora_group(s, k_in=self.k_in, rank=RANK, max_loras=SLOTS) for s in self.layers
        ]


def row_kernels(kernels: HostKernels, rows: int, context: int) -> dict[str, Callable[[], None]]:
    """The calls of one layer that are neither linears nor LoRA."""
    x, residual, w = (torch.randn(n, HIDDEN).to(DTYPE) for n in (rows, rows, 1))
    normed = torch.empty_like(x)
    gate_up = torch.randn(rows, 2 * INTER).to(DTYPE)
    gated = torch.empty(rows, INTER, dtype=DTYPE)
    qkv = torch.randn(rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM).to(DTYPE)
    per = -(-context // 16)
    caches = torch.randn(2, rows * per, KV_HEADS, 16, HEAD_DIM).to(DTYPE)
    tables = torch.randperm(rows * per).view(rows, per).int()
    angles = torch.rand(context, HEAD_DIM // 2) * 6
    cos, sin = angles.cos(), angles.sin()
    positions = torch.full((rows,), context - 1, dtype=torch.int32)
    slots = tables[:, -1].long() * 16 + (context - 1) % 16
    sequence, lens = torch.arange(rows, dtype=torch.int32), positions + 1
    q = qkv[:, : HEADS * HEAD_DIM].view(rows, HEADS, HEAD_DIM)
    out = torch.empty(rows, HEADS * HEAD_DIM, dtype=DTYPE)
    return {
        "rms_norm": lambda: kernels.rms_norm(x, w[0], 1e-5, normed),
        "add_rms_norm": lambda: kernels.add_rms_norm(x, residual, w[0], 1e-5, normed),
        "rope_and_cache": lambda: kernels.rope_and_cache(
            qkv, HEADS, KV_HEADS, positions, cos, sin, caches[0], caches[1], slots
        ),
        "paged_attention": lambda: kernels.paged_attention(
            q, caches[0], caches[1], tables, sequence, lens, HEAD_DIM**-0.5, out
        ),
        "silu_mul": lambda: kernels.silu_mul(gate_up, gated),
    }


def lora_call(groups: list[LoraGroup], rows: int) -> Callable[[], None]:
    """One group of every layer in turn; rows go through the slots."""
    columns = sum(part.n_out for part in groups[0].slices)
    x = torch.randn(rows, groups[0].k_in).to(DTYPE)
    out = torch.randn(rows, columns).to(DTYPE)
    slots = (torch.arange(rows) % SLOTS).int()
    at = (x.data_ptr(), x.stride(0), out.data_ptr(), out.stride(0), slots.data_ptr(), rows)

    def call() -> None:
        for group in groups:
            group.apply(*at)

    # The tensors live as long as the call.
    call.keep = (x, out, slots)  # type: ignore[attr-defined]  # keeps what the addresses name alive
    return call


def machine() -> dict[str, object]:
    """The machine and the software, without names of hosts or paths."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), "unknown")
    here = Path(__file__).resolve().parent
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "threads_used": torch.get_num_threads(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "numba": metadata.version("numba"),
        "commit": commit.stdout.strip(),
        "dtype": str(DTYPE),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    fast, plain = HostKernels(DTYPE), HostKernels(DTYPE, use_numba=False)
    figures: list[dict[str, object]] = []

    def note(name: str, rows: int, ours: float, torchs: float) -> None:
        print(f"{name:16} {rows:4} {ours:10.1f} {torchs:12.1f} {torchs / ours:7.1f}x", flush=True)
        figures.append(
            {"call": name, "rows": rows, "us": round(ours, 2), "torch_us": round(torchs, 2)}
        )

    print(f"{'call':16} {'rows':>4} {'us':>10} {'torch us':>12} {'ratio':>8}")
    for rows in chosen.rows:
        mine = row_kernels(fast, rows, chosen.context)
        for name, other in row_kernels(plain, rows, chosen.context).items():
            note(name, rows, best(mine[name]), best(other, 0.1))
    for name, (k_in, n_out) in LINEARS.items():
        weight = (torch.randn(n_out, k_in) * 0.05).to(DTYPE)
        linear = fast.linear(weight)
        for rows in chosen.rows:
            x = torch.randn(rows, k_in).to(DTYPE)
            ours = best(partial(linear, x))
            note(name, rows, ours, best(partial(torch.matmul, x, weight.T)))
    for name, (k_in, outs) in GROUPS.items():
        adapters = Adapters(k_in, outs)
        for rows in chosen.rows:
            ours = best(lora_call(adapters.groups(fast), rows), 1.0) / LAYERS
            note(name, rows, ours, best(lora_call(adapters.groups(plain), rows), 0.1) / LAYERS)
    if chosen.write:
        results = Path(__file__).resolve().parent / "results"
        results.mkdir(exist_ok=True)
        record = {
            "what": "microseconds a call, least of many; attention at the given context",
            "context": chosen.context,
            "machine": machine(),
            "figures": figures,
        }
        (results / "kernels-smol.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
