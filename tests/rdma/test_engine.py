"""Adapters from a peer in a serving engine: tokens as from disk, and faults touch nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anyio
import pytest

import rota
from rota.rdma.frames2 import Times

from .proxy import Proxy

CASE = "attn_mlp_r8"


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_an_engine_promotes_from_a_peer(kit: Any, serve: Callable[..., Any]) -> None:
    root = kit.root / "tests/data/oracle/llama"
    case = json.loads((root / "ref.json").read_text())["cases"][CASE]
    adapters = {path.name: path for path in (root / "adapters").iterdir()}
    running = serve(adapters)
    address = running.address
    sampling = rota.SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    broken = Proxy(address, "cut", 3000)
    silent = Proxy(address, "half-open", 100)
    quick = Times(handshake=0.3, reply=0.3, stall=0.3)
    sizes: dict[str, Any] = {
        "max_loras": 2,
        "max_lora_rank": 16,
        "kv_bytes": 1 << 22,
        "use_numba": False,
    }
    try:
        async with rota.Engine(root / "base", dtype="float32", **sizes) as engine:

            async def ids(name: str) -> list[int]:
                events = [e async for e in engine.generate(case["ids"], name, sampling)]
                return [e.token_id for e in events if e.token_id is not None]

            for name, source, code in (
                ("cut", rota.Peer(broken.address, CASE, secret=kit.secret), "peer-lost"),
                (
                    "silent",
                    rota.Peer(silent.address, CASE, secret=kit.secret, times=quick),
                    "peer-timeout",
                ),
                ("none", rota.Peer(address, "nothing", secret=kit.secret), "unknown-adapter"),
                ("guess", rota.Peer(address, CASE, secret=b"guess"), "wire-auth-failed"),
            ):
                with pytest.raises(rota.RotaError) as caught:
                    await engine.load(name, source)
                assert caught.value.code == code
            for packed in ("always", "never"):
                source = rota.Peer(address, CASE, secret=kit.secret, packed=packed)  # type: ignore[arg-type]
                await engine.promote(packed, source)
                assert await ids(packed) == case["greedy_f32"]
    finally:
        for proxy in (broken, silent):
            await anyio.to_thread.run_sync(proxy.close)
