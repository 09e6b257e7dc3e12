"""A process of its own with the real engine on a checkpoint, serving frontends; run by tests.

Arguments: the address, the checkpoint directory, and ``NAME=DIR`` for each adapter.
"""

from __future__ import annotations

import sys
from functools import partial

import anyio

import rota
from rota.sched.ipc.server import IpcServer


async def main(address: str, model: str, *adapters: str) -> None:
    named = dict(adapter.split("=", 1) for adapter in adapters)
    options = {"dtype": "float32", "max_lora_rank": 16, "kv_bytes": 1 << 22, "use_numba": False}
    async with (
        rota.Engine(model, named, max_loras=4, **options) as engine,
        anyio.create_task_group() as tasks,
    ):
        await tasks.start(partial(IpcServer(engine).serve, address))
        print("ready", flush=True)


if __name__ == "__main__":
    anyio.run(main, *sys.argv[1:])
