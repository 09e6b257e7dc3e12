"""``rota inspect``: what an adapter is, and whether a model would take it. No device.

Owns the command's flags and what it finds out, as plain values; `inspect_view` shows them. Exit
codes: 0 accepted, 1 refused, 2 unreadable (or not to be judged without ``--model``).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ..errors import ModelError, RejectError, RotaError
from ..gpu.lora.config import PeftConfig, parse_config
from ..gpu.lora.inspection import (
    StandIn,
    engine_options,
    guess_layout,
    has_token_factors,
    least_annex,
    module_rows,
    needs_model,
    own_bytes,
    sort_keys,
)
from ..gpu.lora.layout import Elem, SlotLayout
from ..gpu.lora.mlx import to_peft_tensors
from ..gpu.lora.overlay import BaseRows
from ..gpu.lora.safefile import CONFIG_NAME, FileLimits, Tensor, parse_shards
from ..gpu.lora.source import AdapterSource, BytesSource, DirectorySource, RawAdapter
from ..gpu.lora.stage import stage
from ..gpu.model.config import load_config

if TYPE_CHECKING:
    from rich.console import Console

ACCEPTED, REFUSED, UNREADABLE = 0, 1, 2
LISTED: Final = 50
"""Refused tensors a report lists; the rest are counted."""


def add_inspect_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add ``inspect`` to the command line's subparsers."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "inspect",
        help="report on an adapter: what it is, accepted, or refused and why",
        description="Read and audit a LoRA adapter exactly as an engine would: for the model "
        "given, or for any dense model its shapes fit. Exit code 0: accepted; 1: refused; "
        "2: unreadable.",
    )
    parser.add_argument("adapter", type=Path, help="adapter directory, or its safetensors file")
    parser.add_argument("--model", type=Path, help="checkpoint directory")
    parser.add_argument("--max-lora-rank", type=int, help="rank of a slot (with --model: 64)")
    parser.add_argument("--overlay-rows", type=int, help="token rows of a slot (with --model: 0)")
    parser.add_argument("--follow-links", action="store_true", help="as hub caches need")
    parser.add_argument("--plot", action="store_true", help="the delta norm of each layer as bars")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    return parser


@dataclass(frozen=True, slots=True)
class _Held:
    """Bytes that were read already, as a source."""

    raw: RawAdapter

    def read(self, limits: FileLimits) -> RawAdapter:
        return self.raw


def inspect(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Exit code and report (plain values). A model that cannot be read is in the report too."""
    report: dict[str, Any] = {"accepted": False}
    try:
        model = None if args.model is None else load_config(args.model)
        raw = _source(args.adapter, args.follow_links).read(FileLimits())
        report["digest"] = raw.digest()
        config = parse_config(raw.config)
        tensors = parse_shards(raw.shards, FileLimits())
        if config.mlx:
            tensors = to_peft_tensors(tensors)
        report["what"] = _what(raw, config, tensors)
        if model is None and (key := needs_model(tensors)) is not None:
            return UNREADABLE, report | {
                "code": "needs-model",
                "message": "this kind of adapter can be judged only against its base: add --model",
                "subject": key,
            }
        layout = _layout(args, config, tensors)
        report |= {"model": None if args.model is None else str(args.model)}
        report["keys"] = _keys(tensors, layout)
        with _base(args.model, layout, tensors) as base:
            staged = stage(_Held(raw), layout, base_rows=base)
    except RotaError as error:
        refused = isinstance(error, RejectError)
        return REFUSED if refused else UNREADABLE, report | {
            "code": f"REJECT[{error.code}]" if refused else error.code,
            "message": error.message,
            "subject": error.subject,
            "expected": error.expected,
            "found": error.found,
        }
    except OSError as error:
        return UNREADABLE, report | {"code": "unreadable", "message": str(error)}
    rows, norms = module_rows(staged.image, layout)
    facts = asdict(staged.report)
    if model is None:
        # Reckoned against a stand-in: the number of changed rows needs the base's own.
        facts["slot_bytes"] = own_bytes(staged.image, layout)
        facts["notes"] = (*facts["notes"], "no model given: shapes are guessed from the tensors")
    needs = engine_options(config, staged.image, layout)
    facts["annex_bytes"] = least_annex(staged.image, layout, needs)
    report |= facts | {"accepted": True, "modules": [asdict(row) for row in rows]}
    report["needs"] = needs
    report["delta_norm_per_layer"] = {n: round(norm, 4) for n, norm in enumerate(norms)}
    return ACCEPTED, report


def _source(path: Path, follow_links: bool) -> AdapterSource:
    """The directory, or a file with the config beside it."""
    if not path.is_file():
        return DirectorySource(path, follow_links=follow_links)
    config = path.parent / CONFIG_NAME
    if not config.exists():
        raise RejectError(
            "no adapter config beside the file", code="missing-config", expected=CONFIG_NAME
        )
    return BytesSource(path.read_bytes(), config.read_bytes())


def _what(raw: RawAdapter, config: PeftConfig, tensors: list[Tensor]) -> dict[str, Any]:
    """What the files say of themselves."""
    kinds = ["DoRA" if config.use_dora else "LoRA"]
    for on, name in (
        (config.use_rslora, "rank-stabilised scale"),
        (config.has_patterns, "rank or alpha patterns"),
        (config.lora_bias, "biases of B"),
        (config.bias != "none", f"trained biases ({config.bias})"),
        (bool(config.token_indices), "token rows"),
        (bool(config.modules_to_save), "saved " + ", ".join(config.modules_to_save)),
        (config.layers_to_transform is not None, "some layers only"),
    ):
        kinds += [name] if on else []
    return {
        "format": "mlx-lm" if config.mlx else "PEFT",
        "kind": ", ".join(kinds),
        "r": config.r,
        "lora_alpha": config.lora_alpha,
        "files": len(raw.shards),
        "tensors": len(tensors),
        "file_bytes": raw.nbytes,
        "dtypes": sorted({tensor.dtype for tensor in tensors}),
    }


def _layout(args: argparse.Namespace, config: PeftConfig, tensors: list[Tensor]) -> SlotLayout:
    model: Path | None = args.model
    if model is None:
        guess = guess_layout(config, tensors)
        dims, rank, rows = guess.dims, guess.max_rank, guess.overlay_rows
    else:
        dims, rank, rows = load_config(model).to_lora_dims(expert_adapters=True), 64, 0
    if args.max_lora_rank is not None:
        rank = args.max_lora_rank
    if args.overlay_rows is not None:
        rows = args.overlay_rows
    # Room for token matrices only where the adapter has factors of them: most engines have none.
    tokens = rank if has_token_factors(tensors) else 0
    return SlotLayout(dims, rank, Elem.BF16, rows, affine=True, embedding_rank=tokens)


def _keys(tensors: list[Tensor], layout: SlotLayout) -> dict[str, Any]:
    keys = sort_keys(tensors, layout.dims)
    listed = [{"key": k, "code": c, "why": why} for k, c, why in keys.refused[:LISTED]]
    return {"matched": keys.matched, "refused": len(keys.refused), "refused_keys": listed}


@contextmanager
def _base(model: Path | None, layout: SlotLayout, tensors: list[Tensor]) -> Iterator[BaseRows]:
    """The model's own weights where they are there, else a stand-in for them."""
    if model is None:
        yield StandIn(layout, tensors)
        return
    import torch

    from ..gpu.model.linears import BaseLinears, CheckpointBase

    try:
        linears = BaseLinears(model, torch.bfloat16, layout.dims)
    except ModelError:  # a config without weights still says which shapes fit
        yield StandIn(layout, tensors)
        return
    try:
        yield CheckpointBase(linears, layout.dims)
    finally:
        linears.close()


def run_inspect(args: argparse.Namespace, console: Console) -> int:
    """Print the report; returns the exit code."""
    code, report = inspect(args)
    if args.json:
        text = msgspec.json.encode(report).decode()
        console.print(text, soft_wrap=True, highlight=False, markup=False)
        return code
    from .inspect_view import show

    show(report, str(args.adapter), console, plot=args.plot)
    return code
