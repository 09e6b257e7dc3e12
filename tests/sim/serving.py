"""The real core and shell over the simulated device, for tests that tell a story by hand.
Every sleep is of virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio

from rota.sched.core import Core, CoreConfig
from rota.sched.core import effects as fx
from rota.sched.core import events as ev
from rota.sched.generation import Generation
from rota.sched.shell import Shell
from rota.sched.sim.device import SimExecutor, SimFaults, SimSource, SimStager, SimThread, token_of
from rota.sched.sim.kv import SimKV
from rota.sched.sim.laws import Ledger
from rota.sched.sim.rest import at_rest
from rota.sched.streams import Stream

from ..shells import running_shell

STEP_S = 0.02


class Serving:
    """Verbs as the engine's, over a simulated device; every event is judged by the ledger."""

    def __init__(self, faults: SimFaults | None = None, **config: Any) -> None:
        base: dict[str, Any] = {"max_loras": 3, "num_blocks": 256, "max_context": 512}
        self.config = CoreConfig(**{**base, **config})
        self.core = Core(self.config)
        kv = SimKV(self.config.block_size)
        self.executor = SimExecutor(self.config.max_loras, faults, kv)
        self.thread = SimThread(
            # Jobs are partials.
            lambda job: STEP_S if job.func == self.executor.step else 0.001  # type: ignore[attr-defined]
        )
        self.stager = SimStager()
        self.ledger = Ledger(self.config, lambda slot: self.executor.contents[slot])
        self.effects: list[fx.Effect] = []
        self.shell = Shell(self.core, self.executor, self.thread, self.stager, self._see)

    def _see(self, event: ev.Event, effects: list[fx.Effect], now: float) -> None:
        self.effects += effects
        self.ledger.see(event, effects, now)
        self.core.check()

    def generate(
        self, adapter: str | None = None, n: int = 5, prompt: int = 4, **more: Any
    ) -> Generation:
        seq = self.shell.new_id()
        stream = Stream(seq, None, self.shell.stop_matched)
        tokens = tuple(range(prompt))
        default = more.pop("default", False)
        self.shell.submit(ev.Submit(seq, tokens, adapter, default, n, **more), stream, None)
        return Generation(self.shell, stream)

    async def collect(self, adapter: str | None = None, n: int = 5, **more: Any) -> list[int]:
        got = self.generate(adapter, n, **more)
        return [e.token_id async for e in got if e.token_id is not None]

    async def send(self, kind: Any, name: str | None, content: str = "", **more: Any) -> Any:
        """``content``: of a new source. Keywords of the source: seconds, error, path."""
        about = {k: more.pop(k) for k in ("seconds", "error", "path") if k in more}

        def make(ident: int) -> ev.Command:
            if not content:
                # The fixture is Any.
                return kind(ident, name, **more)  # type: ignore[no-any-return]
            source = self.shell.source_id(SimSource(content, **about))
            # The fixture is Any.
            return kind(ident, name, source, **more)  # type: ignore[no-any-return]

        return (await self.shell.command(make)).reply

    async def load(self, name: str, content: str, **more: Any) -> Any:
        return await self.send(ev.Load, name, content, **more)

    async def replace(self, name: str, content: str, **more: Any) -> Any:
        return await self.send(ev.Replace, name, content, **more)

    async def register(self, name: str, content: str, **more: Any) -> Any:
        return await self.send(ev.Register, name, content, **more)

    async def unload(self, name: str, after: float = 5.0, cancel_late: bool = False) -> Any:
        deadline = anyio.current_time() + after
        return await self.send(ev.Unload, name, deadline=deadline, cancel_late=cancel_late)

    async def rest(self) -> None:
        """Until nothing runs."""
        for _ in range(100_000):
            if self.core.idle() and self.thread.join(0):
                return
            await anyio.sleep(0.1)
        raise AssertionError("never comes to rest")

    def stages(self) -> int:
        return sum(isinstance(e, fx.StartStage) for e in self.effects)


def expected(content: str, n: int, prompt: int = 4) -> list[int]:
    return [token_of(content, prompt + i) for i in range(n)]


@asynccontextmanager
async def serving(faults: SimFaults | None = None, **config: Any) -> AsyncIterator[Serving]:
    """A running one; closed, at rest and judged at the end."""
    s = Serving(faults, **config)
    async with running_shell(s.shell, s.thread):
        yield s
        await s.rest()
        held, sources = set(s.stager.images), set(s.shell._sources)
        at_rest(s.ledger, s.core.stats(), held, sources)
    assert s.shell.broken is None, s.shell.broken
    assert not s.ledger.violations, s.ledger.violations[0]
    assert not s.executor.open and not s.shell._streams and not s.shell._pending
