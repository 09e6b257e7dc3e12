"""``rota replay FILE``: a recorded trace through today's core, or a public trace against an engine.

Exit codes: 0 same decisions (or all served), 1 a difference (or failed requests), 2 unreadable.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio

from ...errors import RequestError, RotaError
from ..core import CoreConfig
from ..core import effects as fx
from ..core import events as ev
from .arrivals import (
    Arrival,
    Control,
    controls,
    read_azure,
    read_mooncake,
    read_recorded,
    read_servegen,
    scaled,
    with_adapters,
)
from .drive import Report, run_simulated
from .perfetto import ChromeTrace
from .record import Recorder
from .replay import replay
from .story import Story

Write = Callable[[str], None]
Observer = Callable[[ev.Event, list[fx.Effect], float], None]


def parser(*, add_help: bool = True) -> argparse.ArgumentParser:
    """The command's own; without ``--help`` it can be another's parent."""
    made = argparse.ArgumentParser(prog="rota replay", description=__doc__, add_help=add_help)
    made.add_argument("file", type=Path, help="a trace: rota's own, Azure, Mooncake or ServeGen")
    made.add_argument(
        "--format", choices=["rota", "azure", "mooncake", "servegen"], help="default: by content"
    )
    made.add_argument(
        "--against",
        choices=["core", "sim", "real"],
        help="core: compare decisions (rota traces); sim: simulated device; real: --model",
    )
    made.add_argument("--model", type=Path, help="checkpoint directory, for --against real")
    made.add_argument(
        "--adapter", action="append", default=[], metavar="NAME=DIR", help="for --against real"
    )
    made.add_argument("--adapters", type=int, default=32, help="names to spread requests over")
    made.add_argument("--alpha", type=float, default=0.5, help="skew of the power law over names")
    made.add_argument("--base-share", type=float, default=0.1, help="share of requests for base")
    made.add_argument("--slots", type=int, default=8, help="adapters on the device at once")
    made.add_argument("--context", type=int, default=4096, help="tokens of one sequence")
    made.add_argument("--speed", type=float, default=1.0, help="play this many times faster")
    made.add_argument("--limit", type=int, default=0, help="requests at most, 0 = all")
    made.add_argument("--control-rate", type=float, default=0.0, help="commands a second (sim)")
    made.add_argument("--seed", type=int, default=0, help="of names, commands and draws")
    made.add_argument("--record", type=Path, help="write a rota trace of the run (sim)")
    made.add_argument("--story", type=Path, help="write the run as text")
    made.add_argument("--perfetto", type=Path, help="write the run as a Chrome trace")
    return made


def sniff(path: Path) -> str:
    """The format of a trace file, from its first line. Raises RequestError ``bad-trace``."""
    try:
        with path.open("rb") as file:
            first = file.readline(4096)
    except OSError as error:
        raise RequestError(
            "the trace cannot be read", code="bad-trace", subject=str(path), found=error.strerror
        ) from error
    for mark, name in (
        (b'"rota-trace"', "rota"),
        (b'"hash_ids"', "mooncake"),
        (b"ContextTokens", "azure"),
        (b"window_start_s", "servegen"),
    ):
        if mark in first:
            return name
    raise RequestError("no known trace format", code="bad-trace", subject=str(path))


def main_replay(argv: Sequence[str], write: Write) -> int:
    """Run the command; ``write`` gets each line of output."""
    try:
        args = parser().parse_args(argv)
    except SystemExit as stop:
        return 2 if stop.code else 0
    try:
        _check(args)
        kind = args.format or sniff(args.file)
        against = args.against or ("core" if kind == "rota" else "sim")
        if against == "core":
            return _against_core(args, write)
        arrivals = _arrivals(args, kind)
        if against == "real":
            return _finish(anyio.run(_against_real, args, arrivals), write)
        return _against_sim(args, arrivals, write)
    except RotaError as error:
        write(f"refused: {error}")
        return 2 if error.code == "bad-trace" else 1


def _check(args: Any) -> None:
    """Raises RequestError ``bad-option``: a number no run can have, a file in no directory."""
    for name, least, most in (
        *(("adapters", 1, 1 << 20), ("slots", 0, 4096), ("context", 2, 1 << 24)),
        *(("limit", 0, 1 << 30), ("alpha", 0.0, 100.0), ("base_share", 0.0, 1.0)),
        *(("control_rate", 0.0, 1e6), ("speed", 1e-6, 1e9)),
    ):
        value = getattr(args, name)
        if not least <= value <= most:
            raise RequestError(
                "an option is out of range",
                code="bad-option",
                subject="--" + name.replace("_", "-"),
                expected=f"{least}..{most}",
                found=value,
            )
    for name in ("record", "story", "perfetto"):
        path = getattr(args, name)
        if path is not None and not path.parent.is_dir():
            raise RequestError(
                "no such directory to write to", code="bad-option", subject=f"--{name}", found=path
            )


def _against_core(args: Any, write: Write) -> int:
    story, chrome = Story(), ChromeTrace()

    def watch(event: ev.Event, effects: list[fx.Effect], now: float) -> None:
        if args.story is not None:
            story(event, effects, now)
        if args.perfetto is not None:
            chrome(event, effects, now)

    replayed = replay(args.file, watch=watch)
    _write_views(args, story, chrome)
    if replayed.difference is not None:
        write(f"after {replayed.events} equal events, the first difference:")
        write(replayed.difference.text())
        return 1
    write(f"{replayed.events} events, the same decisions")
    return 0


def _write_views(args: Any, story: Story, chrome: ChromeTrace) -> None:
    if args.story is not None:
        args.story.write_text(story.text())
    if args.perfetto is not None:
        chrome.write(args.perfetto)


def _arrivals(args: Any, kind: str) -> list[Arrival]:
    if kind == "rota":
        rows = read_recorded(args.file)
    elif kind == "azure":
        rows = read_azure(args.file, args.limit)
    elif kind == "mooncake":
        rows = read_mooncake(args.file, args.limit)
    else:
        rows = read_servegen(args.file, seconds=60.0 * args.speed, seed=args.seed, speed=100.0)
    rows = rows[: args.limit] if args.limit else rows
    if kind in ("azure", "mooncake"):
        rows = with_adapters(
            rows,
            adapters=args.adapters,
            alpha=args.alpha,
            base_share=args.base_share,
            seed=args.seed,
        )
    return scaled(rows, args.speed, args.context)


def _against_sim(args: Any, arrivals: list[Arrival], write: Write) -> int:
    config = CoreConfig(
        max_loras=args.slots,
        num_blocks=64 * -(-args.context // 16),
        max_context=args.context,
        max_running=64,
        max_step_tokens=2048,
        mixed_step_tokens=512,
    )
    story, chrome = Story(), ChromeTrace()
    observers: list[Observer] = []
    if args.story is not None:
        observers.append(story)
    if args.perfetto is not None:
        observers.append(chrome)
    recorder = Recorder(args.record, config) if args.record is not None else None
    if recorder is not None:
        observers.append(recorder)
    commands: list[Control] = []
    if args.control_rate > 0 and arrivals:
        names = sorted({a.adapter for a in arrivals if a.adapter is not None})
        last = arrivals[-1].at
        commands = list(controls(names, rate=args.control_rate, seconds=last, seed=args.seed))
    try:
        report = run_simulated(arrivals, config, commands=commands, observers=observers)
    finally:
        if recorder is not None:
            recorder.close()
    _write_views(args, story, chrome)
    return _finish(report, write)


async def _against_real(args: Any, arrivals: list[Arrival]) -> Report:
    from .real import against_engine

    return await against_engine(args.model, dict(_pairs(args.adapter)), arrivals, args.slots)


def _pairs(given: Sequence[str]) -> list[tuple[str, Path]]:
    pairs = []
    for text in given:
        name, _, path = text.partition("=")
        if not name or not path:
            raise RequestError("not NAME=DIR", code="bad-option", subject=text)
        pairs.append((name, Path(path)))
    return pairs


def _finish(report: Report, write: Write) -> int:
    for label, value in report.rows():
        write(f"{label:34} {value}")
    served = report.ends.get("length", 0) + report.ends.get("stop", 0)
    return 0 if served >= report.requests else 1
