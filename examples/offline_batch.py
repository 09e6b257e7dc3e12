"""An offline batch: JSON lines in, JSON lines out, adapters mixed freely, order kept.

    python examples/offline_batch.py MODEL in.jsonl out.jsonl sql=DIR

A line is ``{"prompt": "...", "adapter": "sql", "max_tokens": 32}``; base without ``adapter``. One
that cannot be served gets an ``error`` with its code, and the others go on.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import anyio
import msgspec

import rota


class Line(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str
    adapter: str | None = None
    max_tokens: int = 64


async def answer(engine: rota.Engine, raw: bytes) -> dict[str, Any]:
    try:
        line = msgspec.json.decode(raw, type=Line)
        params = rota.SamplingParams(max_tokens=line.max_tokens)
        return {"text": await engine.complete(line.prompt, line.adapter, params)}
    except msgspec.MsgspecError as error:
        return {"error": "bad-line", "message": str(error)}
    except rota.RotaError as error:
        return {"error": error.code, "message": str(error)}


async def main(
    model: str, source: str, target: str, adapters: Mapping[str, Any], **options: Any
) -> int:
    """Returns the number of lines written."""
    lines = (await anyio.Path(source).read_bytes()).splitlines()
    answers: list[dict[str, Any]] = [{} for _ in lines]
    # The engine queues what it is given; a limit keeps a large file from being all in the queue.
    limit = anyio.CapacityLimiter(256)

    async def one(engine: rota.Engine, index: int) -> None:
        async with limit:
            answers[index] = await answer(engine, lines[index])

    async with rota.Engine(model, adapters, **options) as engine:
        async with anyio.create_task_group() as tasks:
            for index in range(len(lines)):
                tasks.start_soon(one, engine, index)
    out = b"".join(msgspec.json.encode(a) + b"\n" for a in answers)
    return await anyio.Path(target).write_bytes(out) and len(answers)


if __name__ == "__main__":
    extra = dict(a.split("=", 1) for a in sys.argv[4:])
    anyio.run(main, *sys.argv[1:4], extra)
