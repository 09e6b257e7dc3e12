"""Requests over time against an engine, simulated or real, and what callers saw.

``run_simulated`` uses the real core and shell over the simulated device in virtual time; ``drive``
takes any way to start a request, so a real engine is measured by the same code.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import anyio
import msgspec
import numpy as np

from ...errors import RotaError
from ..core import Core, CoreConfig, Stats
from ..core import effects as fx
from ..core import events as ev
from ..face import GenerationLike
from ..generation import Generation
from ..shell import Shell
from ..sim.clock import run_virtual
from ..sim.device import VOCAB, SimExecutor, SimSource, SimStager, SimThread
from ..streams import Stream
from .arrivals import Arrival, Control, merged, prompt_of

Observer = Callable[[ev.Event, list[fx.Effect], float], None]


class Costs(msgspec.Struct, frozen=True):
    """The simulated device, in seconds: a step costs ``step + row * rows + token * tokens``."""

    step: float = 0.010
    row: float = 0.0001
    token: float = 0.000_01
    commit: float = 0.004
    stage: float = 0.08


class Report(msgspec.Struct, frozen=True):
    """What callers saw; times in seconds. ``ends``: requests by finish reason or error code.
    ``ttft``, ``gap``: median, 99th percentile and longest of time to first token and of the time
    between tokens."""

    requests: int
    tokens: int
    seconds: float
    ends: dict[str, int]
    ttft: tuple[float, float, float]
    gap: tuple[float, float, float]
    stats: Stats | None = None

    def rows(self) -> list[tuple[str, str]]:
        """For a table: label and value."""
        rows = [
            ("requests", str(self.requests)),
            ("tokens", str(self.tokens)),
            ("seconds", f"{self.seconds:.2f}"),
            ("ends", ", ".join(f"{k} {v}" for k, v in sorted(self.ends.items()))),
            ("time to first token p50/p99/max", _ms(self.ttft)),
            ("gap between tokens p50/p99/max", _ms(self.gap)),
        ]
        if self.stats is not None:
            s = self.stats
            rows += [
                ("steps", str(s.steps)),
                ("stages, commits", f"{s.stages}, {s.commits}"),
                ("evictions, drains", f"{s.evicted}, {s.drained}"),
                ("preemptions", str(s.preempted)),
                ("prompt tokens from cache", f"{s.prefix.hit} of {s.prefix.queried}"),
            ]
        return rows


def _ms(three: tuple[float, float, float]) -> str:
    return " / ".join(f"{value * 1000:.1f} ms" for value in three)


def _spread(values: array[float]) -> tuple[float, float, float]:
    """Sorts ``values`` where they are."""
    if not values:
        return (0.0, 0.0, 0.0)
    np.frombuffer(values, np.float64).sort()
    last = len(values) - 1
    return values[last // 2], values[int(last * 0.99)], values[last]


class Watch:
    """Collects what callers see. ``clock``: seconds. Keeps 8 bytes a token, the gap before it, for
    exact quantiles in the end, and nothing else that grows with what was read."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.begin = clock()
        self.ends: Counter[str] = Counter()
        self.ttft = array("d")
        self.gaps = array("d")
        self.tokens = 0

    async def read(self, start: Callable[[], GenerationLike], limit: int = 0) -> None:
        """One request to its end (or ``limit`` tokens, then cancelled)."""
        began = last = self._clock()
        seen = 0
        try:
            generation = start()
            while events := await generation.take(64):
                now = self._clock()
                count = sum(e.token_id is not None for e in events)
                if count and not seen:
                    self.ttft.append(now - began)
                elif count:
                    self.gaps.append(now - last)
                    self.gaps.extend(repeat(0.0, count - 1))
                last, seen = now, seen + count
                if events[-1].finish_reason is not None:
                    self.ends[events[-1].finish_reason] += 1
                if limit and seen >= limit:
                    generation.cancel()
        except RotaError as error:
            self.ends[error.code] += 1
        self.tokens += seen

    def report(self, requests: int, stats: Stats | None = None) -> Report:
        seconds = self._clock() - self.begin
        return Report(
            requests,
            self.tokens,
            seconds,
            dict(self.ends),
            _spread(self.ttft),
            _spread(self.gaps),
            stats,
        )


async def drive(
    items: Iterable[Arrival | Control],
    start: Callable[[Arrival], GenerationLike],
    control: Callable[[Control], Any],
) -> Watch:
    """Play the items at their times and wait for every request's end. ``control`` is a coroutine
    function; what it raises by name is counted, not passed on."""
    watch = Watch(anyio.current_time)

    async def command(item: Control) -> None:
        try:
            await control(item)
        except RotaError as error:
            watch.ends[f"{item.verb}: {error.code}"] += 1

    async with anyio.create_task_group() as tasks:
        for item in items:
            await anyio.sleep_until(watch.begin + item.at)
            if isinstance(item, Control):
                tasks.start_soon(command, item)
            else:
                tasks.start_soon(watch.read, partial(start, item))
    return watch


class _Simulated:
    """The real core and shell over the simulated device, without checks: for long traces."""

    def __init__(self, config: CoreConfig, costs: Costs, observers: Sequence[Observer]) -> None:
        self.core = Core(config)
        self.costs = costs
        self.executor = SimExecutor(config.max_loras)
        self.thread = SimThread(self._cost)
        self.observers = observers
        watch = self._observe if observers else None
        self.shell = Shell(self.core, self.executor, self.thread, SimStager(), watch)
        self.versions: Counter[str] = Counter()

    def _cost(self, job: Any) -> float:
        costs = self.costs
        if job.func == self.executor.step:
            tokens = sum(len(r.tokens) for r in job.args[0])
            return costs.step + costs.row * len(job.args[0]) + costs.token * tokens
        return costs.commit if job.func == self.executor.commit else 0.0

    def _observe(self, event: ev.Event, effects: list[fx.Effect], now: float) -> None:
        for observer in self.observers:
            observer(event, effects, now)

    def start(self, arrival: Arrival) -> Generation:
        shell = self.shell
        seq = shell.new_id()
        stream = Stream(seq, None, shell.stop_matched)
        prompt = prompt_of(arrival, seq, VOCAB)
        shell.submit(ev.Submit(seq, prompt, arrival.adapter, False, arrival.tokens), stream, None)
        return Generation(shell, stream)

    def source(self, name: str) -> int:
        self.versions[name] += 1
        content = f"{name}#{self.versions[name]}"
        return self.shell.source_id(SimSource(content, self.costs.stage))

    async def control(self, item: Control) -> None:
        name = item.name
        match item.verb:
            case "load":
                await self.shell.command(lambda i: ev.Load(i, name, self.source(name)))
            case "replace":
                await self.shell.command(lambda i: ev.Replace(i, name, self.source(name)))
            case "unload":
                deadline = anyio.current_time() + 5.0
                await self.shell.command(lambda i: ev.Unload(i, name, deadline, True))
            case "cancel":
                generation = self.start(Arrival(item.at, name, 16, 64))
                with anyio.move_on_after(0.1):
                    async for _ in generation:
                        pass

    async def run(self, items: Sequence[Arrival | Control], names: Sequence[str]) -> Report:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.thread.run)
            await tasks.start(partial(self.shell.run))
            for name in names:
                await self.shell.command(
                    partial(lambda n, i: ev.Register(i, n, self.source(n)), name)
                )
            watch = await drive(items, self.start, self.control)
            stats = self.core.stats()
            requests = sum(isinstance(i, Arrival) for i in items)
            report = watch.report(requests, stats)
            self.shell.close()
            await self.shell.closed.wait()
            self.thread.stop()
            return report
        raise AssertionError("the group above is never cancelled from inside")


def run_simulated(
    arrivals: Sequence[Arrival],
    config: CoreConfig,
    *,
    commands: Sequence[Control] = (),
    costs: Costs | None = None,
    observers: Sequence[Observer] = (),
) -> Report:
    """Serve ``arrivals`` (and ``commands``) on the simulated device in virtual time. Every adapter
    named is registered first, so that each is staged when it is first wanted."""
    names = sorted({a.adapter for a in arrivals if a.adapter is not None})
    items = list(merged(arrivals, commands))

    async def main(_: Callable[[float], None]) -> Report:
        return await _Simulated(config, costs or Costs(), observers).run(items, names)

    return run_virtual(main, "asyncio")
