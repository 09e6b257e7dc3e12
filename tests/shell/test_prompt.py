"""A prompt interpreter: its switch interval is short while something is staged, no longer; its
settled heap is in no collection; its loop gets a core at once from threads that stage."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from rota.errors import StagingError
from rota.gpu.host_threads import LONG_S, SHORT_S
from rota.sched.prompt import SWITCH_S, prompt_switching, settle_heap, settle_process
from rota.sched.staging import Stager, staging_threads

from ..slices import no_better_than_others, slice_s, usual_s

USUAL = 0.005


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(USUAL)
    yield
    sys.setswitchinterval(before)


def now() -> Any:
    return pytest.approx(sys.getswitchinterval())


@pytest.mark.parametrize("before", [USUAL, SWITCH_S, 0.0001])
def test_it_is_shortened_and_put_back(before: float) -> None:
    sys.setswitchinterval(before)
    with pytest.raises(KeyError), prompt_switching():
        assert now() == min(before, SWITCH_S)
        raise KeyError
    assert now() == before


def test_two_that_overlap_leave_nothing_behind() -> None:
    first, second = prompt_switching(), prompt_switching()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert now() == USUAL


def test_a_settled_heap_is_left_out_of_collections() -> None:
    alive = [[number] for number in range(1000)]
    before = gc.get_freeze_count()
    try:
        settle_heap()
        assert gc.get_freeze_count() > before + len(alive)
        assert not any(thing is alive for thing in gc.get_objects())
    finally:
        gc.unfreeze()


def test_a_settled_process_has_short_slices_on_this_thread_alone() -> None:
    usual, before = usual_s(), gc.get_freeze_count()

    def work() -> tuple[float, float]:
        no_better_than_others()
        settle_process()
        with ThreadPoolExecutor(1) as pool:
            return slice_s(), pool.submit(slice_s).result()

    try:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(work).result() == (SHORT_S, usual)
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_threads_that_stage_have_long_slices() -> None:
    assert SHORT_S < usual_s() < LONG_S
    threads = staging_threads(1)
    assert await threads.run(slice_s) == LONG_S
    threads.close()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_as_long_as_something_is_staged() -> None:
    go = [threading.Event(), threading.Event()]

    begun: list[int] = []

    def stage(source: int, cancelled: Any, held: Any) -> Any:
        begun.append(source)
        assert go[source].wait(30)
        raise StagingError("no", code="stage-io")

    stager = Stager(stage, workers=2, clock_ns=lambda: 0)
    ended: list[int] = []

    async def run(number: int) -> None:
        with pytest.raises(StagingError):
            await stager.run(number, number)
        ended.append(number)

    async with anyio.create_task_group() as tasks:
        assert now() == USUAL
        tasks.start_soon(run, 0)
        tasks.start_soon(run, 1)
        while len(begun) < 2:
            await anyio.lowlevel.checkpoint()
        assert now() == SWITCH_S
        go[0].set()
        while ended != [0]:
            await anyio.lowlevel.checkpoint()
        assert now() == SWITCH_S
        go[1].set()
    assert now() == USUAL
