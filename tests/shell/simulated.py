"""The real core and shell over a simulated device, and what a test wants to see of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from rota.sched.core import Core, CoreConfig, effects
from rota.sched.core import events as ev
from rota.sched.generation import Generation
from rota.sched.shell import Shell
from rota.sched.sim import SimExecutor, SimFaults, SimStager, SimThread, token_of
from rota.sched.sim.device import SimSource
from rota.sched.streams import Stream

from ..shells import running_shell

STEP_S = 0.02


class Sim:
    """A running shell and what a test wants to see of it."""

    def __init__(self, faults: SimFaults | None = None, **config: Any) -> None:
        base: dict[str, Any] = {"max_loras": 3, "num_blocks": 64, "max_context": 256}
        base.update(config)
        self.core = Core(CoreConfig(**base))
        self.executor = SimExecutor(base["max_loras"], faults)
        self.thread = SimThread(self._cost)
        self.stager = SimStager()
        self.effects: list[effects.Effect] = []
        self.shell = Shell(self.core, self.executor, self.thread, self.stager, self._observe)

    def _cost(self, job: Any) -> float:
        return STEP_S if job.func == self.executor.step else 0.001

    def _observe(self, event: ev.Event, out: list[effects.Effect], now: float) -> None:
        self.effects.extend(out)
        self.core.check()

    def generate(
        self, adapter: str | None = None, n: int = 5, prompt: int = 4, **kw: Any
    ) -> Generation:
        seq = self.shell.new_id()
        stream = Stream(seq, None, self.shell.stop_matched)
        event = ev.Submit(seq, tuple(range(prompt)), adapter, kw.pop("default", False), n, **kw)
        self.shell.submit(event, stream, None)
        return Generation(self.shell, stream)

    async def collect(self, *args: Any, **kw: Any) -> list[int]:
        return [e.token_id async for e in self.generate(*args, **kw) if e.token_id is not None]

    async def load(self, name: str, content: str, **kw: Any) -> Any:
        source = SimSource(content, **kw)
        return await self.shell.command(lambda i: ev.Load(i, name, self.shell.source_id(source)))

    async def replace(self, name: str, content: str, **kw: Any) -> Any:
        source = SimSource(content, **kw)
        return await self.shell.command(lambda i: ev.Replace(i, name, self.shell.source_id(source)))


@asynccontextmanager
async def running(faults: SimFaults | None = None, **config: Any) -> AsyncIterator[Sim]:
    sim = Sim(faults, **config)
    async with running_shell(sim.shell, sim.thread):
        yield sim
    if sim.shell.broken is None:
        assert not sim.executor.open, "sequences left open on the device"
        stats = sim.core.stats()
        assert stats.blocks_free == stats.blocks_total
        assert all(slot.leases == 0 for slot in stats.slots)


def expected(content: str, prompt: int, n: int) -> list[int]:
    return [token_of(content, prompt + i) for i in range(n)]
