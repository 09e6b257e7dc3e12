"""A frontend in a process of its own that keeps sixteen requests running for as long as it lives;
run by tests. Arguments: the address, then the adapters its requests take turns with (none: base).
"""

from __future__ import annotations

import sys
from itertools import cycle, islice

import anyio

import rota


async def main(address: str, *adapters: str) -> None:
    waiting = 16

    async def ask(engine: rota.Client, adapter: str | None, limit: int) -> None:
        nonlocal waiting
        first = True
        params = rota.SamplingParams(max_tokens=limit, ignore_eos=True)
        while True:
            async for _ in engine.generate([1], adapter, params):
                if first:
                    first = False
                    waiting -= 1
                    if waiting == 0:
                        print("ready", flush=True)

    async with rota.connect(address) as engine, anyio.create_task_group() as tasks:
        limit = min(2000, engine.info.context_length - 1)
        for adapter in islice(cycle(adapters or (None,)), waiting):
            tasks.start_soon(ask, engine, adapter, limit)


if __name__ == "__main__":
    anyio.run(main, *sys.argv[1:])
