"""``rota inspect``: what an adapter is, and whether a model would take it. No device, no weights.

Owns the command's flags and its two faces, a table and JSON. Exit codes: 0 accepted, 1 refused,
2 unreadable.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import RejectError, RotaError
from ..gpu.lora.layout import Elem, SlotLayout
from ..gpu.lora.report import delta_norms
from ..gpu.lora.source import DirectorySource
from ..gpu.lora.stage import stage
from ..gpu.model.config import load_config

if TYPE_CHECKING:
    from rich.console import Console

ACCEPTED, REFUSED, UNREADABLE = 0, 1, 2


def add_inspect_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add ``inspect`` to the command line's subparsers."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "inspect",
        help="report on an adapter directory: accepted, or refused and why",
        description="Read and audit a PEFT LoRA directory exactly as an engine would, for the "
        "model given. Exit code 0: accepted; 1: refused; 2: unreadable.",
    )
    parser.add_argument("adapter", type=Path, help="adapter directory")
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--max-lora-rank", type=int, default=64, help="rank of a slot (64)")
    parser.add_argument("--overlay-rows", type=int, default=0, help="token rows of a slot (0)")
    parser.add_argument("--follow-links", action="store_true", help="as hub caches need")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    return parser


def inspect(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Exit code and report (plain values). Raises ModelError if the model cannot be read."""
    dims = load_config(args.model).to_lora_dims()
    layout = SlotLayout(dims, args.max_lora_rank, Elem.BF16, args.overlay_rows)
    source = DirectorySource(args.adapter, follow_links=args.follow_links)
    try:
        staged = stage(source, layout)
    except RotaError as error:
        refused = isinstance(error, RejectError)
        return REFUSED if refused else UNREADABLE, {
            "accepted": False,
            "code": f"REJECT[{error.code}]" if refused else error.code,
            "message": error.message,
            "subject": error.subject,
            "expected": error.expected,
            "found": error.found,
        }
    except OSError as error:
        return UNREADABLE, {"accepted": False, "code": "unreadable", "message": str(error)}
    norms = delta_norms(staged.image, layout)
    by_layer: dict[int, float] = {}
    for pair, norm in zip(layout.pairs, norms, strict=True):
        by_layer[pair.layer] = by_layer.get(pair.layer, 0.0) + float(norm) ** 2
    report = asdict(staged.report)
    return ACCEPTED, {
        "accepted": True,
        "digest": staged.digest,
        **{k: dict(v) if isinstance(v, dict) else v for k, v in report.items()},
        "delta_norm_per_layer": {k: round(v**0.5, 4) for k, v in sorted(by_layer.items())},
    }


def run_inspect(args: argparse.Namespace, console: Console) -> int:
    """Print the report; returns the exit code."""
    code, report = inspect(args)
    if args.json:
        text = msgspec.json.encode(report).decode()
        console.print(text, soft_wrap=True, highlight=False, markup=False)
        return code
    from rich.table import Table
    from rich.text import Text

    table = Table(title=str(args.adapter), show_header=False)
    for name, value in report.items():
        if value in (None, (), {}):
            continue
        table.add_row(name.replace("_", " "), Text(_shown(name, value)))
    console.print(table)
    return code


def _shown(name: str, value: Any) -> str:
    """A value of the report for people; JSON has it exactly."""
    if name == "delta_norm_per_layer":
        return _spark(list(value.values()))
    if name == "seconds":
        return ", ".join(f"{phase} {took * 1e3:.1f} ms" for phase, took in value.items())
    if name in ("ranks", "scales"):
        return ", ".join(f"{what} in {count} pairs" for what, count in value)
    if name.endswith("_bytes"):
        return f"{value / 1e6:.1f} MB"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{what} {count}" for what, count in value.items())
    if isinstance(value, (list, tuple)):
        return "\n".join(map(str, value))
    return str(value)


def _spark(values: list[float]) -> str:
    """Layers from first to last as one line of bars, with the range."""
    bars = " ▁▂▃▄▅▆▇█"
    top = max(values, default=0.0) or 1.0
    line = "".join(bars[round(v / top * 8)] for v in values)
    return f"{line}  0 .. {top:.4g}"
