"""The device thread: one thread, one bounded queue, jobs in order.

Everything that touches device memory goes through here. A commit placed between two steps in the
queue *is* the barrier. Owns the thread and the executor it drives; decides nothing.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..errors import DeviceError, InternalError, RotaError

_log = logging.getLogger("rota.sched.worker")


class RowLike(Protocol):
    """What an executor reads of a row (see ``core.effects.Row``)."""

    @property
    def seq(self) -> int: ...
    @property
    def slot(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def blocks(self) -> Sequence[int]: ...
    @property
    def sample(self) -> bool: ...
    @property
    def load(self) -> int: ...
    @property
    def save(self) -> int: ...


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


class Executor(Protocol):
    """The hands: ``gpu.model.runner.Runner``, or a simulated one. Used by one thread only."""

    def open_sequence(self, seq: int, prompt: Sequence[int], sampling: Any) -> None: ...
    def step(self, rows: Sequence[Any]) -> Sequence[OutputLike]: ...
    def commit(self, slot: int, image: Any) -> None: ...
    def retire(self, slot: int) -> None: ...
    def spill(self, seq: int, blocks: Sequence[int]) -> None: ...
    def restore(self, seq: int, places: Sequence[tuple[int, int]]) -> None: ...
    def relayout(self, max_loras: int, max_rank: int) -> None: ...
    def close_sequence(self, seq: int) -> None: ...
    def drop_state(self, seq: int) -> None: ...
    def close(self) -> None: ...


class JobQueue(Protocol):
    """Where device jobs go, in order: :class:`DeviceThread`, or a simulated one."""

    def put(self, job: Callable[[], Any], done: Done) -> None: ...


#: (result, None) or (None, error); called on the device thread.
Done = Callable[[Any, BaseException | None], None]


def ignore(_: Any, error: BaseException | None) -> None:
    """For jobs whose failure changes nothing any more (say, a retire on a dead device)."""
    if error is not None:
        _log.warning("a device job failed: %s", error)


class DeviceThread:
    """Runs jobs one after the other until told to stop.

    ``limit`` bounds the queue; the shell never has more in flight than its own limits allow, so a
    full queue is a bug (InternalError ``device-queue-full``), not a wait.
    """

    def __init__(self, limit: int) -> None:
        self._queue: queue.Queue[tuple[Callable[[], Any], Done] | None] = queue.Queue(limit)
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
            try:
                result = job()
            except Exception as error:  # handed on: the shell ends what it concerns, by name
                done(None, error)
            else:
                done(result, None)
            # Keep nothing alive while waiting: a job may hold an image or a whole runner.
            del item, job, done


def as_rota_error(error: BaseException) -> RotaError:
    """Any failure of a device job as an error with a code."""
    if isinstance(error, RotaError):
        return error
    return DeviceError(f"{type(error).__name__}: {error}", code="device-failed")


def is_fatal(error: BaseException) -> bool:
    """Whether the device is dead for good (CUDA's sticky errors say so in their code)."""
    return isinstance(error, DeviceError) and error.code in ("device-dead", "device-closed")
