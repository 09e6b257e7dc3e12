"""One live connection, at the frontend's end.

Owns the streams and calls under way on it. Invariants: each stream gets its events in order and
ends exactly once; each call is answered exactly once; when the connection is gone all of them end
with the error given to :meth:`Link.fail`. Decides nothing about reconnecting (:mod:`.client`).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.abc

from ...errors import EngineClosedError, RotaError, WireError
from ..failures import to_error
from ..streams import GenerationEvent
from ..wake import Bell
from . import wire
from .address import shut
from .limits import IpcLimits
from .session import ClientSession

_RECEIVE = 256 << 10
_GONE = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError)


def gone(why: str, retry_after_s: float | None = None) -> EngineClosedError:
    """The error that ends everything on a lost connection."""
    return EngineClosedError(why, code="engine-gone", retry_after_s=retry_after_s)


class RemoteGeneration:
    """One request as an async iterator, as :class:`~rota.sched.generation.Generation`: leaving the
    loop, dropping it or cancelling the reading task cancels the request.

    At most ``window`` events are held here; the engine's end keeps the rest until they are read.
    """

    def __init__(
        self,
        link: Link | None,
        ident: int,
        window: int,
        post: Callable[[Callable[[], None]], None],
        error: RotaError | None = None,
    ) -> None:
        self.id = ident
        self._link = link
        self._window = window
        self._post = post
        self._events: deque[GenerationEvent] = deque()
        self._read = 0
        self._error = error
        self._ended = error is not None
        self._bell = Bell()

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def buffered(self) -> int:
        """Events that have arrived and are not read yet."""
        return len(self._events)

    # called by the link -------------------------------------------------------------------------
    def push(self, event: GenerationEvent) -> None:
        self._events.append(event)
        self._bell.ring()

    def end(self, error: RotaError | None) -> None:
        self._ended = True
        self._error = error
        self._link = None
        self._bell.ring()

    # reading ------------------------------------------------------------------------------------
    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GenerationEvent:
        taken = await self.take(1)
        if not taken:
            raise StopAsyncIteration
        return taken[0]

    async def take(self, limit: int) -> list[GenerationEvent]:
        """The next events, one at least and ``limit`` at most; empty after the last."""
        try:
            while not self._events:
                if self._ended:
                    if self._error is not None:
                        error, self._error = self._error, None
                        raise error
                    return []
                await self._bell.wait()
        except BaseException:
            self.cancel()
            raise
        events = self._events
        if len(events) <= limit:
            taken = list(events)
            events.clear()
        else:
            taken = [events.popleft() for _ in range(limit)]
        self._read += len(taken)
        if self._link is not None and 2 * self._read >= self._window:
            self._link.send(wire.Credit(self.id, self._read))
            self._read = 0
        return taken

    def cancel(self) -> None:
        """End the request if it has not ended; its last event then says ``cancelled``, and events
        the engine had not sent yet are dropped."""
        if self._link is not None:
            self._link.send(wire.Cancel(self.id))

    async def aclose(self) -> None:
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        link = self._link
        if link is not None:
            self._post(partial(link.forget, self.id))


class PendingCall:
    """A call somebody waits for."""

    __slots__ = ("done", "error", "result")

    def __init__(self) -> None:
        self.done = anyio.Event()
        self.result: wire.Result | None = None
        self.error: RotaError | None = None


class Link:
    """See the module. ``on_stats`` is told every snapshot that arrives."""

    def __init__(
        self,
        stream: anyio.abc.ByteStream,
        schema: str,
        limits: IpcLimits,
        token: str | None,
        on_stats: Callable[[Any], None],
    ) -> None:
        self._stream = stream
        self._limits = limits
        self._session = ClientSession(schema, limits, token)
        self._on_stats = on_stats
        # Weak on purpose: a stream nobody holds must be collected, which cancels its request.
        self._streams: dict[int, weakref.ref[RemoteGeneration]] = {}
        self._calls: dict[int, PendingCall] = {}
        self._pings: dict[int, anyio.Event] = {}
        self._last = 0
        self._bell = Bell()
        self._drained = anyio.Event()
        self.error: RotaError | None = None
        self.welcome: wire.Welcome | None = None

    def new_id(self) -> int:
        self._last += 1
        return self._last

    @property
    def streams(self) -> int:
        """Requests under way."""
        return len(self._streams)

    async def open(self, timeout_s: float) -> wire.Welcome:
        """Shake hands.

        Raises:
            WireError: the ends do not match, or the token is wrong.
            EngineClosedError: ``engine-unreachable``.
            CapacityError: ``too-many-connections``.
        """
        try:
            with anyio.fail_after(timeout_s):
                await self._stream.send(self._session.data_to_send())
                while self.welcome is None:
                    self._session.receive_data(await self._stream.receive(_RECEIVE))
                    for message in self._session.events():
                        self._arrived(message)
        except (*_GONE, TimeoutError) as error:
            raise EngineClosedError(
                "the engine ended the connection", code="engine-unreachable", found=error
            ) from error
        return self.welcome

    async def run(self) -> None:
        """Carry messages until the connection is gone; then everything on it has ended."""
        error: RotaError = gone("the connection to the engine is lost")
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._shut_at_end)
                tasks.start_soon(self._write)
                error = await self._read()
                tasks.cancel_scope.cancel()
        finally:
            self.fail(error)
            await anyio.aclose_forcefully(self._stream)

    async def _read(self) -> RotaError:
        """Read to the end, and say why it ended. Ends by :func:`shut`, not by cancellation."""
        error = gone("the connection to the engine is lost")
        with anyio.CancelScope(shield=True):
            try:
                while True:
                    self._session.receive_data(await self._stream.receive(_RECEIVE))
                    for message in self._session.events():
                        self._arrived(message)
            except _GONE:
                pass
            except RotaError as why:
                error = gone(f"the engine ended the connection: {why}")
        return error

    async def _shut_at_end(self) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            shut(self._stream)

    async def _write(self) -> None:
        frames = self._session.frames
        while True:
            while not frames.pending:
                await self._bell.wait()
            data = frames.data_to_send()
            with anyio.CancelScope(shield=True):
                try:
                    await self._stream.send(data)
                except _GONE:
                    shut(self._stream)
                    return
            self._drained.set()

    def fail(self, error: RotaError) -> None:
        """End everything with ``error``, once."""
        if self.error is not None:
            return
        self.error = error
        self._session.close()
        streams, self._streams = self._streams, {}
        for weak in streams.values():
            if (generation := weak()) is not None:
                generation.end(error)
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.error = error
            call.done.set()
        for event in self._pings.values():
            event.set()
        self._drained.set()

    # messages out -------------------------------------------------------------------------------
    def send(self, message: Any) -> None:
        """Queue a message; dropped if the link is gone. Raises WireError ``frame-too-large``."""
        if self.error is None:
            self._session.send(message)
            self._bell.ring()

    def generate(self, generation: RemoteGeneration, message: wire.Generate) -> None:
        """Start a request whose events go to ``generation``."""
        self.send(message)
        self._streams[message.request] = weakref.ref(generation)

    def forget(self, ident: int) -> None:
        """The stream's reader is gone."""
        if self._streams.pop(ident, None) is not None:
            self.send(wire.Cancel(ident))

    async def call(self, verb: wire.Verb) -> wire.Result:
        """Ask and wait. Raises what the engine answers, or ``engine-gone``."""
        if self.error is not None:
            raise self.error
        ident = self.new_id()
        pending = PendingCall()
        self.send(wire.Call(ident, verb))
        self._calls[ident] = pending
        try:
            await pending.done.wait()
        finally:
            if self._calls.pop(ident, None) is not None:
                self.send(wire.CancelCall(ident))
        if pending.error is not None:
            raise pending.error
        assert pending.result is not None
        if pending.result.failure is not None:
            raise to_error(pending.result.failure)
        return pending.result

    async def ping(self) -> None:
        """A round trip. Raises ``engine-gone``."""
        number = self.new_id()
        event = self._pings[number] = anyio.Event()
        try:
            self.send(wire.Ping(number))
            if self.error is None:
                await event.wait()
        finally:
            del self._pings[number]
        if self.error is not None:
            raise self.error

    async def upload(self, tensors: memoryview, config: bytes) -> wire.Uploaded:
        """Send an adapter's bytes in chunks, at the pace of the connection.

        Raises:
            EngineClosedError: ``engine-gone``.
        """
        assert self.welcome is not None
        ident, size = self.new_id(), self.welcome.chunk
        self.send(wire.Upload(ident, len(tensors), config))
        try:
            for begin in range(0, len(tensors), size):
                while self._session.frames.pending > self._limits.high_water:
                    if self._drained.is_set():
                        self._drained = anyio.Event()
                    await self._drained.wait()
                    if self.error is not None:
                        raise self.error
                self.send(wire.Chunk(ident, bytes(tensors[begin : begin + size])))
        except BaseException:
            self.send(wire.DropUpload(ident))
            raise
        if self.error is not None:
            raise self.error
        return wire.Uploaded(ident)

    # messages in --------------------------------------------------------------------------------
    def _tokens(self, requests: tuple[int, ...], events: tuple[GenerationEvent, ...]) -> None:
        if len(requests) != len(events):
            raise WireError("events and requests do not match", code="wire-malformed")
        streams = self._streams
        for request, event in zip(requests, events, strict=True):
            weak = streams.get(request)
            if weak is not None and (generation := weak()) is not None:
                generation.push(event)

    def _arrived(self, message: Any) -> None:
        match message:
            case wire.Tokens(requests, events):
                self._tokens(requests, events)
            case wire.Ended(request, failure):
                weak = self._streams.pop(request, None)
                if weak is not None and (generation := weak()) is not None:
                    generation.end(None if failure is None else to_error(failure))
            case wire.Result():
                if message.stats is not None:
                    self._on_stats(message.stats)
                call = self._calls.pop(message.call, None)
                if call is not None:
                    call.result = message
                    call.done.set()
            case wire.Pong(number):
                if (event := self._pings.get(number)) is not None:
                    event.set()
            case wire.Ping(number):
                self.send(wire.Pong(number))
            case wire.Welcome():
                self.welcome = message
                self._on_stats(message.stats)
            case wire.Refused(failure):
                raise to_error(failure)
            case _:
                raise WireError("a message out of place", code="wire-order")
