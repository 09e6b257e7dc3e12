"""Sending requests at a rate, or so many at a time, and the figures of what came back.

Owns one run. A request's clock starts when it was *due*: a generator that falls behind makes its
figures worse, not better, and says by how much it was late.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import anyio
import msgspec

from ...errors import RotaError
from .targets import Ask, Target

_WORDS = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work number night "
    "point home water room mother area money story fact month lot right study book eye job word"
).split()


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What to send. ``rate``: requests a second at random moments (Poisson); ``None``:
    ``concurrency`` at a time, the next as soon as one ends. ``warmup`` requests go first and are
    not counted."""

    adapters: tuple[str, ...] = ("base",)
    requests: int = 64
    concurrency: int = 8
    rate: float | None = None
    prompt_tokens: int = 64
    max_tokens: int = 64
    warmup: int = 8
    seed: int = 0


def asks(load: Load, count: int, rng: random.Random) -> list[Ask]:
    """``count`` requests; adapters take turns, no two prompts begin alike."""
    made = []
    for i in range(count):
        words = rng.choices(_WORDS, k=load.prompt_tokens)
        adapter = load.adapters[i % len(load.adapters)]
        made.append(Ask(adapter, " ".join(words), load.prompt_tokens, load.max_tokens))
    return made


async def _one(target: Target, ask: Ask) -> None:
    try:
        await target.ask(ask)
    except RotaError as error:
        ask.error = error.code
    except Exception as error:  # the target's transport: counted by its name
        ask.error = type(error).__name__


async def run(target: Target, load: Load) -> dict[str, Any]:
    """The whole run; its figures as plain data."""
    rng = random.Random(load.seed)
    await _closed(target, asks(load, load.warmup, rng), load.concurrency)
    todo = asks(load, load.requests, rng)
    begin = time.perf_counter()
    if load.rate is None:
        await _closed(target, todo, load.concurrency)
    else:
        await _open(target, todo, load.rate, rng)
    return figures(todo, time.perf_counter() - begin) | {"load": msgspec.to_builtins(load)}


async def _closed(target: Target, todo: Sequence[Ask], concurrency: int) -> None:
    queue: Iterator[Ask] = iter(todo)

    async def worker() -> None:
        for ask in queue:
            ask.due = time.perf_counter()
            await _one(target, ask)

    async with anyio.create_task_group() as tasks:
        for _ in range(min(concurrency, len(todo))):
            tasks.start_soon(worker)


async def _open(target: Target, todo: Sequence[Ask], rate: float, rng: random.Random) -> None:
    due = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for ask in todo:
            due += rng.expovariate(rate)
            # Arrivals have a pace of their own, whatever the answers take.
            await anyio.sleep(max(0.0, due - time.perf_counter()))
            ask.due = due
            tasks.start_soon(_one, target, ask)


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that ``share`` of all do not exceed; ``None`` of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1e6) * len(ordered) // 10**6) - 1))]


def figures(done: Sequence[Ask], wall_s: float) -> dict[str, Any]:
    """Totals, and a row for each adapter, times in milliseconds."""
    late = [1e3 * (a.sent - a.due) for a in done if a.sent]
    return {
        "wall_s": round(wall_s, 3),
        "late_p99_ms": _rounded(quantile(late, 0.99)),
        "total": _row(done, wall_s),
        "adapters": {
            name: _row([a for a in done if a.adapter == name], wall_s)
            for name in dict.fromkeys(a.adapter for a in done)
        },
    }


def _row(done: Sequence[Ask], wall_s: float) -> dict[str, Any]:
    good = [a for a in done if a.error is None and a.came]
    errors: dict[str, int] = {}
    for ask in done:
        if ask.error is not None:
            errors[ask.error] = errors.get(ask.error, 0) + 1
    first = [1e3 * (a.came[0] - a.due) for a in good]
    whole = [1e3 * (a.came[-1] - a.due) for a in good]
    each = [1e3 * (a.came[-1] - a.came[0]) / (a.tokens - 1) for a in good if a.tokens > 1]
    gaps = [1e3 * (b - a) for g in good for a, b in zip(g.came, g.came[1:], strict=False)]
    tokens = sum(a.tokens for a in good)
    row: dict[str, Any] = {
        "requests": len(done),
        "errors": errors,
        "prompt_tokens": sum(a.prompt_tokens for a in good),
        "tokens": tokens,
        "tokens_per_s": round(tokens / wall_s, 1) if wall_s else None,
    }
    for name, values in (("ttft", first), ("per_token", each), ("gap", gaps), ("whole", whole)):
        for share in (0.5, 0.99):
            row[f"{name}_p{round(share * 100)}_ms"] = _rounded(quantile(values, share))
    return row


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
