"""A simulated engine behind HTTP, in a process of its own; told what to do on standard input.

``sim_server.py FOLDER PORT [admin-key] [api-key]``. Says ``ready PORT`` when it serves. Lines it
understands: ``hold`` and ``release`` (staging waits meanwhile).
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
import uvicorn

from rota.sched.sim.engine import SimEngine
from rota.sched.web.app import create_app
from rota.sched.web.settings import HttpSettings

NAMES = ("sql", "legal", "pirate")
HOSTILE = '<img src=x onerror="document.title=1">'


def folder_of(root: Path, name: str) -> str:
    folder = root / f"a{abs(hash(name))}"
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_text(name)
    return str(folder)


async def listen(gate: threading.Event, server: uvicorn.Server) -> None:
    while line := await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
        (gate.clear if line.strip() == "hold" else gate.set)()
    server.should_exit = True


async def main(root: Path, port: int, admin: str, api: str) -> None:
    gate = threading.Event()
    gate.set()
    async with SimEngine(max_loras=4, step_s=0.005, gate=gate) as engine:
        for name in NAMES[:2]:
            await engine.load(name, folder_of(root, name), pin=name == "sql")
        for name in (*NAMES[2:], HOSTILE):
            await engine.register(name, folder_of(root, name))
        settings = HttpSettings(
            model_name="sim-model",
            admin_keys=(admin,) if admin else (),
            api_keys=(api,) if api else (),
            directories=(str(root),),
        )
        config = uvicorn.Config(
            create_app(engine, settings), port=port, log_config=None, timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listen, gate, server)
            tasks.start_soon(server.serve)
            while not server.started:
                await anyio.lowlevel.checkpoint()
            print("ready", server.servers[0].sockets[0].getsockname()[1], flush=True)


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
