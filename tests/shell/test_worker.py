"""The device thread with steps in flight: who waits for whom, and the order of the answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from rota.errors import DeviceError
from rota.sched.worker import Begin, Beside, DeviceThread, StepJobs


class Steps:
    """Queues steps that are over when somebody waits for them; writes down what happens."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.settled: set[int] = set()
        self.failing: set[str] = set()

    def say(self, what: str) -> str:
        self.log.append(what)
        if what in self.failing:
            raise DeviceError(what, code="injected")
        return what

    def begin(self, rows: Sequence[int]) -> Flight:
        self.say(f"begin {rows[0]}")
        return Flight(self, rows[0])

    def step(self, rows: Sequence[int]) -> Any:
        return self.say(f"step {rows[0]}")

    def done(self, result: Any, error: BaseException | None) -> None:
        self.log.append(f"done {result}" if error is None else f"failed {error}")


class Flight:
    def __init__(self, steps: Steps, number: int) -> None:
        self.steps, self.number = steps, number

    @property
    def settled(self) -> bool:
        return self.number in self.steps.settled

    def finish(self) -> Any:
        return self.steps.say(f"{self.number}")


Job = Callable[[Steps], Callable[[], Any]]


def step(number: int) -> Job:
    return lambda steps: Begin(steps.begin, [number])


def beside(what: str) -> Job:
    return lambda steps: Beside(steps.say, what)


def job(what: str) -> Job:
    return lambda steps: partial(steps.say, what)


def run(steps: Steps, *jobs: Job) -> list[str]:
    thread = DeviceThread(limit=16)
    for make in jobs:
        thread.put(make(steps), steps.done)
    thread.stop()
    thread.start()
    assert thread.join(30)
    return steps.log


def test_a_step_is_waited_for_once_the_next_is_queued() -> None:
    assert run(Steps(), step(1), step(2), step(3)) == [
        *("begin 1", "begin 2", "1", "done 1", "begin 3", "2", "done 2", "3", "done 3"),
    ]


def test_whatever_needs_a_barrier_finds_no_step_in_flight_and_the_rest_does_not_wait() -> None:
    jobs = step(1), beside("open"), step(2), beside("close"), job("commit"), step(3)
    assert run(Steps(), *jobs) == [
        *("begin 1", "open", "done open", "begin 2", "1", "done 1", "close", "done close"),
        *("2", "done 2", "commit", "done commit", "begin 3", "3", "done 3"),
    ]


def test_a_settled_step_is_answered_at_once_behind_those_before_it() -> None:
    steps = Steps()
    steps.settled = {2, 3}
    assert run(steps, step(1), step(2), beside("x"), step(3), beside("y")) == [
        *("begin 1", "begin 2", "1", "done 1", "2", "done 2", "x", "done x"),
        *("begin 3", "3", "done 3", "y", "done y"),
    ]


@pytest.mark.parametrize(
    ("failing", "told"),
    [
        ("begin 2", ["begin 1", "begin 2", "1", "done 1", "failed", "begin 3", "3", "done 3"]),
        (
            "1",
            ["begin 1", "begin 2", "1", "failed", "begin 3", "2", "done 2", "3", "done 3"],
        ),
        (
            "2",
            ["begin 1", "begin 2", "1", "done 1", "begin 3", "2", "failed", "3", "done 3"],
        ),
    ],
)
def test_failures_are_told_in_order(failing: str, told: list[str]) -> None:
    steps = Steps()
    steps.failing = {failing}
    log = run(steps, step(1), step(2), step(3))
    assert [line.split(" [")[0] for line in log] == told


class Puts:
    def __init__(self) -> None:
        self.jobs: list[Callable[[], Any]] = []

    def put(self, job: Callable[[], Any], done: Any) -> None:
        self.jobs.append(job)


def test_the_thread_is_told_once_of_a_step_that_no_other_follows() -> None:
    steps, puts = Steps(), Puts()
    # Only steps of it are asked for.
    executor: Any = steps
    jobs = StepJobs(executor, puts)
    jobs.planned(0)
    jobs.put([1], steps.done)
    jobs.put([2], steps.done)
    jobs.planned(2)
    assert [type(job) for job in puts.jobs] == [Begin, Begin]
    jobs.planned(1)
    jobs.planned(1)
    assert len(puts.jobs) == 3 and not isinstance(puts.jobs[2], (Begin, Beside))
    jobs.put([3], steps.done)
    jobs.planned(2)
    jobs.planned(1)
    assert len(puts.jobs) == 5
    told = puts.jobs[2]
    assert run(steps, step(1), lambda _: told, beside("x")) == [
        *("begin 1", "1", "done 1", "done None", "x", "done x"),
    ]


def test_an_executor_that_waits_for_its_steps_is_told_nothing() -> None:
    class Waits:
        step = Steps().step

    puts = Puts()
    executor: Any = Waits()
    jobs = StepJobs(executor, puts)
    jobs.put([1], Steps().done)
    jobs.planned(1)
    assert [type(job) for job in puts.jobs] == [partial]
