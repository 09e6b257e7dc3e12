"""Asking an engine for tokens, greedily."""

from __future__ import annotations

from typing import Any

import rota


def greedy(n: int = 12) -> rota.SamplingParams:
    return rota.SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True)


async def ids(engine: rota.Engine, prompt: list[int], adapter: Any, n: int = 12) -> list[int]:
    """All ``n`` of them, from one version."""
    events = [e async for e in engine.generate(prompt, adapter, greedy(n))]
    assert len({e.adapter_id for e in events}) == 1, "one request, one version"
    assert [e.finish_reason for e in events][:-1] == [None] * (len(events) - 1)
    assert events[-1].finish_reason == "length"
    return [e.token_id for e in events if e.token_id is not None]
