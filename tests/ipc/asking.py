"""What tests of frontends ask a simulated engine for, what it answers, and how streams end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

import rota
from rota.errors import EngineClosedError
from rota.sched.ipc.link import RemoteGeneration
from rota.sched.sim.engine import sim_content, sim_text

CONFIG = b"{}"
A, B = b"tensors of a", b"tensors of b"


def params(n: int = 8, **more: Any) -> rota.SamplingParams:
    return rota.SamplingParams(max_tokens=n, **more)


def text_of(tensors: bytes | None, prompt: int, n: int) -> str:
    return sim_text("base" if tensors is None else sim_content(tensors, CONFIG), prompt, n)


async def end_without_their_engine(streams: Iterable[RemoteGeneration]) -> None:
    """Each of ``streams``, whose engine was killed, ends by name."""
    for stream in streams:
        with pytest.raises(EngineClosedError) as caught:
            async for _ in stream:
                pass
        assert caught.value.code == "engine-gone"
