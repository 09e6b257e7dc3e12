"""The device thread: one thread, one bounded queue, jobs in order.

Everything that touches device memory goes through here. A commit placed between two steps in the
queue *is* the barrier. Owns the thread and the executor it drives; decides nothing.

Where the executor can queue a step without waiting for it (:class:`Overlapping`), the thread holds
the last one until the queue says what comes behind it: another step is queued first, anything else
waits for it. Answers come in the order of the jobs, whatever fails.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol, runtime_checkable

from ..errors import InternalError, RotaError

_log = logging.getLogger("rota.sched.worker")


class OutputLike(Protocol):
    """What an executor answers for a row; ``token`` -1 if the row did not sample."""

    @property
    def seq(self) -> int: ...
    @property
    def token(self) -> int: ...
    @property
    def logprob(self) -> float | None: ...
    @property
    def top(self) -> Sequence[tuple[int, float]]: ...
    @property
    def error(self) -> RotaError | None: ...


#: Bytes of a new pool's arena, and of them what each resident will need.
Relaid = tuple[int, tuple[int, ...]]


class Executor(Protocol):
    """The hands: ``gpu.model.runner.Runner``, or a simulated one. Used by one thread only."""

    def open_sequence(self, seq: int, prompt: Sequence[int], sampling: Any) -> None: ...
    def step(self, rows: Sequence[Any]) -> Sequence[OutputLike]: ...
    def commit(self, slot: int, image: Any, extent: int | None = None) -> None: ...
    def retire(self, slot: int) -> None: ...
    def spill(self, seq: int, blocks: Sequence[int]) -> None: ...
    def restore(self, seq: int, places: Sequence[tuple[int, int]]) -> None: ...
    def relayout(self, max_loras: int, max_rank: int, residents: Sequence[Any]) -> Relaid: ...
    def close_sequence(self, seq: int) -> None: ...
    def drop_state(self, seq: int) -> None: ...
    def close(self) -> None: ...


class Flight(Protocol):
    """A step that is queued. ``finish`` waits for it, unless ``settled``, and answers or raises as
    ``step`` does."""

    @property
    def settled(self) -> bool: ...
    def finish(self) -> Sequence[OutputLike]: ...


@runtime_checkable
class Overlapping(Protocol):
    """An executor whose steps may be queued behind one that runs."""

    def begin(self, rows: Sequence[Any]) -> Flight: ...


class Begin(partial[Any]):
    """A job that queues a step and returns its :class:`Flight`."""


class Beside(partial[Any]):
    """A job that touches nothing a step in flight reads or writes, so that none is waited for."""


class JobQueue(Protocol):
    """Where device jobs go, in order: :class:`DeviceThread`, or a simulated one."""

    def put(self, job: Callable[[], Any], done: Done) -> None: ...


#: (result, None) or (None, error); called on the device thread.
Done = Callable[[Any, BaseException | None], None]


def ignore(_: Any, error: BaseException | None) -> None:
    """For jobs whose failure changes nothing any more (say, a retire on a dead device)."""
    if error is not None:
        _log.warning("a device job failed: %s", error)


IN_FLIGHT: Final = 2
"""Steps queued on the device at once: behind more, nothing is gained."""


class DeviceThread:
    """Runs jobs one after the other until told to stop.

    A :class:`Begin` is answered when its step is over: the thread waits for it once a second step
    is queued behind, or when any other job but a :class:`Beside` comes; see :class:`StepJobs`.

    ``limit`` bounds the queue; the shell never has more in flight than its own limits allow, so a
    full queue is a bug (InternalError ``device-queue-full``), not a wait.
    """

    def __init__(self, limit: int) -> None:
        self._queue: queue.Queue[tuple[Callable[[], Any], Done] | None] = queue.Queue(limit)
        self._flights: deque[tuple[Flight, Done]] = deque()
        self._thread = threading.Thread(target=self._run, name="rota-device", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, job: Callable[[], Any], done: Done) -> None:
        try:
            self._queue.put_nowait((job, done))
        except queue.Full:
            raise InternalError("the device queue is full", code="device-queue-full") from None

    def stop(self) -> None:
        """No more jobs; those queued still run."""
        self._queue.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end; false if it did not in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def depth(self) -> int:
        return self._queue.qsize()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            job, done = item
            if isinstance(job, Begin):
                self._begin(job, done)
            else:
                if not isinstance(job, Beside):
                    self._land(0)
                _answer(job, done)
            # Keep nothing alive while waiting: a job may hold an image or a whole runner.
            del item, job, done
        self._land(0)

    def _begin(self, job: Begin, done: Done) -> None:
        try:
            flight: Flight = job()
        except Exception as error:  # behind the answers of the steps before it
            self._land(0)
            done(None, error)
            return
        self._flights.append((flight, done))
        self._land(0 if flight.settled else IN_FLIGHT - 1)

    def _land(self, left: int) -> None:
        """Answer the oldest steps until at most ``left`` are in flight."""
        while len(self._flights) > left:
            flight, done = self._flights.popleft()
            _answer(flight.finish, done)


def _answer(job: Callable[[], Any], done: Done) -> None:
    try:
        result = job()
    except Exception as error:  # handed on: the shell ends what it concerns, by name
        done(None, error)
    else:
        done(result, None)


class StepJobs:
    """Puts an executor's steps in the queue, and says when the last one for now is there.

    Args:
        executor: if it is :class:`Overlapping`, its steps may be in flight.
        jobs: the queue.
    """

    def __init__(self, executor: Executor, jobs: JobQueue) -> None:
        self._jobs = jobs
        self._step = executor.step
        self._begin = executor.begin if isinstance(executor, Overlapping) else None
        self._begun = self._told = 0

    def put(self, rows: Sequence[Any], done: Done) -> None:
        """Queue a step."""
        if self._begin is None:
            self._jobs.put(partial(self._step, rows), done)
        else:
            self._begun += 1
            self._jobs.put(Begin(self._begin, rows), done)

    def planned(self, in_flight: int) -> None:
        """Planning is over, with so many steps unanswered. If it is one, none follows for now, and
        the thread need not hold it for another; of two, it answers the first anyway."""
        if in_flight == 1 and self._told != self._begun:
            self._told = self._begun
            self._jobs.put(_nothing, ignore)


def _nothing() -> None:
    pass
