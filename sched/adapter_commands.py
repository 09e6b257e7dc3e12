"""The commands on adapters of an engine in this process, real or simulated.

Owns nothing: a command becomes an event of the core, and its source is held by the shell until the
core lets it go. Invariant: what can never be right is refused before the shell hears of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from ..gpu.lora.source import AdapterSource
from .arguments import adapter_source, check, deadline_in, known_source
from .core import Core
from .core import events as ev
from .face import AdapterReply, Source
from .shell import Pending, Shell

#: Makes the id of a source; the shell holds the source under it.
Hold = Callable[[AdapterSource], int]


class AdapterCommands:
    """Load, replace, promote, swap, unload and the others. Every one answers when it has taken
    effect, and raises RejectError, RequestError, CommandError, StagingError, CapacityError,
    DeviceError or EngineClosedError."""

    def _serving(self) -> tuple[Shell, Core]:
        """What serves now. Raises EngineClosedError."""
        raise NotImplementedError  # each engine has its own

    async def load(self, name: str, source: Source, *, pin: bool = False) -> AdapterReply:
        """Stage a new name and bring it into a slot. Refused if the name is taken."""
        given = adapter_source(source)
        return await self._command(lambda hold, i: ev.Load(i, name, hold(given), pin))

    async def register(self, name: str, source: Source) -> AdapterReply:
        """Make a name known; it is promoted by the first request that asks for it."""
        given = adapter_source(source)
        return await self._command(lambda hold, i: ev.Register(i, name, hold(given)))

    async def replace(self, name: str, source: Source) -> AdapterReply:
        """A new version of a known name; its running sequences finish on the old version."""
        given = adapter_source(source)
        return await self._command(lambda hold, i: ev.Replace(i, name, hold(given)))

    async def promote(self, name: str, source: Source | None = None) -> AdapterReply:
        """Make a name resident in a cache slot. ``source`` if the name is not known yet."""
        return await self._command(lambda hold, i: ev.Promote(i, name, _optional(hold, source)))

    async def swap(self, name: str, source: Source | None, slot: int) -> AdapterReply:
        """A new version of ``name`` into slot ``slot``, once that slot has no lease. ``source``
        ``None``: read again from where the known name came from."""
        if source is not None:
            given = adapter_source(source)
            return await self._command(lambda hold, i: ev.Swap(i, name, hold(given), slot))
        known = known_source(self._serving()[1], name)
        return await self._command(lambda _, i: ev.Swap(i, name, known, slot))

    async def rotate(self, name: str | None) -> AdapterReply:
        """Change the default adapter (``None``: base); sequences in flight are not touched."""
        return await self._command(lambda _, i: ev.Rotate(i, name))

    async def unload(
        self, name: str, *, deadline_s: float = 30.0, cancel_late: bool = False
    ) -> AdapterReply:
        """Forget a name: new requests are refused at once, running ones finish. After
        ``deadline_s`` seconds the answer is ``still-draining``, or, with ``cancel_late``, what
        still runs is ended and the answer is ``cancelled``."""
        deadline = deadline_in(deadline_s)
        return await self._command(lambda _, i: ev.Unload(i, name, deadline, cancel_late))

    async def resize(
        self,
        *,
        max_loras: int | None = None,
        max_lora_rank: int | None = None,
        deadline_s: float = 30.0,
    ) -> AdapterReply:
        """Another number of slots, or another highest rank (``None``: as it is), while it serves.

        Nothing new is admitted until what runs has ended and the pool is exchanged; then resident
        adapters are brought back, as many as there are slots, and who waited is served. Answers
        ``resized``. Refused, with everything as before: CapacityError ``resize-timeout`` if what
        runs has not ended after ``deadline_s`` seconds; CommandError ``pinned-do-not-fit``,
        ``resident-rank-too-large``, ``resident-annex-too-large`` or
        ``pinned-annexes-do-not-fit``; DeviceError ``pool-too-large`` if twice the new pool does not
        fit in the memory free beside the old one. ``pinned-not-back``, of its cause's class: the
        pool is another, but a pinned adapter could not be staged again.
        """
        deadline = deadline_in(deadline_s)
        slots, rank = self._serving()[1].pool_shape
        return await self._command(
            lambda _, i: ev.Resize(
                i,
                slots if max_loras is None else max_loras,
                rank if max_lora_rank is None else max_lora_rank,
                deadline,
            )
        )

    async def pin(self, name: str) -> AdapterReply:
        """The adapter's slot is no victim until :meth:`unpin`."""
        return await self._command(lambda _, i: ev.Pin(i, name, True))

    async def unpin(self, name: str) -> AdapterReply:
        """The adapter's slot may be a victim again once nothing runs on it."""
        return await self._command(lambda _, i: ev.Pin(i, name, False))

    async def prefetch(self, name: str, source: Source | None = None) -> AdapterReply:
        """Stage a name into the host image cache, so that its promotion is one copy."""
        return await self._command(lambda hold, i: ev.Prefetch(i, name, _optional(hold, source)))

    async def _command(self, make: Callable[[Hold, int], ev.Command]) -> AdapterReply:
        shell, _ = self._serving()
        begin = time.perf_counter()
        check(make(lambda _: 0, 0))  # before the shell holds the source
        pending: Pending = await shell.command(partial(make, shell.source_id))
        reply = pending.reply
        assert reply is not None
        return AdapterReply(
            reply.outcome,
            reply.name,
            reply.slot,
            reply.generation,
            reply.adapter_id,
            reply.evicted,
            pending.report,
            time.perf_counter() - begin,
        )


def _optional(hold: Hold, source: Source | None) -> int | None:
    return None if source is None else hold(adapter_source(source))
