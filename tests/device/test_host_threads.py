"""Slices: asked for by a thread for itself, inherited or not, and never an error."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from rota.gpu.host_threads import LONG_S, SHORT_S, ask_for_slices

from ..slices import no_better_than_others, slice_s, usual_s

_T = TypeVar("_T")
LIBRARY = ctypes.CDLL(None)


def elsewhere(work: Callable[[], _T]) -> _T:
    """On a new thread, which ends."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def nice() -> int:
    """Of the calling thread."""
    return os.getpriority(os.PRIO_PROCESS, 0)


@pytest.mark.parametrize("seconds", [SHORT_S, LONG_S])
@pytest.mark.parametrize("inherited", [True, False])
def test_a_thread_asks_for_itself(seconds: float, inherited: bool) -> None:
    usual = usual_s()

    def work() -> tuple[bool, float, float]:
        no_better_than_others()
        return ask_for_slices(seconds, inherited=inherited), slice_s(), elsewhere(slice_s)

    assert elsewhere(work) == (True, seconds, seconds if inherited else usual)
    assert slice_s() == usual


def test_an_urgent_threads_own_threads_stay_urgent() -> None:
    """They would get their slices back, and lose its nice value with them."""
    usual_s()

    def work() -> tuple[bool, int, int]:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, -3)
        except PermissionError:
            pytest.skip("the system gives this user no nice value below 0")
        took = ask_for_slices(SHORT_S, inherited=False)
        return took, nice(), elsewhere(nice)

    assert elsewhere(work) == (True, -3, -3)


def test_the_rest_stays_as_it_was() -> None:
    usual_s()

    wanted = min(nice() + 7, 19)

    def work() -> tuple[bool, int, int]:
        os.setpriority(os.PRIO_PROCESS, 0, wanted)  # of this thread
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        return ask_for_slices(LONG_S), nice(), os.sched_getscheduler(0)

    assert elsewhere(work) == (True, wanted, os.SCHED_BATCH)


def test_other_policies_are_left_alone() -> None:
    usual_s()

    def work() -> tuple[bool, int]:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        return ask_for_slices(LONG_S), os.sched_getscheduler(0)

    assert elsewhere(work) == (False, os.SCHED_IDLE)


class Refusing:
    """A C library where a filter refuses calls from the n-th on."""

    def __init__(self, works: int) -> None:
        self._works = works

    def syscall(self, *args: object) -> int:
        self._works -= 1
        return -1 if self._works < 0 else int(LIBRARY.syscall(*args))


def missing(name: None) -> object:
    """A C library that is linked in."""
    raise OSError("no such library")


@pytest.mark.parametrize("library", [missing, lambda name: object()])
def test_a_c_library_without_the_call_says_no(
    monkeypatch: pytest.MonkeyPatch, library: Callable[[None], object]
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", library)
    assert not ask_for_slices(LONG_S)


def test_a_system_without_them_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = usual_s()
    for works in (0, 1):
        with monkeypatch.context() as patch:
            patch.setattr(ctypes, "CDLL", lambda name, works=works: Refusing(works))
            assert not elsewhere(lambda: ask_for_slices(LONG_S))
    for module, name, value in (
        (platform, "machine", lambda: "z80"),
        (sys, "platform", "darwin"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            assert not elsewhere(lambda: ask_for_slices(LONG_S))
    assert slice_s() == usual
