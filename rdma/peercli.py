"""``rota peer DIR...``: run a weight peer from the command line.

What it owns: the arguments, and the signals that stop it. The caller owns the terminal.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import anyio

from ..errors import RequestError, StagingError
from .devices import ANY, parse_devices
from .frames2 import Times
from .messages import MAX_ID_BYTES
from .peer import PeerLimits, WeightPeer
from .secret_file import read_secret
from .store import StoreLimits
from .verbs import open_host

MAX_CONNECTIONS = 4096
MIN_BUDGET_GB, MAX_BUDGET_GB = 0.001, 65536


class Console(Protocol):
    """Where lines go (``rich.console.Console`` will do)."""

    def print(self, *objects: Any) -> None:
        """One line."""
        ...


def add_peer_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command ``peer`` to an ``argparse`` subparsers object; its parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "peer",
        help="serve adapter directories to engines, by TCP and RDMA reads",
        description="Serve adapter directories by id (the directory's name, or ID=DIR). Nothing "
        "else is ever opened. Changed files become a new generation.",
    )
    parser.add_argument("adapters", nargs="+", metavar="[ID=]DIR", help="an adapter directory")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=9910, help="port (9910; 0 = any)")
    parser.add_argument(
        "--secret-file", type=Path, help="file with the secret engines must prove (no default)"
    )
    parser.add_argument("--budget-gb", type=float, default=8.0, help="memory for adapters (8)")
    parser.add_argument(
        "--connections", type=int, default=64, help="clients at once, a thread each (64)"
    )
    parser.add_argument(
        "--rdma-device",
        metavar="NAME[:GID],...",
        help="verbs devices, each with a GID index (default: the first active one, RoCEv2 over "
        "IPv4); an engine's n-th device reads from the n-th",
    )
    parser.add_argument("--no-rdma", action="store_true", help="TCP only")
    parser.add_argument(
        "--version1", action="store_true", help="serve version-1 clients too (never with a secret)"
    )
    return parser


def parse_adapters(arguments: Sequence[str]) -> dict[str, Path]:
    """``[ID=]DIR`` to id -> directory.

    Raises:
        RequestError: bad-adapter-id, duplicate-adapter-id, not-a-directory.
    """
    found: dict[str, Path] = {}
    for argument in arguments:
        name, equals, path = argument.partition("=")
        if not equals or "/" in name:
            path, name = argument, Path(argument).resolve().name
        if not 1 <= len(name.encode()) <= MAX_ID_BYTES:
            raise RequestError("an id is 1..255 bytes", code="bad-adapter-id", subject=name[:200])
        if name in found:
            raise RequestError(
                "two directories have one id; give one as ID=DIR",
                code="duplicate-adapter-id",
                subject=name,
            )
        if not Path(path).is_dir():
            raise RequestError("not a directory", code="not-a-directory", subject=path[:200])
        found[name] = Path(path)
    return found


def run_peer(args: argparse.Namespace, console: Console) -> int:
    """Serve until SIGINT or SIGTERM; the exit code.

    Raises:
        RequestError: a wrong argument; ``bad-secret-file``, ``weak-secret``.
        StagingError: ``cannot-listen``: the port is taken, or the address is nobody's here.
        DeviceError: a device of ``--rdma-device`` cannot be used (`verbs.open_host`).
    """
    directories = parse_adapters(args.adapters)
    for option, value, least, most in (
        ("port", args.port, 0, 65535),
        ("connections", args.connections, 1, MAX_CONNECTIONS),
        ("budget-gb", args.budget_gb, MIN_BUDGET_GB, MAX_BUDGET_GB),
    ):
        if not least <= value <= most:
            raise RequestError(
                "an option is out of range",
                code="bad-option",
                subject=f"--{option}",
                expected=f"{least}..{most}",
                found=value,
            )
    secret = None if args.secret_file is None else read_secret(args.secret_file)
    limits = PeerLimits(
        connections=args.connections,
        times=Times(),
        store=StoreLimits(budget=int(args.budget_gb * (1 << 30))),
    )
    devices = ANY if args.rdma_device is None else parse_devices(args.rdma_device)
    verbs = None if args.no_rdma else open_host(devices)
    peer = WeightPeer(
        directories, secret=secret, limits=limits, verbs=verbs, version1=args.version1
    )
    anyio.run(_serve, peer, args.host, args.port, console, verbs is not None)
    return 0


async def _serve(peer: WeightPeer, host: str, port: int, console: Console, verbs: bool) -> None:
    try:
        where = peer.listen(host, port)
    except OSError as error:
        raise StagingError(
            "cannot listen", code="cannot-listen", subject=f"{host}:{port}", found=error.strerror
        ) from error
    async with anyio.create_task_group() as group:
        group.start_soon(_stop_on_signal, peer, group.cancel_scope)
        ways = "TCP and RDMA reads" if verbs else "TCP"
        console.print(f"peer at {where[0]}:{where[1]}: {len(peer.store.ids())} adapters by {ways}")
        await peer.serve()
        group.cancel_scope.cancel()
    console.print(f"peer stopped: {peer.counters()}")


async def _stop_on_signal(peer: WeightPeer, scope: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            peer.stop()
            await anyio.sleep_forever()  # the scope ends this; a second signal changes nothing
