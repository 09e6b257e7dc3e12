"""Adapters from a peer in a serving engine: tokens as from disk, and faults touch nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import rota
from rota.rdma.frames2 import Times
from rota.sched.core.spread import PHASES

from .proxy import Proxy

CASE, OTHER = "attn_mlp_r8", "rslora_r16_bf16"


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_an_engine_promotes_from_a_peer(kit: Any, serve: Callable[..., Any]) -> None:
    root = kit.root / "tests/data/oracle/llama"
    cases = json.loads((root / "ref.json").read_text())["cases"]
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

            async def ids(name: str, case: str) -> list[int]:
                prompt = cases[case]["ids"]
                events = [e async for e in engine.generate(prompt, name, sampling)]
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
            # Two contents: one that is held already would not be fetched again.
            for packed, content in (("always", CASE), ("never", OTHER)):
                # A parameter of the test.
                source = rota.Peer(address, content, secret=kit.secret, packed=packed)
                await engine.promote(packed, source)
                assert await ids(packed, content) == cases[content]["greedy_f32"]
            # Every phase has its time in the engine's own count, whichever way the bytes came.
            counts = (sum(spread.counts) for spread in engine.stats().times.phases)
            assert dict(zip(PHASES, counts, strict=True)) == {
                **{"resolve": 2, "transfer": 2, "verify": 1, "pack": 2},
                **{"read": 1, "digest": 1, "audit": 1},
            }
    finally:
        for proxy in (broken, silent):
            await anyio.to_thread.run_sync(proxy.close)


@pytest.mark.anyio
@pytest.mark.parametrize("packed", ["always", "never"])
async def test_one_place_is_staged_once_and_an_unchanged_one_moves_no_bytes(
    kit: Any, serve: Callable[..., Any], tmp_path: Path, packed: Any
) -> None:
    root = kit.root / "tests/data/oracle/llama"
    cases = json.loads((root / "ref.json").read_text())["cases"]
    adapters = root / "adapters"
    moving = Path(shutil.copytree(adapters / CASE, tmp_path / "moving"))
    running = serve({"one": moving, "two": adapters / OTHER})
    sampling = rota.SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    sizes: dict[str, Any] = {
        "max_loras": 2,
        "max_lora_rank": 16,
        "kv_bytes": 1 << 22,
        "use_numba": False,
    }

    def peer(name: str, **more: Any) -> rota.Peer:
        """Always another object; one place."""
        return rota.Peer(running.address, name, secret=kit.secret, packed=packed, **more)

    async def seen() -> tuple[int, int, int]:
        """Of connections that are over; the peer counts a payload when it is through."""
        with anyio.fail_after(30):
            while running.peer.counters()["connections_now"]:
                await anyio.lowlevel.checkpoint()
        counts = running.peer.store.counters() | running.peer.counters()
        return counts["opens"], counts["packs"], counts["bytes_sent"]

    async with rota.Engine(root / "base", dtype="float32", **sizes) as engine:

        async def ids() -> list[int]:
            events = [e async for e in engine.generate(cases[CASE]["ids"], "x", sampling)]
            return [e.token_id for e in events if e.token_id is not None]

        async with anyio.create_task_group() as tasks:
            for _ in range(10):
                tasks.start_soon(engine.promote, "x", peer("one"))
        assert (await seen())[0] == 1 and engine.stats().stages == 1, "single flight"
        assert await ids() == cases[CASE]["greedy_f32"][:8]
        assert (await engine.replace("x", peer("two"))).outcome == "done"
        opens, packs, sent = await seen()
        # Back to what the cache holds: one connection, one question, and its answer.
        reply = await engine.replace("x", peer("one"))
        assert (reply.outcome, reply.generation) == ("done", 3)
        assert await ids() == cases[CASE]["greedy_f32"][:8]
        assert (await seen())[:2] == (opens + 1, packs) and (await seen())[2] - sent < 2000
        assert (await engine.replace("x", peer("one", deadline_s=5.0))).outcome == "unchanged"
        assert (await seen())[2] - sent < 4000
        # Who does not know the secret is another place, and gets nothing from the cache.
        with pytest.raises(rota.RotaError) as caught:
            await engine.replace("x", rota.Peer(running.address, "one", secret=b"guess"))
        assert caught.value.code == "wire-auth-failed"
        # Changed files have another digest: they are fetched.
        config = json.loads((moving / "adapter_config.json").read_text())
        config["lora_alpha"] *= 3
        (moving / "adapter_config.json").write_text(json.dumps(config))
        reply = await engine.replace("x", peer("one"))
        assert (reply.outcome, reply.generation) == ("done", 4)
        assert (await seen())[2] - sent > 10_000
        assert await ids() != cases[CASE]["greedy_f32"][:8]
