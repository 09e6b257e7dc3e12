"""Crowds: scenarios in which steps overlap as often as they can, and end as one did not foresee.

Many sequences decode side by side in small blocks; stop strings, cancels, deadlines and failing
steps end them in the middle of it, while commands ask for barriers. Made from a seed, like
``scenario``.
"""

from __future__ import annotations

import random

from ..core import CoreConfig
from .scenario import Action, Ask, Do, Fault, Leave, Scenario, SourceSpec

_LEAVES: tuple[Leave, ...] = ("", "", "stop", "stop", "cancel", "scope", "drop")
_NAMES = ("n0", "n1")


def _ask(rng: random.Random, at: float) -> Ask:
    leave = rng.choice(_LEAVES)
    prompt = rng.randrange(1, 12)
    return Ask(
        round(at, 4),
        rng.choice([None, *_NAMES]),
        False,
        prompt,
        rng.randrange(4, 50),
        rng.choice([0, 0, 0, 1]),
        round(rng.random() * 0.6, 3) if rng.random() < 0.1 else None,
        leave,
        round(rng.random() * 1.5, 4) if leave else 0.0,
        0,
        rng.choice([0, prompt]),
        3 if rng.random() < 0.05 else 1,
    )


def crowd_of(seed: int) -> Scenario:
    """The crowd of a seed."""
    rng = random.Random(seed ^ 0xC0FFEE)
    config = CoreConfig(
        max_loras=2,
        num_blocks=rng.choice([120, 600]),
        max_context=90,
        block_size=rng.choice([1, 2, 4]),
        max_running=rng.choice([4, 16, 32]),
        max_step_tokens=64,
        mixed_step_tokens=32,
        watermark_blocks=rng.choice([0, 4]),
        prefix_cache=rng.random() < 0.8,
        spill_blocks=rng.choice([0, 40]),
        spill_fixed_cost=0.0,
        drain_after_s=rng.choice([0.0, 0.2]),
        log_size=100_000,
        recurrent=seed % 5 == 4,
        snapshots=seed // 3 % 3 * 4,
        snapshot_tokens=(4, 8)[seed % 2],
        step_depth=2,
    )
    actions: list[Action] = [
        Do(0.0, "load", name, SourceSpec(f"{name}#0", 0.01)) for name in _NAMES
    ]
    for _ in range(rng.choice([3, 6])):  # they come together, so that all decode and nobody waits
        at = 0.05 + rng.random()
        actions += [_ask(rng, at) for _ in range(rng.choice([1, 4, 12]))]
    for index in range(rng.choice([0, 2, 6])):
        at, name = round(0.1 + rng.random() * 1.2, 4), rng.choice(_NAMES)
        source = SourceSpec(f"{name}#{index + 1}", rng.choice([0.0, 0.05]))
        actions.append(Do(at, rng.choice(["replace", "replace", "load"]), name, source))
        if rng.random() < 0.3:
            actions.append(Do(at, "unload", name, deadline_s=0.2, cancel_late=True))
    faults: list[Fault] = []
    if seed % 3 == 0:
        faults = [Fault(rng.choice(["step", "row"]), rng.randrange(60)) for _ in range(3)]
    if seed % 10 == 1:
        faults.append(Fault("step", rng.randrange(60), "device-dead"))
    order = sorted(range(len(actions)), key=lambda i: (actions[i].at, i))
    return Scenario(
        seed,
        "crowd",
        "trio" if seed % 7 == 4 else "asyncio",
        config,
        tuple(actions[i] for i in order),
        tuple(faults),
        step_s=rng.choice([0.005, 0.02]),
    )
