"""Where buffers for files and slots begin, and where they go when nobody needs them any more."""

from __future__ import annotations

import errno
import threading
from typing import Any

import numpy as np
import pytest

from rota.gpu.host_memory import HUGE_PAGE
from rota.gpu.lora import buffers as buffers_module
from rota.gpu.lora.buffers import LARGE, MAPPED, PAGE, Buffers, Waiting, blank

SIZES = [1, PAGE, PAGE + 1, MAPPED - 1, MAPPED, LARGE - 1, LARGE, LARGE + HUGE_PAGE - 1]


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_buffer_begins_a_page_and_has_the_bytes_asked_for(nbytes: int) -> None:
    made = blank(nbytes)
    assert made.shape == (nbytes,)
    assert made.dtype == np.uint8
    assert made.flags.writeable
    assert made.ctypes.data % PAGE == 0
    made[0], made[-1] = 1, 2
    assert made[-1] == (2 if nbytes > 1 else made[0])


@pytest.mark.parametrize("nbytes", [LARGE, LARGE + 1, LARGE + HUGE_PAGE - 1])
def test_a_large_buffer_has_its_huge_pages_to_itself(nbytes: int) -> None:
    made, other = blank(nbytes), blank(nbytes)
    pages = {one.ctypes.data // HUGE_PAGE: one for one in (made, other)}
    assert made.ctypes.data % HUGE_PAGE == other.ctypes.data % HUGE_PAGE == 0
    (low, first), (high, _) = sorted(pages.items())
    assert low + -(-first.nbytes // HUGE_PAGE) <= high


class Taken:
    """Takes mappings back for `Buffers`, on whose thread it notes, and when it is let."""

    def __init__(self) -> None:
        self.go, self.done = threading.Event(), threading.Semaphore(0)
        self.threads: list[int] = []
        self.sizes: list[int] = []

    def __call__(self, mapping: Any) -> None:
        assert self.go.wait(30)
        self.threads.append(threading.get_ident())
        self.sizes.append(mapping.nbytes)
        mapping.pages.close()
        self.done.release()


def test_what_is_dropped_waits_with_its_pages_for_the_next() -> None:
    buffers = Buffers()
    made = buffers.take(LARGE)
    part, place = made[100:], made.ctypes.data
    made[:] = 7
    del made
    assert buffers.waiting == Waiting(0, 0)  # there is a view of it still
    del part
    assert buffers.waiting == Waiting(LARGE, 1)
    again = buffers.take(LARGE - 5)
    assert (again.ctypes.data, again.shape) == (place, (LARGE - 5,))
    assert np.all(again == 7)
    assert buffers.waiting == Waiting(0, 0)
    other = buffers.take(LARGE)
    assert other.ctypes.data != place


def test_a_much_larger_one_is_not_spent_on_a_small_one() -> None:
    buffers = Buffers()
    place = buffers.take(4 * LARGE).ctypes.data
    small = buffers.take(3 * LARGE)
    assert small.ctypes.data != place
    assert buffers.waiting == Waiting(4 * LARGE, 1)


@pytest.mark.parametrize(
    "limits", [{"keep_bytes": 2 * LARGE}, {"keep_count": 2}], ids=["bytes", "count"]
)
def test_who_drops_one_too_many_does_not_wait_for_the_system(limits: dict[str, int]) -> None:
    taken = Taken()
    buffers = Buffers(unmap=taken, **limits)
    sizes = [LARGE, LARGE - HUGE_PAGE // 2, LARGE - HUGE_PAGE]
    held = [buffers.take(size) for size in sizes]
    wanted = [-(-size // PAGE) * PAGE for size in sizes]
    while held:
        del held[0]  # the last of these returns although nothing is unmapped yet
    assert buffers.waiting == Waiting(sum(wanted[1:]), 2)
    assert not taken.sizes
    taken.go.set()
    assert taken.done.acquire(timeout=30)
    assert taken.sizes == wanted[:1]
    assert threading.get_ident() not in taken.threads


def test_one_thread_unmaps_all_that_is_too_much() -> None:
    taken = Taken()
    buffers = Buffers(keep_bytes=0, unmap=taken)
    for _ in range(5):
        buffers.take(MAPPED)
    taken.go.set()
    for _ in range(5):
        assert taken.done.acquire(timeout=30)
    assert len(set(taken.threads)) == 1
    assert buffers.waiting == Waiting(0, 0)


def test_one_that_dies_while_another_is_given_up_is_not_lost() -> None:
    # As when the collector runs in the midst of it: dropped by the thread that unmaps.
    done, held = threading.Semaphore(0), []

    def unmap(mapping: Any) -> None:
        mapping.pages.close()
        held.clear()
        done.release()

    buffers = Buffers(keep_bytes=0, unmap=unmap)
    held.append(buffers.take(MAPPED))
    buffers.take(MAPPED)
    for _ in range(2):
        assert done.acquire(timeout=30)
    assert buffers.waiting == Waiting(0, 0)


def test_many_threads_share_them() -> None:
    buffers = Buffers(keep_bytes=4 * MAPPED, keep_count=3)
    wrong: list[int] = []

    def work(mark: int) -> None:
        for turn in range(200):
            mine = buffers.take(MAPPED + PAGE * (turn % 3))
            mine[::PAGE] = mark
            if np.any(mine[::PAGE] != mark):
                wrong.append(turn)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert buffers.waiting.count <= 3


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(MemoryError, match="host memory"):
        blank(1 << 60)


def test_what_waits_makes_room_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a limit of address space: what is kept for later must not refuse anybody now."""
    buffers = Buffers()
    held = [buffers.take(size) for size in (LARGE, 2 * LARGE)]
    held.clear()
    made, refusals = buffers_module.mmap.mmap, []

    def short(handle: int, size: int, **flags: int) -> Any:
        if buffers.waiting.nbytes:
            refusals.append(size)
            raise OSError(errno.ENOMEM, "no memory")
        return made(handle, size, **flags)

    monkeypatch.setattr(buffers_module.mmap, "mmap", short)
    taken = buffers.take(4 * LARGE)
    assert taken.nbytes == 4 * LARGE and len(refusals) == 1
    assert buffers.waiting == Waiting(0, 0)
    del taken
    assert buffers.waiting == Waiting(4 * LARGE, 1)


def test_a_forked_child_unmaps_for_itself() -> None:
    """The thread that did so, and the one that had the lock, stay behind in the parent."""
    begun, go, done = threading.Event(), threading.Event(), threading.Semaphore(0)

    def unmap(mapping: Any) -> None:
        if not begun.is_set():  # the parent's thread, at it when the child is made
            begun.set()
            assert go.wait(30)
        mapping.pages.close()
        done.release()

    buffers = Buffers(keep_bytes=0, unmap=unmap)
    buffers.take(MAPPED)
    assert begun.wait(30) and buffers._lock.acquire(timeout=30)
    buffers.forked()
    assert not buffers._lock.locked()
    buffers.take(MAPPED)
    assert done.acquire(timeout=30)
    go.set()
    assert done.acquire(timeout=30)
