"""More tenants than slots: every tenant's adapter is known, and loads when its request comes.

    python examples/many_tenants.py MODEL DIR

The adapters live on a weight peer, here in the same program; usually ``rota peer`` on another
machine. (A directory instead of ``rota.Peer`` works the same.) Registering costs nothing on the
device. A request for a tenant that is not resident promotes it into a slot that is idle; a hot
tenant cannot keep a cold one out for longer than ``drain_after_s`` and what already runs.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import anyio

import rota
from rota.rdma.peer import WeightPeer


async def main(
    model: str, adapter: str, tenants: int = 12, requests: int = 40, **options: Any
) -> dict[str, int]:
    """Returns how many requests each tenant had answered."""
    answered: dict[str, int] = {}
    rng = random.Random(1)

    async def ask(engine: rota.Engine, tenant: str) -> None:
        params = rota.SamplingParams(max_tokens=6, ignore_eos=True)
        text = await engine.complete(f"Hello from {tenant}", tenant, params)
        assert text is not None
        answered[tenant] = answered.get(tenant, 0) + 1

    names = [f"tenant-{i}" for i in range(tenants)]
    peer = WeightPeer({name: Path(adapter) for name in names}, secret=b"between friends")
    host, port = peer.listen()
    async with (
        anyio.create_task_group() as background,
        rota.Engine(model, max_loras=3, drain_after_s=0.05, **options) as engine,
    ):
        background.start_soon(peer.serve)
        for name in names:
            source = rota.Peer(f"{host}:{port}", name, secret=b"between friends")
            await engine.register(name, source)
        # A few tenants are popular, the others come now and then.
        popularity = [1 / (1 + i) for i in range(tenants)]
        async with anyio.create_task_group() as tasks:
            for tenant in [*names, *rng.choices(names, popularity, k=requests)]:
                tasks.start_soon(ask, engine, tenant)
        stats = engine.stats()
        print(f"{stats.ended} requests of {len(answered)} tenants over {len(stats.slots)} slots:")
        print(f"{stats.commits} commits, {stats.evicted} evictions, {stats.stages} stagings")
        assert stats.commits >= tenants, "every tenant was promoted"
        peer.stop()
    assert len(answered) == tenants and sum(answered.values()) == tenants + requests
    return answered


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], sys.argv[2])
