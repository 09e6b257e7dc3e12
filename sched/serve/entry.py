"""The command line's side of ``rota serve``: its flags, and the hand-over to the server.

Owns nothing. Light on purpose: the server's own packages are imported when it starts.
"""

from __future__ import annotations

import argparse
import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from ...errors import CommandError
from ..prompt import settle_process
from .options import Options, add_flags, read_options

if TYPE_CHECKING:
    from rich.console import Console


def add_serve_parser(subparsers: Any, *, offer: bool = False) -> argparse.ArgumentParser:
    """Add ``serve`` to the command line's subparsers. ``offer``: see :func:`.options.add_flags`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "serve",
        help="serve a model over OpenAI's API, or an engine process's",
        description=(
            "Serve MODEL (a checkpoint directory) over HTTP: OpenAI's API, an adapter by its name "
            "as the model. Adapters can be loaded, replaced and unloaded while it serves, if there "
            "is an --admin-key."
        ),
        epilog=(
            "Every option can stand in the --config file under its long name: --max-loras 16 is "
            "max_loras = 16; --lora-adapter sql=DIR is sql = 'DIR' under [adapters]. "
            "An engine process and two frontends: rota serve MODEL --http false --ipc unix:SOCK; "
            "rota serve --connect unix:SOCK --port 8001; rota serve --connect unix:SOCK --port 8002"
        ),
    )
    parser.add_argument("model", nargs="?", help="checkpoint directory")
    parser.add_argument("--config", type=Path, help="TOML file of options; flags go before it")
    parser.add_argument(
        "--check",
        action="store_true",
        help="print the options as they would be used, defaults too, and stop",
    )
    add_flags(parser, offer=offer)
    return parser


def run_serve(args: argparse.Namespace, console: Console) -> int:
    """Serve until a signal; returns the exit code. Raises RotaError for what cannot be served."""
    options = read_options(args)
    if args.check:
        console.print_json(msgspec.json.encode(_shown(options)).decode())
        return 0
    logging.basicConfig(
        level=options.serve.log_level.upper(), format="%(levelname)s %(name)s: %(message)s"
    )
    try:
        from .command import serve
    except ModuleNotFoundError as error:
        raise CommandError(
            "serving needs more packages: pip install 'rota[serve]'",
            code="extra-missing",
            subject=error.name,
        ) from error
    # The process is ours: no rounds over all of torch later, and a core for the loop at once.
    anyio.run(partial(serve, options, console, ready=settle_process))
    return 0


def _shown(options: Options) -> dict[str, Any]:
    """The options as data, secrets left out."""
    data = msgspec.to_builtins(options)
    for group, name in (("http", "api_keys"), ("http", "admin_keys")):
        data[group][name] = f"{len(data[group][name])} keys"
    if data["serve"]["ipc_token"] is not None:
        data["serve"]["ipc_token"] = "set"
    shown: dict[str, Any] = data
    return shown
