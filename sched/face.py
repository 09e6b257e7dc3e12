"""What every face of an engine shares: in process, over IPC, behind HTTP.

Owns the names of the public interface that need neither torch nor a device, so that a frontend
process stays light: the default marker, the answer to an adapter command, and the protocols that
:class:`~rota.sched.engine.Engine` and :class:`~rota.sched.ipc.client.Client` both satisfy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from ..gpu.lora.report import LoadReport
from ..gpu.lora.source import AdapterSource
from .core.snapshot import Stats
from .streams import GenerationEvent

if TYPE_CHECKING:
    from ..gpu.model.params import SamplingParams


class Default:
    """The marker ``rota.DEFAULT``: whatever adapter is the default at submission."""

    def __repr__(self) -> str:
        return "rota.DEFAULT"


DEFAULT = Default()

Source = str | os.PathLike[str] | tuple[bytes, bytes] | AdapterSource


class AdapterReply(msgspec.Struct, frozen=True):
    """Answer to an adapter command.

    ``outcome``: ``done``, ``unchanged`` (the content was the same), ``resident``, ``prefetched``,
    ``registered``, ``unloaded``, ``still-draining`` or ``cancelled``. ``slot`` -1 = in no slot.
    ``evicted``: the name that lost its slot. ``report``: what the audit saw, when it ran.
    ``seconds``: from the call to the answer.
    """

    outcome: str
    name: str | None
    slot: int
    generation: int
    adapter_id: int
    evicted: str | None
    report: LoadReport | None
    seconds: float


class GenerationLike(Protocol):
    """One running request: an async iterator of events; :meth:`cancel` ends it early."""

    def __aiter__(self) -> GenerationLike: ...
    async def __anext__(self) -> GenerationEvent: ...
    async def take(self, limit: int) -> list[GenerationEvent]: ...
    def cancel(self) -> None: ...


class Polled(Protocol):
    """A request of an engine in this process: its events can be had without a task of their own."""

    @property
    def over(self) -> bool: ...
    def on_ready(self, call: Callable[[], None]) -> None: ...
    def poll(self, limit: int) -> list[GenerationEvent]: ...
    def cancel(self) -> None: ...


class EngineLike(Protocol):
    """What servers need of an engine. ``chat_prompt``, ``story`` and ``staged`` may answer at once
    (in process) or be coroutines (over IPC); ``stats`` is the newest snapshot at hand."""

    @property
    def info(self) -> Any: ...
    def generate(
        self,
        prompt: str | Sequence[int],
        adapter: str | Default | None = ...,
        sampling: SamplingParams | None = ...,
        *,
        priority: int = ...,
        deadline_s: float | None = ...,
    ) -> GenerationLike: ...
    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> Any: ...
    async def load(self, name: str, source: Source, *, pin: bool = ...) -> AdapterReply: ...
    async def register(self, name: str, source: Source) -> AdapterReply: ...
    async def replace(self, name: str, source: Source) -> AdapterReply: ...
    async def promote(self, name: str, source: Source | None = ...) -> AdapterReply: ...
    async def swap(self, name: str, source: Source | None, slot: int) -> AdapterReply: ...
    async def rotate(self, name: str | None) -> AdapterReply: ...
    async def unload(
        self, name: str, *, deadline_s: float = ..., cancel_late: bool = ...
    ) -> AdapterReply: ...
    async def resize(
        self,
        *,
        max_loras: int | None = ...,
        max_lora_rank: int | None = ...,
        deadline_s: float = ...,
    ) -> AdapterReply: ...
    async def pin(self, name: str) -> AdapterReply: ...
    async def unpin(self, name: str) -> AdapterReply: ...
    async def prefetch(self, name: str, source: Source | None = ...) -> AdapterReply: ...
    def stats(self) -> Stats: ...
    def story(self, subject: str) -> Any: ...
    def staged(self, name: str) -> Any: ...
