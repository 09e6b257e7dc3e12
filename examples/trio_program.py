"""An engine inside a trio program: the same question to base and to every adapter, in one batch.

python examples/trio_program.py MODEL sql=DIR legal=DIR
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import trio

import rota

QUESTION = "How many users signed up last week?"


async def main(model: str, adapters: Mapping[str, Any], **options: Any) -> dict[str | None, str]:
    answers: dict[str | None, str] = {}

    async def ask(engine: rota.Engine, adapter: str | None) -> None:
        params = rota.SamplingParams(max_tokens=24)
        text = ""
        # Leaving this loop, or cancelling the nursery, would cancel the request.
        async for event in engine.generate(QUESTION, adapter, params):
            text += event.text
        answers[adapter] = text

    async with rota.Engine(model, adapters, **options) as engine:
        async with trio.open_nursery() as nursery:
            for adapter in (None, *adapters):
                nursery.start_soon(ask, engine, adapter)
        steps = engine.stats().steps
        assert steps <= 30 * (1 + len(adapters)), "different adapters share steps"
    return answers


if __name__ == "__main__":
    found = trio.run(main, sys.argv[1], dict(a.split("=", 1) for a in sys.argv[2:]))
    for name, text in found.items():
        print(f"{name or 'base'}: {text!r}")
