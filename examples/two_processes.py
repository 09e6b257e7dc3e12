"""An engine in one process, a frontend in another, over a Unix socket that only you can open.

    python examples/two_processes.py MODEL DIR

The frontend imports no torch. It may crash, block or be killed: the engine cancels its requests and
goes on. The engine may be killed: the frontend's streams end with ``engine-gone``, and it finds the
next engine by itself.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import anyio

import rota
from rota.errors import EngineClosedError


async def engine_process(model: str, address: str) -> None:
    """What the engine's process runs; ``rota serve MODEL --http false --ipc ADDRESS`` is this."""
    from rota.sched.ipc.server import IpcServer

    async with rota.Engine(model, kv_bytes=1 << 22) as engine, anyio.create_task_group() as tasks:
        await tasks.start(partial(IpcServer(engine).serve, address))
        print("ready", flush=True)


async def main(model: str, adapter: str) -> str:
    """The frontend."""
    with tempfile.TemporaryDirectory() as folder:
        address = str(Path(folder) / "rota.sock")
        command = [sys.executable, __file__, "--engine", model, address]
        async with await anyio.open_process(command, stdout=subprocess.PIPE, stderr=None) as child:
            assert child.stdout is not None
            await child.stdout.receive()
            async with rota.connect(address) as engine:
                reply = await engine.load("helper", adapter)
                print(f"loaded into slot {reply.slot} in {reply.seconds:.3f} s")
                params = rota.SamplingParams(max_tokens=16)
                answer = await engine.complete("Hello there", "helper", params)
                long = rota.SamplingParams(max_tokens=400, ignore_eos=True)
                stream = engine.generate("Hello there", "helper", long)
                await stream.__anext__()
                child.kill()
                try:
                    async for _ in stream:
                        pass
                except EngineClosedError as error:
                    print(f"the engine was killed: {error.code}")
    return answer


if __name__ == "__main__":
    if sys.argv[1] == "--engine":
        anyio.run(engine_process, *sys.argv[2:])
    else:
        print(repr(anyio.run(main, *sys.argv[1:])))
