"""Pinned adapters with annexes, through many resizes: none is lost by one that succeeds, and each
that cannot be is refused by name, in seeds of their own and in broken cores."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from rota.sched.core import CoreConfig, adapters, resize
from rota.sched.core import effects as fx
from rota.sched.core import events as ev
from rota.sched.core.arena import Arena
from rota.sched.sim.scenario import Ask, Do, Fault, Scenario, SourceSpec
from rota.sched.sim.world import SimWorld, run_virtual

Patch = pytest.MonkeyPatch
SEEDS = range(100)
NAMES = "abcdef"


def scenario_of(seed: int) -> Scenario:
    """Six adapters with annexes, some pinned, under requests; the pool is exchanged again and again
    for one of another rank, in which annexes are larger or smaller."""
    rng = random.Random(seed)
    config = CoreConfig(
        max_loras=rng.choice([3, 4]),
        num_blocks=64,
        max_context=256,
        arena_bytes=100,
        drain_after_s=0.2,
        image_cache_bytes=rng.choice([1500, 100_000]),
    )
    actions: list[Any] = []
    for name in NAMES:
        annex = rng.choice([10, 20, 30, 50, 90, 130])
        source = SourceSpec(f"{name}#{seed}", rng.choice([0.01, 0.3]), annex=annex)
        pin = rng.random() < 0.5
        verb = "load" if pin or rng.random() < 0.5 else "register"
        actions.append(Do(round(rng.random() * 6, 3), verb, name, source, pin=pin))
    for _ in range(40):
        at = round(6 * rng.random(), 3)
        actions.append(Ask(at, rng.choice(NAMES), tokens=rng.randrange(1, 12)))
    for at in (0.05, *(round(rng.random() * 7, 3) for _ in range(5))):
        slots, rank = rng.choice([3, 4, 5]), 16 if at < 1 else rng.choice([8, 16, 32, 64])
        actions.append(Do(at, "resize", None, None, slots, deadline_s=3.0, rank=rank))
    faults = [Fault("commit", rng.randrange(12), "injected")] if seed % 4 == 0 else []
    actions.sort(key=lambda action: action.at)
    return Scenario(seed, "pins", "asyncio", config, tuple(actions), tuple(faults))


def run(seed: int) -> tuple[str, int, Counter[str]]:
    """The law that broke, pins found in place, and what resizes answered."""
    answers: Counter[str] = Counter()
    resizes: set[int] = set()

    def note(event: ev.Event, effects: list[fx.Effect], now: float) -> None:
        if isinstance(event, ev.Resize):
            resizes.add(event.command)
        for effect in effects:
            if isinstance(effect, fx.Reply) and effect.command in resizes:
                answers[effect.outcome if effect.failure is None else effect.failure.code] += 1

    world = SimWorld(scenario_of(seed), (note,))
    outcome = run_virtual(world.run, "asyncio", seed)
    broken = outcome.violation
    return (f"{broken.law}: {broken.what}" if broken else ""), world.pins.checked, answers


def test_no_pinned_adapter_is_lost_by_a_resize_that_succeeds() -> None:
    kept, answers = 0, Counter[str]()
    for seed in SEEDS:
        broken, checked, answered = run(seed)
        assert not broken, (seed, broken)
        kept += checked
        answers += answered
    assert kept > 100
    assert answers["resident-annex-too-large"] and answers["pinned-annexes-do-not-fit"]
    assert answers["pinned-not-back"], "a commit fails now and then"


def nothing_is_kept(patch: Patch) -> None:
    patch.setattr(Arena, "keep", lambda self, sizes: None)


def they_come_back_unpinned(patch: Patch) -> None:
    real = adapters.bring_back
    patch.setattr(adapters, "bring_back", lambda state, entry, pin: real(state, entry, False))


def losing_one_is_a_success(patch: Patch) -> None:
    real = resize.Reply

    def reply(command: int, outcome: str, **more: Any) -> fx.Reply:
        return real(command, "resized") if outcome == "failed" else real(command, outcome, **more)

    patch.setattr(resize, "Reply", reply)


def an_image_keeps_the_old_size(patch: Patch) -> None:
    real = adapters.relink

    def relink(state: Any, version: Any, job: Any) -> None:
        annex = version.annex
        real(state, version, job)
        version.annex = annex

    patch.setattr(adapters, "relink", relink)


MUTATIONS: list[Callable[[Patch], None]] = [
    nothing_is_kept,
    they_come_back_unpinned,
    losing_one_is_a_success,
    an_image_keeps_the_old_size,
]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda m: m.__name__)
def test_who_loses_a_pin_is_caught(mutate: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutate(monkeypatch)
    assert any(run(seed)[0] for seed in SEEDS)
