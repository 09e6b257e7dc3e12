"""A cancel at every await: each call is cancelled at its first suspension, its second, ... until it
runs through. After each, the engine serves others, and at the end nothing is held.
Every sleep is of virtual time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import pytest

from rota.sched.core import events as ev

from ..cancelling import cancelled_at
from .serving import Serving, expected, serving

pytestmark = pytest.mark.anyio


async def _take(s: Serving) -> None:
    generation = s.generate("a", n=4)
    while await generation.take(2):
        pass


async def _iterate(s: Serving) -> None:
    async for _ in s.generate("a", n=6):
        pass


async def _managed(s: Serving) -> None:
    async with s.generate(None, n=4) as generation:
        async for _ in generation:
            pass


async def _cold(s: Serving) -> None:
    await s.collect("cold", n=3)


CALLS: dict[str, Callable[[Serving], Awaitable[Any]]] = {
    "iterate": _iterate,
    "take": _take,
    "managed": _managed,
    "cold": _cold,
    "load": lambda s: s.load(f"new{s.shell.new_id()}", "N"),
    "replace": lambda s: s.replace("a", f"a{s.shell.new_id()}"),
    "register": lambda s: s.register(f"new{s.shell.new_id()}", "N"),
    "promote": lambda s: s.send(ev.Promote, "cold"),
    "prefetch": lambda s: s.send(ev.Prefetch, "cold"),
    "swap": lambda s: s.send(ev.Swap, "swapped", f"w{s.shell.new_id()}", slot=1),
    "rotate": lambda s: s.send(ev.Rotate, "a"),
    "unload": lambda s: s.unload("busy"),
    "pin": lambda s: s.send(ev.Pin, "a", pinned=False),
}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("call", CALLS)
async def test_a_cancel_at_every_await_leaves_a_sound_engine(call: str, depth: int) -> None:
    points = 0
    for nth in range(1, 60):
        async with serving(max_loras=3, drain_after_s=0.05, step_depth=depth) as s:
            await s.load("a", "A")
            await s.load("busy", "B")
            await s.register("cold", "C")
            before = s.generate("a", n=12)
            first = await before.__anext__()
            busy = s.generate("busy", n=8)
            began = await busy.__anext__()
            hit = await cancelled_at(nth, partial(CALLS[call], s))
            rest = [e.token_id async for e in before]
            assert [first.token_id, *rest] == expected("A", 12), "a bystander was hurt"
            assert [began.token_id, *[e.token_id async for e in busy]] == expected("B", 8)
            assert await s.collect(None, n=2) == expected("base", 2)
        if not hit:
            break
        points += 1
    assert not hit, "never ran through"
    assert points >= 1 or call in ("register", "rotate", "pin"), "nothing was cancelled"


async def test_a_cancelled_embedder_still_gets_an_orderly_end() -> None:
    """The shell's own task is shielded: cancelling its group ends no stream half way."""
    ends: list[str] = []
    with anyio.CancelScope() as outer:
        async with serving() as s:
            await s.load("a", "A")
            generation = s.generate("a", n=100)
            await generation.__anext__()
            outer.cancel()
            try:
                await anyio.sleep(1)
            finally:
                ends.append("left")
    assert ends == ["left"]
    assert s.shell.closed.is_set() and not s.executor.open
    stats = s.core.stats()
    assert stats.blocks_free == stats.blocks_total
