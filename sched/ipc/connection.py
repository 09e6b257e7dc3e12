"""One frontend's connection, at the engine's end.

Owns the tasks of one connection: a reader, a writer that collects what all its requests have ready
(:mod:`.outflow`), and one task for each call. Invariants: the output buffer is bounded (above
``high_water`` nothing is collected and nothing is read that might ask for an answer; credits bound
each request), so a slow frontend slows its own requests only; when the connection ends, however it
ends, every request of it is cancelled.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import anyio
import anyio.abc

from ... import __version__
from ...errors import CapacityError, RotaError, WireError
from ..face import DEFAULT
from ..failures import to_failure
from . import wire
from .address import sender_at_once, shut
from .limits import IpcLimits
from .outflow import Outflow, Request
from .session import ServerSession
from .verbs import Sources, Uploads, answer, in_thread

_log = logging.getLogger("rota.sched.ipc")
_RECEIVE = 256 << 10
_LONG_PROMPT = 4096
_LAST_WORDS_S = 1.0
_GONE = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError)


def card_of(info: Any) -> wire.ModelCard:
    """What the engine says about its model, for the wire."""
    return wire.ModelCard(
        family=str(getattr(info, "family", "")),
        dtype=str(getattr(info, "dtype", "")),
        vocab_size=int(info.vocab_size),
        context_length=int(info.context_length),
        block_size=int(info.block_size),
        num_blocks=int(info.num_blocks),
        eos_ids=tuple(sorted(info.eos_ids)),
        attention=str(getattr(info, "attention", "")),
    )


class Connection:
    """Serve one byte stream until it ends; see the module."""

    def __init__(
        self,
        engine: Any,
        stream: anyio.abc.ByteStream,
        *,
        schema: str,
        token: str | None,
        limits: IpcLimits,
        sources: Sources,
    ) -> None:
        self._engine = engine
        self._stream = stream
        self._limits = limits
        self._sources = sources
        self._session = ServerSession(schema, limits, token)
        frames = self._session.frames
        self._outflow = Outflow(
            self._session.send, lambda: frames.pending, limits.high_water, limits.max_credit
        )
        self._calls: dict[int, anyio.CancelScope] = {}
        self._uploads = Uploads(limits.max_uploads, limits.max_upload_bytes)
        self._tasks: anyio.abc.TaskGroup | None = None
        self._drained = anyio.Event()
        self._sending = False
        self._cut = False

    async def run(self) -> None:
        """Serve. Never raises for a fault of the frontend; closes the stream."""
        try:
            if await self._welcome():
                async with anyio.create_task_group() as self._tasks:
                    self._tasks.start_soon(self._shut_at_end)
                    self._tasks.start_soon(self._write)
                    await self._read()
                    self._tasks.cancel_scope.cancel()
            else:
                await self._last_words()
        finally:
            self._session.close()
            self._outflow.close()
            await anyio.aclose_forcefully(self._stream)

    async def _welcome(self) -> bool:
        with anyio.move_on_after(self._limits.hello_timeout_s):
            try:
                while not self._session.ready:
                    self._session.receive_data(await self._stream.receive(_RECEIVE))
                    for message in self._session.events():
                        if isinstance(message, wire.Hello):
                            self._send_welcome()
                        else:
                            raise WireError("a message before the Welcome", code="wire-order")
            except WireError as error:
                _log.warning("a frontend was refused: %s", error)
            except RotaError as error:
                self._session.send(wire.Refused(to_failure(error)))
            except _GONE:
                pass
            else:
                return True
        return False

    def _send_welcome(self) -> None:
        self._session.send(
            wire.Welcome(
                wire.VERSION,
                __version__,
                card_of(self._engine.info),
                self._engine.stats(),
                self._limits.chunk,
                self._limits.max_credit,
            )
        )

    async def _last_words(self) -> None:
        """Why a frontend was refused, before it is cut off."""
        data = self._session.data_to_send()
        with anyio.move_on_after(_LAST_WORDS_S):
            try:
                await self._stream.send(data)
            except _GONE:
                pass

    # reading and writing ------------------------------------------------------------------------
    async def _read(self) -> None:
        """Read to the end. Ends by :func:`shut`, not by cancellation."""
        with anyio.CancelScope(shield=True):
            try:
                while True:
                    self._session.receive_data(await self._stream.receive(_RECEIVE))
                    for message in self._session.events():
                        self._dispatch(message)
                    await self._room()
            except WireError as error:
                _log.warning("a frontend breaks the protocol: %s", error)
                self._send(wire.Refused(to_failure(error)))
            except _GONE:
                return
        with anyio.move_on_after(_LAST_WORDS_S):
            while self._session.frames.pending or self._sending:
                self._drained = anyio.Event()
                await self._drained.wait()

    async def _room(self) -> None:
        """Wait while so much is to be sent that more would be held for a frontend that does not
        read: whoever asks and never reads (pings, refusals) waits for itself."""
        while self._session.frames.pending > self._limits.high_water and not self._cut:
            self._drained = anyio.Event()
            await self._drained.wait()

    async def _shut_at_end(self) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            self._cut_off()

    def _cut_off(self) -> None:
        """Nothing goes out or comes in any more; whoever waits for either sees the end."""
        self._cut = True
        shut(self._stream)
        self._drained.set()

    async def _write(self) -> None:
        frames, send_at_once = self._session.frames, sender_at_once(self._stream)
        while True:
            self._outflow.collect()
            if not frames.pending:
                await self._outflow.bell.wait()
                continue
            data = frames.data_to_send()
            if (sent := send_at_once(data)) == len(data):
                self._drained.set()
                continue
            data = data[sent:]
            self._sending = True
            self._drained.set()
            with anyio.move_on_after(self._limits.send_timeout_s, shield=True) as scope:
                try:
                    await self._stream.send(data)
                except _GONE:
                    scope.cancel()
            self._sending = False
            self._drained.set()
            if scope.cancel_called:
                self._cut_off()
                return

    def _send(self, message: Any) -> None:
        self._session.send(message)
        self._outflow.bell.ring()

    def _dispatch(self, message: Any) -> None:
        assert self._tasks is not None
        match message:
            case wire.Generate():
                self._generate(message)
            case wire.Credit(request, events):
                self._outflow.credit(request, events)
            case wire.Cancel(request):
                self._outflow.cancel(request)
            case wire.Call(call, verb):
                self._call(call, verb)
            case wire.CancelCall(call):
                if (scope := self._calls.get(call)) is not None:
                    scope.cancel()
            case wire.Upload():
                self._refuse_upload(self._uploads.begin(message))
            case wire.Chunk():
                self._refuse_upload(self._uploads.chunk(message))
            case wire.DropUpload(upload):
                self._uploads.drop(upload)
            case wire.Ping(number):
                self._send(wire.Pong(number))
            case _:
                pass  # a Pong

    def _refuse_upload(self, why: str | None) -> None:
        if why is not None:
            raise WireError(f"upload refused: {why}", code="bad-upload")

    # requests -----------------------------------------------------------------------------------
    def _generate(self, message: wire.Generate) -> None:
        assert self._tasks is not None
        if len(self._outflow) >= self._limits.max_requests:
            full = CapacityError(
                "too many requests of one connection",
                code="QUEUE_FULL",
                expected=f"at most {self._limits.max_requests}",
                retry_after_s=0.1,
            )
            self._send(wire.Ended(message.request, to_failure(full)))
            return
        request = self._outflow.add(message.request, message.credit)
        if isinstance(message.prompt, str) and len(message.prompt) > _LONG_PROMPT:
            self._tasks.start_soon(self._encode, message.prompt, message, request)
        else:
            self._start(message.prompt, message, request)

    async def _encode(self, text: str, message: wire.Generate, request: Request) -> None:
        """Tokenize a long prompt off the loop, then begin."""
        try:
            ids = await in_thread(self._engine.tokenizer.encode, text)
        except RotaError as error:
            self._outflow.end(request, error)
        else:
            self._start(ids, message, request)

    def _start(self, prompt: str | Sequence[int], message: wire.Generate, request: Request) -> None:
        if request.cancelled:
            self._outflow.end(request, None)
            return
        try:
            generation = self._engine.generate(
                prompt,
                DEFAULT if message.use_default else message.adapter,
                message.sampling,
                priority=message.priority,
                deadline_s=message.deadline_s,
            )
        except Exception as error:  # a bug ends the request, not the frontend
            if not isinstance(error, RotaError):
                _log.exception("a request failed unexpectedly")
            self._outflow.end(request, error)
            return
        self._outflow.begin(request, generation)

    # calls --------------------------------------------------------------------------------------
    def _call(self, call: int, verb: wire.Verb) -> None:
        assert self._tasks is not None
        if call in self._calls:
            raise WireError("the call id is in use", code="wire-order")
        if len(self._calls) >= self._limits.max_calls:
            full = CapacityError(
                "too many calls of one connection",
                code="QUEUE_FULL",
                expected=f"at most {self._limits.max_calls}",
                retry_after_s=0.1,
            )
            self._send(wire.Result(call, wire.Nothing(), to_failure(full)))
            return
        scope = self._calls[call] = anyio.CancelScope()
        self._tasks.start_soon(self._answer, call, verb, scope)

    async def _answer(self, call: int, verb: wire.Verb, scope: anyio.CancelScope) -> None:
        result: wire.Answer = wire.Nothing()
        failure = None
        try:
            with scope:
                result = await answer(self._engine, verb, self._uploads, self._sources)
        except RotaError as error:
            failure = to_failure(error)
        except Exception as error:  # a bug ends the call, not the frontend
            _log.exception("a call failed unexpectedly")
            failure = to_failure(error)
        finally:
            del self._calls[call]
        try:
            self._send(wire.Result(call, result, failure, self._snapshot(verb)))
        except WireError as error:
            self._send(wire.Result(call, wire.Nothing(), to_failure(error)))

    def _snapshot(self, verb: wire.Verb) -> Any:
        if isinstance(verb, (wire.GetStory, wire.ChatPrompt, wire.Encode, wire.Pieces)):
            return None
        try:
            stats = self._engine.stats()
        except RotaError:
            return None
        few = len(stats.adapters) <= self._limits.stats_adapters
        return stats if few or isinstance(verb, wire.GetStats) else None
