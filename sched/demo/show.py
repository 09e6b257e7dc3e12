"""The demo: one question through base and three adapters in one batch, then live swaps.

Everything shown is measured in the run that shows it. Writes to the console it is given.
"""

from __future__ import annotations

import statistics
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import anyio
from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ...gpu.model.sampling import SamplingParams
from ..engine import Engine

QUESTION = "What is the capital of France?"
LONG_QUESTION = "Tell me a long story about a ship and its crew."
NAMES = ("pirate", "json", "sentiment")
_WIDTH, _HEIGHT = 38, 9
_STYLES = {None: "white", "pirate": "cyan", "json": "green", "sentiment": "magenta"}


@dataclass
class Track:
    """One stream of the demo: its text and when each token came (seconds, perf_counter)."""

    name: str | None
    label: str = ""
    text: str = ""
    #: The model ended its answer; what it is made to decode after that is counted, not shown.
    answered: bool = False
    times: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: str | None = None
    #: Set when the stream is well under way, so that the swaps happen in its middle.
    under_way: anyio.Event = field(default_factory=anyio.Event)

    @property
    def title(self) -> str:
        return self.label or self.name or "base"

    def gaps(self, begin: float, end: float) -> list[float]:
        """Gaps between tokens that overlap [begin, end]."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return [b - a for a, b in pairs if b >= begin and a <= end]


def _newest(text: str) -> str:
    """The last lines of a text, as many as a panel shows."""
    lines = [part for line in text.split("\n") for part in textwrap.wrap(line, _WIDTH - 4) or [""]]
    return "\n".join(lines[2 - _HEIGHT :])


def _panels(tracks: Sequence[Track], note: str) -> Group:
    panels = [
        Panel(
            Text(_newest(t.text) or "...", style=_STYLES.get(t.name, "white")),
            title=t.title,
            subtitle=f"{len(t.times)} tokens" + (f", {t.finish}" if t.finish else ""),
            width=_WIDTH,
            height=_HEIGHT,
        )
        for t in tracks
    ]
    return Group(Text(note, style="bold"), Columns(panels, equal=True))


async def _follow(engine: Engine, track: Track, prompt: list[int], params: SamplingParams) -> None:
    async for event in engine.generate(prompt, track.name, params):
        if event.token_id is not None:
            track.times.append(time.perf_counter())
            track.versions.append(event.adapter_id)
            if len(track.times) == 30:
                track.under_way.set()
            track.answered = track.answered or event.token_id in engine.info.eos_ids
        if not track.answered:
            track.text += event.text
        track.finish = event.finish_reason or track.finish


async def _show(console: Console, tracks: list[Track], note: str, done: anyio.Event) -> None:
    if not console.is_terminal:
        await done.wait()
        console.print(_panels(tracks, note))
        return
    with Live(_panels(tracks, note), console=console, refresh_per_second=12) as live:
        while not done.is_set():
            with anyio.move_on_after(0.08):
                await done.wait()
            live.update(_panels(tracks, note))


async def run_demo(model_dir: Path, adapters_dir: Path, console: Console) -> None:
    """Run it all. Raises RotaError by name when something cannot be served."""
    console.rule("[bold]rota: one model, many adapters, changed while it serves")
    console.print(
        f"starting one engine on {model_dir.name} with adapters {', '.join(NAMES)}; "
        "a first start also compiles kernels ..."
    )
    begin = time.perf_counter()
    adapters = {name: adapters_dir / name for name in NAMES}
    async with Engine(model_dir, adapters=adapters, max_loras=8, max_lora_rank=16) as engine:
        console.print(f"ready after {time.perf_counter() - begin:.1f} s")
        await _side_by_side(engine, console)
        await _live_swaps(engine, adapters_dir, console)
        console.print(_slots(engine))


async def _side_by_side(engine: Engine, console: Console) -> None:
    prompt = engine.chat_prompt([{"role": "user", "content": QUESTION}])
    params = SamplingParams(max_tokens=40)
    tracks = [Track(None), *(Track(n) for n in NAMES)]
    done = anyio.Event()
    async with anyio.create_task_group() as show:
        note = f"1. the same question in one batch: {QUESTION}"
        show.start_soon(_show, console, tracks, note, done)
        async with anyio.create_task_group() as streams:
            for track in tracks:
                streams.start_soon(_follow, engine, track, prompt, params)
        done.set()


async def _live_swaps(engine: Engine, adapters_dir: Path, console: Console) -> None:
    prompt = engine.chat_prompt([{"role": "user", "content": LONG_QUESTION}])
    # Past the ends of their answers, so that the swaps meet running streams.
    params = SamplingParams(max_tokens=120, ignore_eos=True)
    steady = [Track(None), Track("json"), Track("sentiment"), Track("pirate")]
    after = Track("pirate", "pirate, asked again")
    fourth = Track("fourth", "the fourth")
    rows: list[tuple[str, float]] = []
    done = anyio.Event()
    window: list[float] = []

    async def swaps() -> None:
        await steady[-1].under_way.wait()
        window.append(time.perf_counter())
        replaced = await engine.replace("pirate", adapters_dir / "pirate-small")
        rows.append((f"replace pirate -> generation {replaced.generation}", replaced.seconds))
        promoted = await engine.promote("fourth", adapters_dir / "json-small")
        rows.append((f"promote a fourth adapter into slot {promoted.slot}", promoted.seconds))
        window.append(time.perf_counter())
        short = SamplingParams(max_tokens=30)
        ask = engine.chat_prompt([{"role": "user", "content": QUESTION}])
        async with anyio.create_task_group() as fresh:
            fresh.start_soon(_follow, engine, after, ask, short)
            fresh.start_soon(_follow, engine, fourth, ask, short)

    async with anyio.create_task_group() as show:
        note = (
            "2. four streams decode, on past their answers; pirate is replaced, a fourth promoted"
        )
        show.start_soon(_show, console, [*steady, after, fourth], note, done)
        async with anyio.create_task_group() as streams:
            for track in steady:
                streams.start_soon(_follow, engine, track, prompt, params)
            streams.start_soon(swaps)
        done.set()
    console.print(_figures(steady, rows, window, after))


def _figures(
    steady: list[Track], rows: list[tuple[str, float]], window: list[float], after: Track
) -> Table:
    begin, end = window
    everything = [t for track in steady for t in track.times]
    seconds = max(everything) - min(everything)
    gaps = [g for track in steady for g in track.gaps(begin, end)]
    all_gaps = [g for t in steady for g in t.gaps(t.times[0], t.times[-1])]
    table = Table(title="measured in this run", show_header=False)
    table.add_row("tokens/s of the four long streams", f"{len(everything) / seconds:.0f}")
    table.add_row("median pause between two tokens", f"{statistics.median(all_gaps) * 1e3:.1f} ms")
    table.add_row("longest pause during the swaps", f"{max(gaps) * 1e3:.1f} ms")
    for what, took in rows:
        table.add_row(what, f"{took * 1e3:.1f} ms")
    one = "one" if len(set(steady[-1].versions)) == 1 else "MIXED"
    table.add_row("versions in the pirate stream that ran through the replace", one)
    new = set(after.versions) - set(steady[-1].versions)
    table.add_row("the new pirate stream uses the new version", "yes" if new else "NO")
    return table


def _slots(engine: Engine) -> Table:
    table = Table(title="slots")
    for column in ("slot", "state", "adapter", "generation", "leases", "pinned"):
        table.add_column(column)
    for slot in engine.stats().slots:
        table.add_row(
            str(slot.index),
            slot.state,
            slot.name or "-",
            str(slot.generation or "-"),
            str(slot.leases),
            "yes" if slot.pinned else "",
        )
    return table
