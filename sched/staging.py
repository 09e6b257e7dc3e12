"""Staging workers: sources in, slot images out, off the loop and off the device thread.

Owns the host slot images (by image id) and the signatures that let an unchanged source skip the
read: of a directory the stamps of its files, of a peer's adapter its digest. Which image to
keep is the core's decision; this file only holds and forgets.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import anyio
import msgspec

from ..errors import RotaError, StagingError
from ..gpu.host_threads import LONG_S, ask_for_slices
from ..rdma.stamps import Row, stamps_of
from .prompt import prompt_switching
from .threads import Threads

#: What an unchanged source still looks like: files' stamps of a directory, else a digest.
Signature = tuple[Row, ...] | str


class Staged(Protocol):
    """What a stage function returns (``gpu.lora.stage.StagedAdapter``)."""

    @property
    def image(self) -> Any: ...
    @property
    def report(self) -> Any: ...
    @property
    def digest(self) -> str: ...


#: Digest -> what was staged from the same place with that content, while its image is held.
Held = Callable[[str], Any]

#: ``(source, cancelled, held) -> staged``; runs on a worker thread. A source that learns its digest
#: before its bytes (a peer's) may answer with what ``held`` gives; ``None``: nothing is held.
StageFunction = Callable[[Any, Callable[[], bool], Held | None], Staged]


class StageOutcome(msgspec.Struct, frozen=True):
    """``cached``: the id of an image that already holds this content, or -1. ``place``: where it
    was read from, in the terms in which ``signature`` may be looked up again."""

    staged: Any
    cached: int
    signature: Signature | None
    place: Hashable


class StageRunner(Protocol):
    """What the shell needs of staging: :class:`Stager`, or a simulated one."""

    @property
    def images(self) -> Mapping[int, Staged]: ...
    async def run(self, stage: int, source: Any) -> StageOutcome: ...
    def cancel(self, stage: int) -> None: ...
    def cancel_all(self) -> None: ...
    def abandon_all(self) -> None: ...
    def keep(self, image: int, outcome: StageOutcome) -> None: ...
    def drop(self, image: int) -> None: ...
    def drop_all(self) -> None: ...


def source_key(source: Any) -> Hashable:
    """Two sources with equal keys are the same place. Bytes are a place of their own. Asks no disk,
    which might not answer: links are followed when staging does."""
    path = getattr(source, "path", None)
    if path is not None:
        return ("dir", os.path.abspath(path))
    place: Hashable | None = getattr(source, "place", None)
    return ("object", id(source)) if place is None else place


def staging_threads(workers: int) -> Threads:
    """They compute and copy for many milliseconds; the loop wants a core for a moment."""
    return Threads(workers, "rota-staging", first=partial(ask_for_slices, LONG_S))


class Stager:
    """``workers`` threads stage at once; more wait. Called on the loop's thread."""

    def __init__(self, stage: StageFunction, *, workers: int, clock_ns: Callable[[], int]) -> None:
        self._stage = stage
        self._threads = staging_threads(workers)
        self._clock_ns = clock_ns
        self.images: dict[int, Staged] = {}
        self._by_signature: dict[tuple[Hashable, Signature], int] = {}
        self._cancelled: dict[int, threading.Event] = {}
        self._scopes: dict[int, anyio.CancelScope] = {}
        self._prompt = ExitStack()

    async def run(self, stage: int, source: Any) -> StageOutcome:
        """Stage ``source``. Raises RejectError (the adapter's fault) or StagingError."""
        if not self._cancelled:
            self._prompt.enter_context(prompt_switching())
        flag = self._cancelled[stage] = threading.Event()
        try:
            # The thread cannot be stopped from outside; its flag can. Shielded, so that its image
            # is never orphaned between the thread's end and ours; only abandon_all ends the wait.
            with anyio.CancelScope(shield=True) as scope:
                self._scopes[stage] = scope
                outcome: StageOutcome = await self._threads.run(partial(self._work, source, flag))
                return outcome
        finally:
            del self._cancelled[stage], self._scopes[stage]
            if not self._cancelled:
                self._prompt.close()
        raise StagingError("staging did not end; its thread is left behind", code="stage-abandoned")

    def cancel(self, stage: int) -> None:
        flag = self._cancelled.get(stage)
        if flag is not None:
            flag.set()

    def cancel_all(self) -> None:
        for flag in self._cancelled.values():
            flag.set()

    def abandon_all(self) -> None:
        """Wait for no stage any more (a dead disk or peer must not hold up the end). Threads still
        at work end by themselves, unheard; they touch nothing but their own memory."""
        self.cancel_all()
        for scope in list(self._scopes.values()):
            scope.cancel()

    def close(self) -> None:
        """Nothing will be staged any more; threads end with their work."""
        self._threads.close()

    def keep(self, image: int, outcome: StageOutcome) -> None:
        """Hold a staged image under its id, and remember what it was read from."""
        self.images[image] = outcome.staged
        if outcome.signature is not None:
            self._by_signature[(outcome.place, outcome.signature)] = image

    def drop(self, image: int) -> None:
        del self.images[image]
        for key in [k for k, v in self._by_signature.items() if v == image]:
            del self._by_signature[key]

    def drop_all(self) -> None:
        self.images.clear()
        self._by_signature.clear()

    def _work(self, source: Any, flag: threading.Event) -> StageOutcome:
        if flag.is_set():
            raise StagingError("cancelled before it began", code="stage-cancelled")
        key, path = source_key(source), getattr(source, "path", None)
        before = None
        if path is not None:
            key = ("dir", os.path.realpath(path))
            before = stamps_of(Path(path), self._clock_ns())
        if before is not None:
            found = self._find(key, before)
            if found is not None:
                return StageOutcome(found[1], found[0], before, key)

        def held(digest: str) -> Staged | None:
            found = self._find(key, digest)
            return None if found is None else found[1]

        staged = self._stage_or_raise(source, flag, held if self._holds(key) else None)
        if path is not None:
            after = None
            if before is not None:
                after = stamps_of(Path(path), self._clock_ns())
            return StageOutcome(staged, -1, after if after == before else None, key)
        if getattr(source, "place", None) is None:
            return StageOutcome(staged, -1, None, key)
        found = self._find(key, staged.digest)
        again = found is not None and found[1] is staged
        return StageOutcome(staged, found[0] if found and again else -1, staged.digest, key)

    def _holds(self, key: Hashable) -> bool:
        """Something of that place may be held. (The loop's thread changes the mapping meanwhile;
        listing its keys is one step.)"""
        return any(place == key for place, _ in list(self._by_signature))

    def _find(self, key: Hashable, signature: Signature) -> tuple[int, Staged] | None:
        """The image held of a place that looked so, and its id."""
        image = self._by_signature.get((key, signature), -1)
        staged = self.images.get(image)
        return None if staged is None else (image, staged)

    def _stage_or_raise(self, source: Any, flag: threading.Event, held: Held | None) -> Staged:
        try:
            return self._stage(source, flag.is_set, held)
        except RotaError:
            raise
        except OSError as error:
            raise StagingError(
                f"reading the adapter failed: {error.strerror}",
                code="stage-io",
                subject=str(error.filename) if error.filename else None,
                found=error.__class__.__name__,
            ) from error
        except MemoryError as error:
            raise StagingError("no host memory for the slot image", code="stage-memory") from error
