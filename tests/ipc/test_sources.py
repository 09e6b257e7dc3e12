"""Where adapters of frontends come from: directories, weight peers, uploads; and their limits."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import anyio
import pytest

import rota
from rota.errors import (
    CommandError,
    EngineClosedError,
    StagingError,
)
from rota.rdma.peer import WeightPeer
from rota.sched.ipc.client import Backoff
from rota.sched.ipc.limits import IpcLimits
from rota.sched.sim.engine import sim_content, sim_text

from .asking import CONFIG, A, params, text_of

pytestmark = pytest.mark.anyio


async def test_paths_outside_the_allow_list_are_refused(serving: Any, tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    for folder in (inside / "x", outside):
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_bytes(CONFIG)
        (folder / "adapter_model.safetensors").write_bytes(A)
    (inside / "link").symlink_to(outside)
    async with serving(roots=[str(inside)]) as world, world.connect() as engine:
        await engine.load("ok", inside / "x")
        for path in (outside, inside / "link", inside / ".." / "out", "/etc"):
            with pytest.raises(CommandError) as caught:
                await engine.load("no", path)
            assert caught.value.code == "path-not-allowed"


async def test_weight_peers_outside_the_allow_list_are_refused(serving: Any) -> None:
    async with serving(peers=["127.0.0.1:9"]) as world, world.connect() as engine:
        with pytest.raises(CommandError) as caught:
            await engine.load("x", rota.Peer("10.0.0.1:9", "x"))
        assert caught.value.code == "peer-not-allowed"
        with pytest.raises(StagingError) as nobody:
            await engine.load("x", rota.Peer("127.0.0.1:9", "x", deadline_s=5.0))
        assert nobody.value.code


async def test_peers_named_by_frontends_keep_their_connections(
    serving: Any, tmp_path: Path
) -> None:
    """One for all promotions of all frontends, hung up when the serving ends."""
    folder = tmp_path / "one"
    folder.mkdir()
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    tensors = len(header).to_bytes(8, "little") + header + b"abcd"
    (folder / "adapter_model.safetensors").write_bytes(tensors)
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_bytes(json.dumps(config).encode())
    answer = sim_text(sim_content(tensors, json.dumps(config).encode()), 1, 8)
    peer = WeightPeer({"one": folder}, secret=b"a secret of the tests")
    host, port = peer.listen()
    source = rota.Peer(f"{host}:{port}", "one", secret=b"a secret of the tests")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(peer.serve)
        async with serving() as world:
            for name in ("x", "y"):
                async with world.connect() as engine:
                    await engine.load(name, source)
                    assert await engine.complete([1], name, params()) == answer
            counts = peer.counters()
            assert (counts["connections"], counts["connections_now"]) == (1, 1)
        with anyio.fail_after(20):
            while peer.counters()["connections_now"]:
                await anyio.lowlevel.checkpoint()
        peer.stop()


async def test_a_large_adapter_travels_in_chunks(serving: Any) -> None:
    tensors = os.urandom(3 << 20)
    async with serving(limits=IpcLimits(max_frame=300_000)) as world, world.connect() as engine:
        await engine.load("big", (tensors, CONFIG))
        assert await engine.complete([1], "big", params()) == text_of(tensors, 1, 8)


async def test_uploads_over_the_limit_end_the_connection_by_name(serving: Any) -> None:
    async with serving(limits=IpcLimits(max_upload_bytes=1000)) as world:
        async with world.connect(backoff=Backoff(first_s=0.01)) as engine:
            with pytest.raises(EngineClosedError) as caught:
                await engine.load("big", (bytes(2000), CONFIG))
            assert caught.value.code == "engine-gone"
            await engine.wait_connected()
            await engine.load("small", (A, CONFIG))
