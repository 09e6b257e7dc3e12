"""``rota top``: slots, adapters, queues and throughput of a live engine, in the terminal.

Owns the drawing of snapshots; takes them over IPC.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

import anyio
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ...errors import EngineClosedError
from ..core.snapshot import Stats
from ..ipc.client import Client, connect

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_ROWS = 24
_COLOURS = {
    "EMPTY": "dim",
    "STAGING": "yellow",
    "READY": "green",
    "IN_USE": "bold green",
    "DRAINING": "magenta",
}


def add_top_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add ``top`` to the command line's subparsers."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "top",
        help="watch a live engine: slots, adapters, queues, throughput",
        description="Watch the engine process that serves frontends at ADDRESS "
        "(rota serve MODEL --ipc ADDRESS). Ctrl-C ends the watching.",
    )
    parser.add_argument("address", help="unix:PATH or HOST:PORT")
    parser.add_argument("--token", help="secret, on TCP")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds (default: 1)")
    parser.add_argument("--once", action="store_true", help="draw once and stop")
    return parser


def run_top(args: argparse.Namespace, console: Console) -> int:
    """Watch until interrupted; returns the exit code. Raises RotaError if nobody answers."""
    anyio.run(watch, args.address, args.token, max(0.05, args.interval), args.once, console)
    return 0


async def watch(
    address: str, token: str | None, interval_s: float, once: bool, console: Console
) -> None:
    """Draw a snapshot every ``interval_s`` seconds."""
    async with connect(address, token=token) as client:
        before, before_at = await client.refresh(), time.monotonic()
        if once:
            console.print(draw(before, before, 1.0, str(client.address)))
            return
        with Live(console=console, auto_refresh=False) as live:
            while True:
                await anyio.sleep(interval_s)  # between two drawings
                stats = await _snapshot(client)
                now = time.monotonic()
                if stats is None:
                    live.update(
                        Text("the engine does not answer; waiting", style="red"), refresh=True
                    )
                    continue
                live.update(draw(stats, before, now - before_at, str(client.address)), refresh=True)
                before, before_at = stats, now


async def _snapshot(client: Client) -> Stats | None:
    try:
        return await client.refresh()
    except EngineClosedError:
        return None


def draw(stats: Stats, before: Stats, seconds: float, title: str) -> RenderableType:
    """One screen: what is now, and rates since ``before``, ``seconds`` earlier."""

    def rate(name: str) -> str:
        return f"{max(0, getattr(stats, name) - getattr(before, name)) / seconds:.1f}/s"

    used = stats.blocks_total - stats.blocks_free - stats.blocks_cached
    head = Text(f"{title}  ", style="bold")
    head.append(
        f"tokens {rate('tokens')}  steps {rate('steps')}  commits {rate('commits')}  "
        f"waiting {stats.waiting}  slots waited for {stats.slot_wait_s:.1f} s  "
        f"prefilling {stats.prefilling}  decoding {stats.decoding}  "
        f"KV {used}/{stats.blocks_total} cached {stats.blocks_cached}  "
        f"default {stats.default_adapter or 'base'}",
        style="not bold",
    )
    slots = Table("slot", "state", "adapter", "gen", "leases", "pinned", "coming", title="slots")
    for slot in stats.slots[:_ROWS]:
        slots.add_row(
            str(slot.index),
            Text(slot.state, style=_COLOURS.get(slot.state, "")),
            slot.name or "",
            str(slot.generation or ""),
            "■" * min(slot.leases, 16) + (f" {slot.leases}" if slot.leases else ""),
            "pinned" if slot.pinned else "",
            slot.coming or "",
        )
    adapters = Table("adapter", "level", "gen", "under way", title="adapters")
    for adapter in stats.adapters[:_ROWS]:
        doing = f"{adapter.job} {adapter.doing.lower()}" if adapter.jobs else ""
        if adapter.jobs > 1:
            doing += f" and {adapter.jobs - 1} more"
        adapters.add_row(adapter.name, adapter.level, str(adapter.generation), doing)
    if len(stats.adapters) > _ROWS:
        adapters.caption = f"and {len(stats.adapters) - _ROWS} more"
    return Group(head, slots, adapters)
