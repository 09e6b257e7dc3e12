"""Random worlds: any interleaving of requests, cancels, commands, faults and time keeps every law.

``World`` checks after every event (conservation, right weights, one terminal effect, ...).
"""

from __future__ import annotations

import random

import pytest

from rota.sched.core import events as ev

from . import harness


def run_world(seed: int, steps: int = 250, recurrent: bool = False) -> harness.World:
    rng = random.Random(seed)
    world = harness.World(
        max_loras=rng.choice([1, 2, 3, 5]),
        num_blocks=rng.choice([10, 20, 64]),
        max_running=rng.choice([2, 4, 16]),
        max_step_tokens=rng.choice([8, 32, 128]),
        mixed_step_tokens=rng.choice([4, 16, 64]),
        watermark_blocks=rng.choice([0, 2]),
        spill_blocks=rng.choice([0, 3, 20]),
        spill_fixed_cost=rng.choice([0.0, 16.0]),
        drain_after_s=rng.choice([0.0, 0.5, 5.0]),
        image_cache_bytes=rng.choice([0, 150, 100_000]),
        step_depth=1 + seed % 2,
        max_waiting=30,
        max_jobs_per_name=4,
        recurrent=recurrent,
        snapshots=rng.choice([0, 1, 3, 12]) if recurrent else 0,
        snapshot_tokens=rng.choice([16, 32, 1000]) if recurrent else 1024,
        state_blocks=rng.choice([0, 2]) if recurrent else 0,
    )
    names = ["a", "b", "c", "d", "e", "f"]
    prompts: dict[int, int] = {}
    seq = 0
    source = 0
    for name in names[:4]:
        source += 1
        world.command(ev.Register, name, source)
    for _ in range(steps):
        action = rng.randrange(18)
        world.now += rng.choice([0.0, 0.0, 0.01, 0.3])
        if action <= 4:
            first, samples = seq + 1, rng.choice([1, 1, 1, 1, 3])
            seq += samples
            length = rng.randrange(1, 40)
            prompts.update({one: length for one in range(first, seq + 1)})
            world.submit(
                first,
                rng.choice([None, *names]),
                n=rng.randrange(1, 30),
                prompt=length,
                priority=rng.choice([0, 0, 1]),
                default=rng.random() < 0.1,
                deadline=world.now + rng.random() if rng.random() < 0.1 else None,
                siblings=tuple(range(first + 1, seq + 1)),
            )
        elif action == 5 and seq:
            world.send(ev.Cancel(rng.randrange(1, seq + 1)))
        elif action == 6 and seq:
            world.send(ev.Stop(rng.randrange(1, seq + 1)))
        elif action == 7:
            source += 1
            name = rng.choice(names)
            kind = rng.randrange(9)
            world.content[source] = f"content-{rng.randrange(8)}"
            if kind == 0:
                world.command(ev.Load, name, source, pin=rng.random() < 0.2)
            elif kind == 1:
                world.command(ev.Register, name, source)
            elif kind in (2, 3):
                world.command(ev.Replace, name, source)
            elif kind == 4:
                world.command(ev.Promote, name, source)
            elif kind == 5:
                world.command(ev.Swap, name, source, rng.randrange(-1, 6))
            elif kind == 6:
                world.command(ev.Prefetch, name, source)
            elif kind == 7:
                world.command(ev.Unload, name, world.now + rng.random(), rng.random() < 0.5)
            else:
                world.command(ev.Rotate, rng.choice([None, name]))
        elif action == 8:
            name = rng.choice(names)
            if rng.random() < 0.5:
                world.command(ev.Promote, name, None)
            else:
                world.command(ev.Pin, name, rng.random() < 0.5)
        elif action == 9 and world.core._state.commands:
            world.send(ev.CancelCommand(rng.choice(list(world.core._state.commands))))
        elif action == 10 and world.staging:
            stage = rng.choice(list(world.staging))
            world.run_stage(stage, fail="injected" if rng.random() < 0.2 else None)
        elif action == 11:
            world.run_device(fail="device-error" if rng.random() < 0.05 else None)
        elif action == 12:
            world.send(ev.Tick())
        else:
            world.send(ev.Plan())
            world.run_device()
    if rng.random() < 0.3:
        world.send(ev.Close())
    for name in names:  # pinned slots would hold waiting commands for ever
        if not world.core._state.closing:
            world.command(ev.Pin, name, False)
    world.settle()
    assert world.core.idle(), "somebody waits and nothing will ever wake it"
    world.send(ev.Close())
    world.settle()
    assert world.closed
    assert set(world.ended) == set(prompts)
    assert not world.host
    assert not world.open and not world.device and not world.staging
    stats = world.core.stats()
    assert stats.blocks_free == stats.blocks_total
    assert all(s.leases == 0 for s in stats.slots)
    assert not world.core._state.commands and not world.core._state.jobs
    world.check_right_versions(prompts)
    return world


@pytest.mark.parametrize("block", range(20))
def test_random_worlds_keep_every_law(block: int) -> None:
    for seed in range(block * 25, block * 25 + 25):
        try:
            run_world(seed)
        except BaseException as error:
            error.add_note(f"reproduce: run_world({seed})")
            raise


@pytest.mark.parametrize("block", range(10))
def test_random_worlds_with_recurrent_states_too(block: int) -> None:
    for seed in range(block * 20, block * 20 + 20):
        try:
            run_world(seed, recurrent=True)
        except BaseException as error:
            error.add_note(f"reproduce: run_world({seed}, recurrent=True)")
            raise


def test_the_same_seed_gives_the_same_run() -> None:
    one, two = run_world(7), run_world(7)
    assert one.tokens == two.tokens and one.replies == two.replies and one.ended == two.ended
