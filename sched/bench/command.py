"""The command ``rota bench``: flags, the run, a table for people or JSON for programs."""

from __future__ import annotations

import argparse
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
from rich import box
from rich.table import Table
from rich.text import Text

from ...errors import CommandError

if TYPE_CHECKING:
    from rich.console import Console

    from .drive import Load

_COLUMNS = (
    ("requests", ("requests",)),
    ("failed", ("failed",)),
    ("tokens", ("tokens",)),
    ("tok/s", ("tokens_per_s",)),
    ("first token", ("ttft_p50_ms", "ttft_p99_ms")),
    ("per token", ("per_token_p50_ms", "per_token_p99_ms")),
    ("gap", ("gap_p50_ms", "gap_p99_ms")),
)


def add_bench_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add ``bench`` to the command line's subparsers."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench",
        help="drive a server, an engine process or a model directory, and say how fast it is",
        description=(
            "Send completions to TARGET: http(s)://HOST:PORT (rota, or any OpenAI server), "
            "unix:PATH or HOST:PORT (an engine process), or a checkpoint directory (an engine in "
            "this process). Greedy, of a fixed length. A request's clock starts when it was due."
        ),
        epilog=(
            "first: from when the request was due to its first token. per token: from a request's "
            "first token to its last, by its tokens. gap: between two arrivals; over HTTP one "
            "arrival may hold several tokens. All in milliseconds. The load generator shares "
            "this machine's cores with what it drives, if that runs here."
        ),
    )
    parser.add_argument("target", help="URL, address, or checkpoint directory")
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME",
        help="ask for this adapter (repeat: they take turns); 'base' is base (default: base)",
    )
    parser.add_argument(
        "--lora-adapter",
        action="append",
        default=[],
        metavar="NAME=DIR",
        help="of a checkpoint directory: load this adapter first, and ask for it (repeat)",
    )
    counts = (
        ("--requests", 64, "counted requests"),
        ("--concurrency", 8, "requests at a time"),
        ("--prompt-tokens", 64, "length of each prompt (over HTTP: words)"),
        ("--max-tokens", 64, "new tokens of each answer"),
        ("--warmup", 8, "requests before, not counted"),
        ("--seed", 0, "of prompts and arrivals"),
    )
    for flag, default, text in counts:
        parser.add_argument(flag, type=int, default=default, help=f"{text} (default: {default})")
    parser.add_argument(
        "--rate", type=float, help="requests a second, at random moments, instead of --concurrency"
    )
    parser.add_argument("--api-key", help="of a server that asks for one")
    parser.add_argument("--token", help="of an engine process on TCP")
    parser.add_argument("--max-lora-rank", type=int, default=64, help="of a checkpoint directory")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    return parser


def run_bench(args: argparse.Namespace, console: Console) -> int:
    """Run, print; returns the exit code: 1 if any request failed. Raises RotaError."""
    directories = _pairs(args.lora_adapter)
    load = _load(args, (*args.adapter, *directories) or ("base",))
    found = anyio.run(_run, args, load, directories, console)
    if args.json:
        console.print_json(msgspec.json.encode(found).decode())
    else:
        console.print(table(found))
        late = found["late_p99_ms"] or 0.0
        console.print(f"{found['wall_s']:.2f} s; requests left {late:.2f} ms late at p99")
        for code, count in found["total"]["errors"].items():
            console.print(f"failed with {code}: {count}", markup=False)
    return 1 if found["total"]["errors"] else 0


async def _run(
    args: argparse.Namespace, load: Load, directories: dict[str, str], console: Console
) -> dict[str, Any]:
    from .drive import run
    from .targets import engine_target, http_target

    place: AbstractAsyncContextManager[Any]
    if args.target.startswith(("http://", "https://")):
        place = http_target(args.target, args.api_key)
    else:
        options: dict[str, Any] = {"max_lora_rank": args.max_lora_rank}
        if len(directories) > 8:
            options["max_loras"] = len(directories)
        place = engine_target(args.target, directories, options, args.token)
    async with place as target:
        with console.status(f"{load.requests} requests to {args.target}"):
            return await run(target, load)


def _load(args: argparse.Namespace, adapters: tuple[str, ...]) -> Load:
    from .drive import Load

    for name, least in (
        *(("requests", 1), ("concurrency", 1), ("prompt_tokens", 1)),
        *(("max_tokens", 1), ("warmup", 0)),
    ):
        if getattr(args, name) < least:
            raise CommandError(
                "an option has a wrong value",
                code="bad-option",
                subject=name,
                expected=f"{least} or more",
                found=getattr(args, name),
            )
    if args.rate is not None and not args.rate > 0:
        raise CommandError(
            "an option has a wrong value",
            code="bad-option",
            subject="rate",
            expected="above 0",
            found=args.rate,
        )
    return Load(
        adapters=adapters,
        requests=args.requests,
        concurrency=args.concurrency,
        rate=args.rate,
        prompt_tokens=args.prompt_tokens,
        max_tokens=args.max_tokens,
        warmup=args.warmup,
        seed=args.seed,
    )


def _pairs(given: list[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for pair in given:
        name, _, path = pair.partition("=")
        if not name or not Path(path).is_dir() or name in pairs:
            raise CommandError(
                "not a new NAME=DIR", code="bad-option", subject="--lora-adapter", found=pair
            )
        pairs[name] = path
    return pairs


def table(found: dict[str, Any]) -> Table:
    """The figures as people read them, a row for each adapter."""
    caption = "times in ms, p50 / p99"
    # Whole within 80 columns, for names of up to twelve characters and times under 10 s.
    shown = Table(box=box.SIMPLE_HEAD, caption=caption, padding=0, pad_edge=False)
    shown.add_column("adapter", no_wrap=True, min_width=7)
    for title, _ in _COLUMNS:
        shown.add_column(title, justify="right", no_wrap=True)
    rows = dict(found["adapters"])
    if len(rows) > 1:
        rows["all"] = found["total"]
    for name, row in rows.items():
        cells = row | {"failed": sum(row["errors"].values())}
        shown.add_row(Text(name), *(_cell(cells, keys) for _, keys in _COLUMNS))
    return shown


def _cell(row: dict[str, Any], keys: tuple[str, ...]) -> str:
    return " / ".join(_number(row[key]) for key in keys)


def _number(value: float | int | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if isinstance(value, float) and value < 100 else f"{value:.0f}"
