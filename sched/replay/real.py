"""A trace against a real engine, in real time: the same measures as on the simulated device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from ...errors import RequestError
from ...gpu.model.sampling import SamplingParams
from ..engine import Engine
from ..face import GenerationLike
from .arrivals import Arrival, Control, prompt_of
from .drive import Report, drive


async def against_engine(
    model: Path | None,
    adapters: Mapping[str, Path],
    arrivals: Sequence[Arrival],
    slots: int,
    **options: Any,
) -> Report:
    """Open an engine on ``model`` and play ``arrivals``. Adapter names of the trace are dealt to
    the given adapters in turn (none given: all base). Prompts are made-up token ids that begin
    alike where the trace's do; answers run to their length. ``options``: more of the engine's.
    Raises what :class:`Engine` raises on entry, and RequestError."""
    if model is None:
        raise RequestError("--against real needs a model directory", code="bad-option")
    given = sorted(adapters)
    dealt: dict[str, str | None] = {}
    for arrival in arrivals:
        if arrival.adapter is not None and arrival.adapter not in dealt:
            dealt[arrival.adapter] = given[len(dealt) % len(given)] if given else None
    async with Engine(model, max_loras=slots, **options) as engine:
        for name, path in adapters.items():
            await engine.register(name, path)
        info = engine.info

        numbers = count()

        def start(arrival: Arrival) -> GenerationLike:
            context = info.context_length
            prompt = min(arrival.prompt, context // 2)
            tokens = max(1, min(arrival.tokens, context - prompt - 1))
            sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
            name = dealt[arrival.adapter] if arrival.adapter is not None else None
            cut = msgspec.structs.replace(arrival, prompt=prompt)
            ids = prompt_of(cut, next(numbers), info.vocab_size)
            return engine.generate(ids, name, sampling)

        async def control(_: Control) -> None:
            raise RequestError("commands are not played here", code="bad-option")

        watch = await drive(arrivals, start, control)
        return watch.report(len(arrivals), engine.stats())
