"""A process of its own with a simulated engine that serves frontends; run by tests."""

from __future__ import annotations

import sys
from functools import partial

import anyio

from rota.sched.ipc.server import IpcServer
from rota.sched.sim.engine import SimEngine


async def main(address: str) -> None:
    async with SimEngine(step_s=0.001) as engine, anyio.create_task_group() as tasks:
        await tasks.start(partial(IpcServer(engine).serve, address))
        print("ready", flush=True)


if __name__ == "__main__":
    anyio.run(main, sys.argv[1])
