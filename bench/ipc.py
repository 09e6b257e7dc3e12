"""Token events through IPC and through HTTP, against the same events read in process.

    python bench/ipc.py [--core 0] [--tokens 3000] [--realtime]

The engine is a loop that pushes one event to every open stream, as an engine's step does, and
stamps it; there is no model, so what is measured is what the face costs. Both processes run on one
core. Figures: events per wall second; CPU microseconds of an event on each side (start-up left
out); latency from push to the reader at 10,000 events/s (100 streams, a step every 10 ms) over IPC
and in process, and what IPC adds, which mean something on a quiet machine only, or with
``--realtime``: then these two run before anything else on that core (needs the right to it). CPU of
HTTP streaming over in-process reading.
Writes bench/results/ipc.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
from machine import describe

import rota
from rota.sched.core import Core, CoreConfig, Stats
from rota.sched.ipc.client import connect
from rota.sched.ipc.server import IpcServer
from rota.sched.sim.engine import SimInfo, byte_tokenizer
from rota.sched.streams import GenerationEvent, Stream
from rota.sched.wake import Bell
from rota.sched.web.app import create_app

ROOT = Path(__file__).resolve().parent.parent


class Words:
    """A word for each token, as a tokenizer's text would be."""

    def push(self, token: int) -> tuple[str, bool]:
        return " word", False

    def finish(self) -> str:
        return ""


class Generation:
    """A stream with an engine's generation's methods."""

    def __init__(self, stream: Stream) -> None:
        outlet = self._outlet = stream.outlet
        self.poll, self.on_ready, self.take = outlet.poll, outlet.on_ready, outlet.take

    @property
    def over(self) -> bool:
        return self._outlet.over

    def cancel(self) -> None:
        pass


class Pusher:
    """One event to each stream every ``step_s`` seconds (0: as fast as the loop turns)."""

    info = SimInfo()

    def __init__(self, step_s: float) -> None:
        self.tokenizer = byte_tokenizer()
        self._step_s = step_s
        self._open: dict[Stream, int] = {}
        self._bell = Bell()
        self._stats = Core(CoreConfig(max_loras=1, num_blocks=16, max_context=64)).stats()

    def stats(self) -> Stats:
        return self._stats

    def generate(self, prompt: Any, adapter: Any, sampling: rota.SamplingParams, **_: Any) -> Any:
        stream = Stream(0, Words(), lambda seq: None)
        self._open[stream] = sampling.max_tokens
        self._bell.ring()
        return Generation(stream)

    async def run(self) -> None:
        due = time.perf_counter()
        while True:
            if not self._open:
                await self._bell.wait()
            now = time.perf_counter()
            for stream, left in list(self._open.items()):
                # The stamp travels as the log-probability.
                stream.push_token(65, 0, now, ())
                if left > 1:
                    self._open[stream] = left - 1
                    stream.flush()
                else:
                    del self._open[stream]
                    stream.push_end("length", 0, None)
            due = max(due + self._step_s, now - self._step_s)
            # The pace of steps that is simulated.
            await anyio.sleep(max(0.0, due - time.perf_counter()))


async def read(generation: Any, late: list[float]) -> int:
    count = 0
    events: list[GenerationEvent]
    while events := await generation.take(64):
        now = time.perf_counter()
        late.extend([now - (e.logprob or now) for e in events])
        count += len(events)
    return count


async def load(engine: Any, streams: int, tokens: int) -> dict[str, float]:
    """All streams at once; the figures of the reading side."""
    late: list[float] = []
    params = rota.SamplingParams(max_tokens=tokens)
    wall, cpu = time.perf_counter(), time.process_time()
    async with anyio.create_task_group() as tasks:
        for _ in range(streams):
            tasks.start_soon(read, engine.generate([1], None, params), late)
    events = streams * tokens
    assert len(late) == events, "an event was lost"
    late.sort()
    return {
        "events_per_s": round(events / (time.perf_counter() - wall)),
        "cpu_us": round((time.process_time() - cpu) / events * 1e6, 2),
        "p50_ms": round(late[events // 2] * 1e3, 3),
        "p99_ms": round(late[events * 99 // 100] * 1e3, 3),
    }


async def engine_side(path: str, step_s: float, listening: Any) -> None:
    engine = Pusher(step_s)
    async with anyio.create_task_group() as tasks:
        await tasks.start(IpcServer(engine).serve, path)
        listening.set()
        await engine.run()


def engine_process(path: str, step_s: float, core: int, listening: Any) -> None:
    os.sched_setaffinity(0, {core})
    anyio.run(engine_side, path, step_s, listening)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def over_ipc(path: str, streams: int, tokens: int, pid: int) -> dict[str, float]:
    async with connect(path) as engine:
        await engine.ping()
        before = cpu_seconds(pid)
        found = await load(engine, streams, tokens)
        used = cpu_seconds(pid) - before
    return found | {"engine_cpu_us": round(used / (streams * tokens) * 1e6, 2)}


def ipc(core: int, step_s: float, streams: int, tokens: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "rota.sock")
        context = multiprocessing.get_context("spawn")
        listening = context.Event()
        process = context.Process(
            target=engine_process, args=(path, step_s, core, listening), daemon=True
        )
        process.start()
        try:
            assert listening.wait(60), "the engine's process did not start"
            assert process.pid is not None
            return anyio.run(over_ipc, path, streams, tokens, process.pid)
        finally:
            process.kill()
            process.join()


async def in_process(step_s: float, streams: int, tokens: int) -> dict[str, float]:
    engine = Pusher(step_s)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.run)
        found = await load(engine, streams, tokens)
        tasks.cancel_scope.cancel()
    return found


async def over_http(streams: int, tokens: int) -> dict[str, float]:
    """Streaming through the ASGI application; what a socket costs is the HTTP server's."""
    engine = Pusher(0.0)
    transport = httpx2.ASGITransport(app=create_app(engine))
    body = {"prompt": [1], "max_tokens": tokens, "stream": True}
    async with httpx2.AsyncClient(transport=transport, base_url="http://x") as http:

        async def one() -> None:
            answer = await http.post("/v1/completions", json=body, timeout=600)
            assert answer.text.endswith("data: [DONE]\n\n")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.run)
            wall, cpu = time.perf_counter(), time.process_time()
            async with anyio.create_task_group() as readers:
                for _ in range(streams):
                    readers.start_soon(one)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            tasks.cancel_scope.cancel()
    events = streams * tokens
    return {"events_per_s": round(events / wall), "cpu_us": round(cpu / events * 1e6, 2)}


@contextmanager
def first_on_its_core(wanted: bool) -> Iterator[str]:
    """Real-time scheduling, round robin; processes started meanwhile have it too."""
    if not wanted:
        yield "ordinary"
        return
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(10))
    try:
        yield "real time"
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--realtime", action="store_true")
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.core})
    direct = anyio.run(in_process, 0.0, 64, args.tokens)
    http = anyio.run(over_http, 64, args.tokens // 3)
    flat = ipc(args.core, 0.0, 64, args.tokens)
    with first_on_its_core(args.realtime) as scheduling:
        near = anyio.run(in_process, 0.01, 100, args.tokens // 6)
        paced = ipc(args.core, 0.01, 100, args.tokens // 6)
    record = describe(ROOT) | {
        "in_process": direct,
        "scheduling_at_10000_per_s": scheduling,
        "in_process_at_10000_per_s": near,
        "ipc_flat_out": flat,
        "ipc_at_10000_per_s": paced,
        "ipc_added_p50_ms": round(paced["p50_ms"] - near["p50_ms"], 3),
        "ipc_added_p99_ms": round(paced["p99_ms"] - near["p99_ms"], 3),
        "http": http,
        "http_cpu_over_in_process": round(http["cpu_us"] / direct["cpu_us"], 2),
        "ipc_events_per_cpu_s": round(1e6 / (flat["cpu_us"] + flat["engine_cpu_us"])),
    }
    target = ROOT / "bench" / "results" / "ipc.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
