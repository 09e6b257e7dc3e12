"""The samples of one generation as choices of their own, each read by a task of its own.

Owns the events that one reader has found for another. Invariant: one task at a time reads the
generation; each event goes to the choice of its sample, in order.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import anyio

from ..face import GenerationLike
from ..streams import GenerationEvent


class Sample(Protocol):
    """One choice: reads its own events; ending it ends the generation."""

    async def take(self, limit: int) -> list[GenerationEvent]: ...
    def cancel(self) -> None: ...


def samples_of(generation: GenerationLike, n: int) -> list[Sample]:
    """The ``n`` samples of ``generation``; the only one of one is the generation itself."""
    if n == 1:
        return [generation]
    samples = Samples(generation, n)
    return [_Sample(samples, index) for index in range(n)]


class Samples:
    """Shares out ``generation``, which has ``n`` samples."""

    def __init__(self, generation: GenerationLike, n: int) -> None:
        self.generation = generation
        self._queues: list[deque[GenerationEvent]] = [deque() for _ in range(n)]
        self._over = [False] * n
        self._reading = anyio.Lock(fast_acquire=True)

    async def take(self, index: int, limit: int) -> list[GenerationEvent]:
        """Events of one sample, at least one; empty after its last. Raises what ended another."""
        queue = self._queues[index]
        while not queue and not self._over[index]:
            async with self._reading:
                if queue or self._over[index]:
                    break
                events = await self.generation.take(limit)
                for event in events:
                    self._queues[event.sample].append(event)
                    if event.finish_reason is not None:
                        self._over[event.sample] = True
                if not events:
                    self._over = [True] * len(self._over)
        return [queue.popleft() for _ in range(min(limit, len(queue)))]


class _Sample:
    def __init__(self, samples: Samples, index: int) -> None:
        self._samples = samples
        self._index = index

    async def take(self, limit: int) -> list[GenerationEvent]:
        return await self._samples.take(self._index, limit)

    def cancel(self) -> None:
        self._samples.generation.cancel()
