"""``rota.connect(address)``: an engine in another process, with the interface of an Engine.

Owns the connection's life: dialling, reconnecting with back-off, and the newest snapshot.
Invariants: a lost connection ends every stream and call with ``engine-gone`` and nothing is sent
twice on its own; while there is none, calls are refused at once with a retry hint.

    async with rota.connect("unix:/run/rota.sock") as engine:
        async for event in engine.generate("How many users?", adapter="sql"):
            print(event.text, end="")
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.abc
import msgspec

from ...errors import EngineClosedError, RequestError, RotaError
from ...gpu.lora.source import BytesSource, DirectorySource
from ...gpu.model.params import SamplingParams
from ..core.snapshot import Stats
from ..face import DEFAULT, AdapterReply, Default, Source
from ..seen import StagedReport
from ..wake import loop_poster
from . import wire
from .address import Address, dial, parse_address
from .limits import IpcLimits
from .link import Link, RemoteGeneration, gone

_log = logging.getLogger("rota.sched.ipc")


class Backoff(msgspec.Struct, frozen=True, kw_only=True):
    """Between attempts to reconnect: ``first_s``, doubled up to ``most_s``, less up to
    half at random, so that many frontends do not come back at once."""

    first_s: float = 0.05
    most_s: float = 5.0

    def delay(self, attempt: int, rng: random.Random) -> float:
        """Seconds to wait after ``attempt`` failures (from 0)."""
        return min(self.most_s, self.first_s * 2.0 ** min(attempt, 30)) * (1 - 0.5 * rng.random())


class Client:
    """An engine elsewhere. Use as an async context manager, on asyncio or trio.

    The methods are those of :class:`~rota.sched.engine.Engine`. What differs: ``stats()`` is the
    newest snapshot at hand (each answer to a command brings one; ``await refresh()`` asks for
    one), ``chat_prompt``, ``story`` and ``staged`` are coroutines, and a directory must exist on
    the engine's machine. Other errors than the engine's own: EngineClosedError ``engine-gone`` when
    the connection is lost, and on entry EngineClosedError ``engine-unreachable``, WireError
    ``unauthorized``, ``version-mismatch`` or ``schema-mismatch``.
    """

    def __init__(
        self,
        address: str | os.PathLike[str] | Address,
        *,
        token: str | None = None,
        limits: IpcLimits | None = None,
        window: int = 256,
        backoff: Backoff | None = None,
        connect_timeout_s: float = 10.0,
        rng: random.Random | None = None,
    ) -> None:
        if window < 2:
            raise RequestError("a window holds 2 events at least", code="bad-window", found=window)
        self.address = parse_address(address)
        self._token = token
        self._limits = limits or IpcLimits()
        self._window = window
        self._backoff = backoff or Backoff()
        self._timeout_s = connect_timeout_s
        self._rng = rng or random.Random()
        self._schema = wire.schema_hash()
        self._tasks: anyio.abc.TaskGroup | None = None
        self._keeping: anyio.CancelScope | None = None
        self._closed = False
        self._link: Link | None = None
        self._lost: RotaError = gone("not connected")
        self._up = anyio.Event()
        self._stats: Stats | None = None
        self._card: wire.ModelCard | None = None
        self._post: Callable[[Callable[[], None]], None] = _nowhere

    # life time ----------------------------------------------------------------------------------
    async def __aenter__(self) -> Self:
        self._keeping = anyio.CancelScope()
        self._closed = False
        self._post = loop_poster()
        link = await self._dial()
        tasks = anyio.create_task_group()
        await tasks.__aenter__()
        self._tasks = tasks
        tasks.start_soon(self._keep, link, self._keeping)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()
        tasks, self._tasks = self._tasks, None
        assert tasks is not None
        # The caller's own exception goes on by itself, not wrapped in a group.
        await tasks.__aexit__(None, None, None)

    async def aclose(self) -> None:
        """End everything now: what runs gets EngineClosedError ``client-closed``, and so does every
        later call. Any task may call it, and as often as it likes; the context is still to be left
        by the task that entered it."""
        self._closed = True
        self._lost = EngineClosedError("the client is closed", code="client-closed")
        if self._link is not None:
            self._link.fail(self._lost)
            self._link = None
        self._up.set()
        if self._keeping is not None:
            self._keeping.cancel()

    async def _dial(self) -> Link:
        stream = await dial(self.address, self._timeout_s)
        link = Link(stream, self._schema, self._limits, self._token, self._keep_stats)
        try:
            welcome = await link.open(self._timeout_s)
        except BaseException:
            await anyio.aclose_forcefully(stream)
            raise
        self._card = welcome.card
        self._window = min(self._window, welcome.max_credit)
        self._link = link
        self._lost = gone("the connection to the engine is lost", self._backoff.first_s)
        self._up.set()
        return link

    async def _keep(self, link: Link, scope: anyio.CancelScope) -> None:
        """Run the connection; when it is lost, come back. Until :meth:`aclose`."""
        with scope:
            while True:
                try:
                    await link.run()
                except Exception:  # a bug costs one connection; the next is tried
                    _log.exception("a connection failed unexpectedly")
                finally:
                    self._link = None
                    self._up = anyio.Event()
                if self._closed:
                    return
                _log.warning("lost the engine at %s; reconnecting", self.address)
                link = await self._come_back()
                _log.info("connected to the engine at %s again", self.address)

    async def _come_back(self) -> Link:
        attempt = 0
        while True:
            delay = self._backoff.delay(attempt, self._rng)
            self._lost = gone("the engine cannot be reached", delay)
            await anyio.sleep(delay)  # the back-off
            try:
                return await self._dial()
            except RotaError as error:
                attempt += 1
                _log.log(
                    logging.WARNING if attempt == 1 else logging.DEBUG,
                    "attempt %d to reach the engine failed: %s",
                    attempt,
                    error,
                )

    def _keep_stats(self, stats: Stats) -> None:
        self._stats = stats

    @property
    def connected(self) -> bool:
        return self._link is not None and self._link.error is None

    async def wait_connected(self) -> None:
        """Wait until there is a connection (again). Raises EngineClosedError ``client-closed``."""
        while not self.connected:
            if self._closed:
                raise self._lost
            await self._up.wait()

    async def ping(self) -> None:
        """A round trip to the engine. Raises EngineClosedError ``engine-gone``."""
        await self._live().ping()

    def _live(self) -> Link:
        if self._link is None or self._link.error is not None:
            raise self._lost
        return self._link

    # generating ---------------------------------------------------------------------------------
    def generate(
        self,
        prompt: str | Sequence[int],
        adapter: str | Default | None = DEFAULT,
        sampling: SamplingParams | None = None,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> RemoteGeneration:
        """As :meth:`Engine.generate`; every refusal is raised by the iterator, but for
        ``engine-gone``, which is raised at once."""
        link = self._live()
        ident = link.new_id()
        use_default = isinstance(adapter, Default)
        generation = RemoteGeneration(link, ident, self._window, self._post)
        link.generate(
            generation,
            wire.Generate(
                ident,
                prompt if isinstance(prompt, str) else tuple(prompt),
                None if isinstance(adapter, Default) else adapter,
                use_default,
                sampling or SamplingParams(),
                priority,
                deadline_s,
                self._window,
            ),
        )
        return generation

    async def complete(
        self,
        prompt: str | Sequence[int],
        adapter: str | Default | None = DEFAULT,
        sampling: SamplingParams | None = None,
    ) -> str:
        """The whole text of one generation (of its first sample)."""
        sampling = sampling.of_sample(0) if sampling is not None else None
        return "".join([e.text async for e in self.generate(prompt, adapter, sampling)])

    async def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a chat, by the model's own template. Raises RequestError."""
        answer = await self._ask(wire.ChatPrompt(msgspec.json.encode(list(messages))))
        return list(answer.ids)

    async def encode(self, text: str) -> list[int]:
        """Token ids of a text, by the model's tokenizer. Raises RequestError."""
        return list((await self._ask(wire.Encode(text))).ids)

    async def pieces(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes of each token."""
        return list((await self._ask(wire.Pieces(tuple(ids)))).items)

    # adapters -----------------------------------------------------------------------------------
    async def load(self, name: str, source: Source, *, pin: bool = False) -> AdapterReply:
        return await self._adapter("load", name, source, pin=pin)

    async def register(self, name: str, source: Source) -> AdapterReply:
        return await self._adapter("register", name, source)

    async def replace(self, name: str, source: Source) -> AdapterReply:
        return await self._adapter("replace", name, source)

    async def promote(self, name: str, source: Source | None = None) -> AdapterReply:
        return await self._adapter("promote", name, source)

    async def swap(self, name: str, source: Source | None, slot: int) -> AdapterReply:
        return await self._adapter("swap", name, source, slot=slot)

    async def prefetch(self, name: str, source: Source | None = None) -> AdapterReply:
        return await self._adapter("prefetch", name, source)

    async def rotate(self, name: str | None) -> AdapterReply:
        return _reply(await self._ask(wire.Named("rotate", name)))

    async def pin(self, name: str) -> AdapterReply:
        return _reply(await self._ask(wire.Named("pin", name)))

    async def unpin(self, name: str) -> AdapterReply:
        return _reply(await self._ask(wire.Named("unpin", name)))

    async def unload(
        self, name: str, *, deadline_s: float = 30.0, cancel_late: bool = False
    ) -> AdapterReply:
        return _reply(await self._ask(wire.Unload(name, deadline_s, cancel_late)))

    async def resize(
        self,
        *,
        max_loras: int | None = None,
        max_lora_rank: int | None = None,
        deadline_s: float = 30.0,
    ) -> AdapterReply:
        return _reply(await self._ask(wire.Resize(max_loras, max_lora_rank, deadline_s)))

    async def _adapter(
        self, verb: Any, name: str, source: Source | None, *, slot: int = -1, pin: bool = False
    ) -> AdapterReply:
        link = self._live()
        sent = await _send_source(link, source)
        result = await link.call(wire.Adapter(verb, name, sent, slot, pin))
        return _reply(result.answer)

    async def _ask(self, verb: wire.Verb) -> Any:
        return (await self._live().call(verb)).answer

    # looking in ---------------------------------------------------------------------------------
    def stats(self) -> Stats:
        """The newest snapshot at hand; see :meth:`refresh`."""
        self._live()
        assert self._stats is not None
        return self._stats

    async def refresh(self) -> Stats:
        """A snapshot of now."""
        await self._ask(wire.GetStats())
        return self.stats()

    async def story(self, subject: str) -> list[str]:
        """What happened to ``"seq 3"``, ``"slot 1"`` or ``"adapter sql"``, oldest first."""
        return list((await self._ask(wire.GetStory(subject))).lines)

    async def staged(self, name: str) -> StagedReport | None:
        """What the newest staging of an adapter saw; ``None`` for one not staged since it is known
        (of the last 1024 names)."""
        seen = await self._ask(wire.GetStaged(name))
        return None if isinstance(seen, wire.Nothing) else StagedReport(seen.digest, seen.report)

    @property
    def info(self) -> wire.ModelCard:
        """What is served: family, dtype, vocabulary, context length, KV blocks."""
        self._live()
        assert self._card is not None
        return self._card


def connect(address: str | os.PathLike[str] | Address, **options: Any) -> Client:
    """A :class:`Client` of the engine at ``address`` (``unix:PATH`` or ``HOST:PORT``); see there
    for the options."""
    return Client(address, **options)


def _nowhere(callback: Callable[[], None]) -> None:
    """Before the client is entered there is no loop, and nothing to call back."""


async def _send_source(link: Link, source: Source | None) -> wire.Source | None:
    match source:
        case None:
            return None
        case (tensors, config):
            return await link.upload(memoryview(tensors).cast("B"), bytes(config))
        case BytesSource(tensors=tensors, config=config):
            return await link.upload(memoryview(tensors).cast("B"), bytes(config))
        case DirectorySource(path=path):
            return wire.Place(_absolute(path))
        case str() | os.PathLike():
            return wire.Place(_absolute(source))
    from ...rdma.client import Peer  # here: a frontend that names no peer needs none of it

    if isinstance(source, Peer) and source.transport is None and source.connect is None:
        p = source
        return wire.FromPeer(p.address, p.adapter, p.secret, p.packed, p.rails, p.deadline_s)
    raise RequestError(
        "this kind of source cannot be sent to another process",
        code="bad-source",
        expected="a directory, safetensors bytes and config, or a rota.Peer on TCP",
        found=type(source).__name__,
    )


def _absolute(path: str | os.PathLike[str]) -> str:
    return os.path.abspath(os.fspath(path))


def _reply(outcome: Any) -> AdapterReply:
    return AdapterReply(*(getattr(outcome, name) for name in AdapterReply.__struct_fields__))
