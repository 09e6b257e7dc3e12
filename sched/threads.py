"""Threads that work for tasks of one event loop, with one wake-up each way.

anyio's ``to_thread`` yields to the loop several times before a job begins, which an idle engine
feels. Owns the threads: daemons, started when a job finds none free, ended when they had nothing to
do for a while or at `close`. Invariant: at most ``limit`` jobs run at once; more wait in order.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from .wake import Bell, loop_poster

IDLE_S: Final = 10.0
"""Seconds after which a thread with nothing to do ends."""

Post = Callable[[Callable[[], None]], None]


class _Job:
    """Work somebody waits for; ``over`` is set on the loop's thread."""

    __slots__ = ("bell", "error", "over", "post", "result", "work")

    def __init__(self, work: Callable[[], Any], post: Post) -> None:
        self.work, self.post = work, post
        self.bell = Bell()
        self.over = False
        self.result: Any = None
        self.error: BaseException | None = None

    def arrive(self, result: Any, error: BaseException | None) -> None:
        self.result, self.error, self.over = result, error, True
        self.bell.ring()


class Threads:
    """See the module. Used by one event loop. ``first``: what each thread does before its first
    job; it raises nothing."""

    def __init__(
        self,
        limit: int,
        name: str,
        idle_s: float = IDLE_S,
        first: Callable[[], object] | None = None,
    ) -> None:
        self._limit, self._name, self._idle_s, self._first = limit, name, idle_s, first
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._count = self._idle = 0
        self._closed = False
        self._post: Post | None = None

    @property
    def count(self) -> int:
        """Threads there are."""
        return self._count

    async def run(self, work: Callable[[], Any]) -> Any:
        """Do ``work`` on a thread and give what it gives, or raise what it raises. Cancelled: the
        work goes on, unheard. Raises RuntimeError where there is no thread, and none to be had."""
        if self._post is None:
            self._post = loop_poster()
        job = _Job(work, self._post)
        with self._changed:
            self._jobs.append(job)
            if self._idle >= len(self._jobs):
                self._changed.notify()
            elif self._count < self._limit:
                try:
                    threading.Thread(target=self._serve, name=self._name, daemon=True).start()
                except RuntimeError:  # no more of them: those there are do it
                    if not self._count:
                        self._jobs.remove(job)
                        raise
                else:
                    self._count += 1
        while not job.over:
            await job.bell.wait()
        if job.error is not None:
            raise job.error
        return job.result

    def close(self) -> None:
        """Threads end when nothing is left to do."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _serve(self) -> None:
        if self._first is not None:
            self._first()
        while (job := self._next()) is not None:
            result, error = None, None
            try:
                result = job.work()
            except BaseException as raised:  # handed on to whoever gave the job
                error = raised
            job.post(partial(job.arrive, result, error))
            del job, result, error  # keep nothing alive while waiting

    def _next(self) -> _Job | None:
        """The next job, waited for; ``None`` ends the thread."""
        with self._changed:
            more = True
            while not self._jobs:
                if self._closed or not more:
                    self._count -= 1
                    return None
                self._idle += 1
                more = self._changed.wait(self._idle_s)
                self._idle -= 1
            return self._jobs.popleft()
