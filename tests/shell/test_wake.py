"""A bell: who waits is woken once, whoever else is cancelled, on both event loops."""

from __future__ import annotations

import anyio
import pytest

from rota.sched.wake import Bell

pytestmark = pytest.mark.anyio


async def waiting(bell: Bell, count: int) -> None:
    with anyio.fail_after(20):
        while len(bell._waiting) != count:
            await anyio.lowlevel.checkpoint()


async def test_a_ring_wakes_all_who_wait_in_their_order(anyio_backend: str) -> None:
    bell, woken = Bell(), []

    async def one(number: int) -> None:
        await bell.wait()
        woken.append(number)

    async with anyio.create_task_group() as tasks:
        for turn in range(3):
            for number in range(5):
                tasks.start_soon(one, number)
            await waiting(bell, 5)
            assert not woken
            bell.ring()
            assert not woken, "a ring runs nobody itself"
            with anyio.fail_after(20):
                while len(woken) < 5:
                    await anyio.lowlevel.checkpoint()
            if anyio_backend == "asyncio":  # trio runs what is ready in any order
                assert woken == [0, 1, 2, 3, 4], f"turn {turn}"
            woken.clear()


async def test_a_ring_is_not_remembered(anyio_backend: str) -> None:
    bell = Bell()
    bell.ring()
    bell.ring()
    with anyio.move_on_after(0.01) as scope:
        await bell.wait()
    assert scope.cancelled_caught and not bell._waiting


async def test_a_cancelled_wait_leaves_nothing_and_the_others_waiting(anyio_backend: str) -> None:
    bell, woken = Bell(), []

    async def one(number: int, scope: anyio.CancelScope) -> None:
        with scope:
            await bell.wait()
            woken.append(number)

    scopes = [anyio.CancelScope() for _ in range(3)]
    async with anyio.create_task_group() as tasks:
        for number, scope in enumerate(scopes):
            tasks.start_soon(one, number, scope)
        await waiting(bell, 3)
        scopes[1].cancel()
        await waiting(bell, 2)
        bell.ring()
    assert sorted(woken) == [0, 2]


@pytest.mark.parametrize("cancel_first", [False, True])
async def test_rung_and_cancelled_in_one_turn(anyio_backend: str, cancel_first: bool) -> None:
    bell, woken = Bell(), []
    scope = anyio.CancelScope()

    async def cancelled() -> None:
        with scope:
            await bell.wait()

    async def other() -> None:
        await bell.wait()
        woken.append("other")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cancelled)
        tasks.start_soon(other)
        await waiting(bell, 2)
        for act in (scope.cancel, bell.ring) if cancel_first else (bell.ring, scope.cancel):
            act()
    assert woken == ["other"] and not bell._waiting


async def test_waiting_in_a_cancelled_scope_ends_at_once(anyio_backend: str) -> None:
    bell = Bell()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await bell.wait()
    assert scope.cancelled_caught and not bell._waiting
