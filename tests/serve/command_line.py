"""What tests of `rota serve` share: its options as typed, and a simulated engine to serve."""

from __future__ import annotations

import argparse
import io
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from rota.sched.serve import add_serve_parser, add_top_parser
from rota.sched.serve.command import Opening
from rota.sched.serve.options import Options, read_options
from rota.sched.sim.engine import SimEngine


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command")
    add_serve_parser(commands)
    add_top_parser(commands)
    return parser.parse_args(argv)


def options(*argv: str) -> Options:
    return read_options(parse("serve", *argv))


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def simulated(_: Options, adapters: Mapping[str, Any], told: Opening) -> Any:
    return SimEngine()
