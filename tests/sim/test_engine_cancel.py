"""An engine's whole life, cancelled at every await: opening, start-up load, a request, closing.

Real threads and the tiny checkpoint, in real time. After each cancel nothing is left running.
"""

from __future__ import annotations

import threading
from pathlib import Path

import anyio
import pytest

import rota

from ..cancelling import cancelled_at


async def _life(root: Path) -> None:
    adapters = {"x": root / "adapters" / "attn_mlp_r8"}
    options = {"max_loras": 1, "max_lora_rank": 8, "use_numba": False, "device": "cpu"}
    async with rota.Engine(root / "base", adapters, **options) as engine:
        sampling = rota.SamplingParams(max_tokens=2, temperature=0.0)
        async for _ in engine.generate([1, 2, 3], "x", sampling):
            pass


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_an_engine_cancelled_anywhere_leaves_nothing_running(backend: str, data_dir: Path) -> None:
    root = data_dir / "oracle" / "llama"

    async def once(nth: int) -> bool:
        return await cancelled_at(nth, lambda: _life(root))

    points = 0
    for nth in range(1, 60):
        hit = anyio.run(once, nth, backend=backend)
        alive = [t.name for t in threading.enumerate() if t.name == "rota-device"]
        assert not alive, f"the device thread outlived a cancel at await {nth}"
        if not hit:
            break
        points += 1
    assert not hit and points >= 4
