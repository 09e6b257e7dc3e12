"""Threads that work for tasks: results, errors, limits, cancellation, and their end."""

from __future__ import annotations

import threading
from collections.abc import Callable

import anyio
import anyio.lowlevel
import pytest

from rota.sched.threads import Threads

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"]),
]


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(30):
        while not condition():
            await anyio.lowlevel.checkpoint()


def fail() -> None:
    raise KeyError("told")


async def test_gives_and_raises_what_the_work_does() -> None:
    threads = Threads(1, "test")
    assert await threads.run(threading.get_ident) != threading.get_ident()
    with pytest.raises(KeyError, match="told"):
        await threads.run(fail)
    assert await threads.run(lambda: 5) == 5
    assert threads.count == 1
    threads.close()
    await until(lambda: threads.count == 0)


async def test_no_more_than_the_limit_work_and_the_rest_waits_in_order() -> None:
    threads, go = Threads(2, "test"), threading.Semaphore(0)
    begun: list[int] = []

    def work(number: int) -> None:
        begun.append(number)
        assert go.acquire(timeout=30)

    async with anyio.create_task_group() as tasks:
        for number in range(4):
            tasks.start_soon(threads.run, lambda number=number: work(number))
            await until(lambda number=number: len(begun) + len(threads._jobs) == number + 1)
        await until(lambda: len(begun) == 2)
        assert threads.count == 2
        go.release()
        await until(lambda: len(begun) == 3)
        assert begun[2] == 2
        go.release(3)
    assert sorted(begun[:2]) == [0, 1] and sorted(begun[2:]) == [2, 3]
    threads.close()
    await until(lambda: threads.count == 0)


async def test_a_free_thread_is_used_before_another_begins() -> None:
    threads = Threads(8, "test")
    names = set()
    for _ in range(5):
        names.add(await threads.run(threading.get_ident))
        await until(lambda: threads._idle == 1)
    assert len(names) == 1 and threads.count == 1
    threads.close()


async def test_without_another_thread_those_there_are_do_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is lost or waits for ever, and threads begin again when the system has some."""
    threads, go = Threads(4, "test"), threading.Event()

    def none(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none)
        for _ in range(5):
            with pytest.raises(RuntimeError):
                await threads.run(lambda: 1)
    assert threads.count == 0 and not threads._jobs
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(threads.run, lambda: go.wait(30))
        await until(lambda: threads.count == 1 and not threads._jobs)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", none)
            tasks.start_soon(threads.run, go.is_set)
            await until(lambda: len(threads._jobs) == 1)
        go.set()
    assert threads.count == 1
    threads.close()
    await until(lambda: threads.count == 0)


async def test_threads_end_when_there_is_nothing_to_do() -> None:
    threads = Threads(2, "test", idle_s=0.001)
    for _ in range(3):
        assert await threads.run(lambda: 1) == 1
        await until(lambda: threads.count == 0)
    threads.close()


async def test_cancelled_work_goes_on_unheard_and_its_thread_works_again() -> None:
    threads, go, ended = Threads(1, "test"), threading.Event(), threading.Event()
    begun = threading.Event()

    def work() -> None:
        begun.set()
        assert go.wait(30)
        ended.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(threads.run, work)
        await until(begun.is_set)
        tasks.cancel_scope.cancel()
    assert not ended.is_set()
    go.set()
    assert await threads.run(ended.is_set)
    threads.close()
    await until(lambda: threads.count == 0)


async def test_closed_threads_finish_what_was_asked() -> None:
    threads, go = Threads(1, "test"), threading.Event()
    got: list[int] = []

    async def ask(number: int) -> None:
        def work() -> int:
            assert go.wait(30)
            return number

        got.append(await threads.run(work))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask, 1)
        tasks.start_soon(ask, 2)
        await anyio.lowlevel.checkpoint()
        threads.close()
        go.set()
    assert sorted(got) == [1, 2]
    await until(lambda: threads.count == 0)
