"""Engine: the public face. Owns the life time of the device thread, the shell and the runner.

async with rota.Engine(model_dir, adapters={"sql": "adapters/sql"}) as engine:
    async for event in engine.generate("How many users?", adapter="sql"):
        print(event.text, end="")
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.abc
import msgspec

from ..errors import EngineClosedError, RequestError
from ..gpu.device import open_device
from ..gpu.lora.report import LoadReport
from ..gpu.lora.source import AdapterSource, BytesSource, DirectorySource
from ..gpu.lora.stage import stage
from ..gpu.model.runner import Runner
from ..gpu.model.sampling import SamplingParams
from .config import EngineConfig
from .core import Core, CoreConfig, Stats
from .core import events as ev
from .generation import Generation
from .shell import Pending, Shell
from .staging import Stager
from .streams import Stream
from .text.chat import ChatTemplate
from .text.sink import TextSink
from .text.tokenizer import Tokenizer
from .wake import loop_poster
from .worker import DeviceThread

_log = logging.getLogger("rota.sched.engine")


class _Default:
    """The marker ``rota.DEFAULT``: whatever adapter is the default at submission."""

    def __repr__(self) -> str:
        return "rota.DEFAULT"


DEFAULT = _Default()

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


class Engine:
    """Serves one base model with many LoRA adapters; see :class:`EngineConfig` for every option.

    Use as an async context manager, on asyncio or trio. All methods are called from the event loop
    that entered it. Raises ModelError, DeviceError or RejectError on entry when the model, the
    device or a start-up adapter cannot be served; then nothing stays allocated.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str],
        adapters: Mapping[str, Source] | None = None,
        **options: Any,
    ) -> None:
        self.config = msgspec.convert(options, EngineConfig, strict=True, from_attributes=False)
        self._model_dir = Path(model_dir)
        self._adapters = dict(adapters or {})
        self._stack = AsyncExitStack()
        self._shell: Shell | None = None
        self._core: Core | None = None
        self._thread: DeviceThread | None = None
        self._runner: Runner | None = None
        self._tokenizer: Tokenizer | None = None
        self._chat: ChatTemplate | None = None
        self._rng = random.Random(self.config.seed)

    # life time ----------------------------------------------------------------------------------
    async def __aenter__(self) -> Self:
        config = self.config
        self._thread = DeviceThread(limit=4 * (config.max_running + config.max_loras) + 64)
        self._thread.start()
        try:
            await self._open()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._shut()
            raise
        return self

    async def _open(self) -> None:
        config = self.config
        self._runner = runner = await self._on_device(self._load_runner)
        self._tokenizer = await anyio.to_thread.run_sync(Tokenizer.from_dir, self._model_dir)
        self._chat = await anyio.to_thread.run_sync(ChatTemplate.from_dir, self._model_dir)
        info = runner.info
        self._core = Core(
            CoreConfig(
                max_loras=config.max_loras,
                num_blocks=info.num_blocks,
                max_context=info.context_length,
                block_size=info.block_size,
                max_running=config.max_running,
                max_waiting=config.max_waiting,
                max_step_tokens=config.max_step_tokens,
                mixed_step_tokens=config.mixed_step_tokens,
                drain_after_s=config.drain_after_s,
                image_cache_bytes=config.image_cache_bytes,
            )
        )
        stager = Stager(self._stage, workers=config.stage_workers, clock_ns=time.time_ns)
        assert self._thread is not None
        self._shell = Shell(self._core, runner, self._thread, stager)
        tasks = await self._stack.enter_async_context(anyio.create_task_group())
        await tasks.start(partial(self._shell.run))
        async with anyio.create_task_group() as loads:
            for name, source in self._adapters.items():
                loads.start_soon(partial(self.load, name, source, pin=config.pin_adapters))

    def _load_runner(self) -> Runner:
        config = self.config
        device = open_device(config.device)
        try:
            return Runner.load(
                self._model_dir,
                device,
                dtype=config.dtype,
                max_loras=config.max_loras,
                max_lora_rank=config.max_lora_rank,
                overlay_rows=config.overlay_rows,
                kv_bytes=config.kv_bytes,
                max_step_tokens=max(config.max_step_tokens, config.mixed_step_tokens),
                max_sequences=config.max_running,
                use_numba=config.use_numba,
            )
        except BaseException:
            device.close()
            raise

    def _stage(self, source: AdapterSource, cancelled: Callable[[], bool]) -> Any:
        assert self._runner is not None
        return stage(source, self._runner.layout, cancelled=cancelled)

    async def _on_device(self, job: Callable[[], Any]) -> Any:
        """Run ``job`` on the device thread and wait; a cancelled wait still waits for its end."""
        post, done = loop_poster(), anyio.Event()
        box: list[Any] = []

        def finished(result: Any, error: BaseException | None) -> None:
            box.extend((result, error))
            post(done.set)

        assert self._thread is not None
        self._thread.put(job, finished)
        with anyio.CancelScope(shield=True):
            await done.wait()
        result, error = box
        if error is not None:
            raise error
        return result

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with anyio.CancelScope(shield=True):
            await self._shut()

    async def aclose(self) -> None:
        """End everything now; what runs gets EngineClosedError. Bounded by ``close_timeout_s``."""
        with anyio.CancelScope(shield=True):
            await self._shut()

    async def _shut(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        if self._shell is not None:
            self._shell.close()
            with anyio.move_on_after(self.config.close_timeout_s) as scope:
                await self._shell.closed.wait()
            if scope.cancelled_caught:
                _log.error("the device did not finish within %.1f s", self.config.close_timeout_s)
                self._shell.abort("the engine did not close in time")
        await self._stack.aclose()
        if self._runner is not None:
            thread.put(self._runner.close, _closed)
        thread.stop()
        joined = await anyio.to_thread.run_sync(thread.join, self.config.close_timeout_s)
        if not joined:
            _log.error("the device thread still runs; it is left behind as a daemon")
        self._runner = None

    # generating ---------------------------------------------------------------------------------
    def generate(
        self,
        prompt: str | Sequence[int],
        adapter: str | _Default | None = DEFAULT,
        sampling: SamplingParams | None = None,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> Generation:
        """Start a request and return its events as an async iterator.

        ``prompt``: text (tokenized as it is) or token ids. ``adapter``: a name, ``None`` for base,
        or ``rota.DEFAULT``. Lower ``priority`` numbers go first. ``deadline_s``: seconds from now
        after which the request ends with reason ``deadline``. Leaving the loop, dropping the
        iterator or cancelling the task cancels the request. The request is queued at once;
        refusals (RequestError, CapacityError, EngineClosedError) are raised by the iterator.
        """
        shell, runner = self._live()
        sampling = sampling or SamplingParams()
        assert self._tokenizer is not None
        ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else [*prompt]
        vocab = runner.info.vocab_size
        for position, token in enumerate(ids):
            if not 0 <= token < vocab:
                raise RequestError(
                    "a token id outside the vocabulary",
                    code="bad-token",
                    subject=f"prompt[{position}]",
                    expected=f"0..{vocab - 1}",
                    found=token,
                )
        if sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=self._rng.getrandbits(63))
        seq = shell.new_id()
        text = TextSink(self._tokenizer, sampling.stop, ids)
        stream = Stream(seq, text, shell.stop_matched)
        stop_ids = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop_ids.update(runner.info.eos_ids)
        use_default = isinstance(adapter, _Default)
        event = ev.Submit(
            seq=seq,
            prompt=tuple(ids),
            adapter=None if isinstance(adapter, _Default) else adapter,
            use_default=use_default,
            max_tokens=sampling.max_tokens,
            stop_ids=tuple(sorted(stop_ids)),
            min_tokens=sampling.min_tokens,
            priority=priority,
            deadline=None if deadline_s is None else anyio.current_time() + deadline_s,
        )
        shell.submit(event, stream, sampling)
        return Generation(shell, stream)

    async def complete(
        self,
        prompt: str | Sequence[int],
        adapter: str | _Default | None = DEFAULT,
        sampling: SamplingParams | None = None,
    ) -> str:
        """The whole text of one generation."""
        return "".join([e.text async for e in self.generate(prompt, adapter, sampling)])

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a chat, by the model's own template. Raises RequestError."""
        self._live()
        assert self._tokenizer is not None and self._chat is not None
        text = self._chat.render(messages)
        return self._tokenizer.encode(text, add_special_tokens=False)

    # adapters -----------------------------------------------------------------------------------
    async def load(self, name: str, source: Source, *, pin: bool = False) -> AdapterReply:
        """Stage a new name and bring it into a slot. Refused if the name is taken."""
        return await self._command(
            lambda shell, i: ev.Load(i, name, shell.source_id(_source(source)), pin)
        )

    async def register(self, name: str, source: Source) -> AdapterReply:
        """Make a name known; it is promoted by the first request that asks for it."""
        return await self._command(
            lambda shell, i: ev.Register(i, name, shell.source_id(_source(source)))
        )

    async def replace(self, name: str, source: Source) -> AdapterReply:
        """A new version of a known name; its running sequences finish on the old version."""
        return await self._command(
            lambda shell, i: ev.Replace(i, name, shell.source_id(_source(source)))
        )

    async def promote(self, name: str, source: Source | None = None) -> AdapterReply:
        """Make a name resident in a cache slot. ``source`` if the name is not known yet."""
        return await self._command(lambda shell, i: ev.Promote(i, name, _optional(shell, source)))

    async def swap(self, name: str, source: Source, slot: int) -> AdapterReply:
        """A new version of ``name`` into slot ``slot``, once that slot has no lease."""
        return await self._command(
            lambda shell, i: ev.Swap(i, name, shell.source_id(_source(source)), slot)
        )

    async def rotate(self, name: str | None) -> AdapterReply:
        """Change the default adapter (``None``: base); sequences in flight are not touched."""
        return await self._command(lambda _, i: ev.Rotate(i, name))

    async def unload(
        self, name: str, *, deadline_s: float = 30.0, cancel_late: bool = False
    ) -> AdapterReply:
        """Forget a name: new requests are refused at once, running ones finish. After
        ``deadline_s`` seconds the answer is ``still-draining``, or, with ``cancel_late``, what
        still runs is ended and the answer is ``cancelled``."""
        deadline = anyio.current_time() + deadline_s
        return await self._command(lambda _, i: ev.Unload(i, name, deadline, cancel_late))

    async def pin(self, name: str) -> AdapterReply:
        """The adapter's slot is no victim until :meth:`unpin`."""
        return await self._command(lambda _, i: ev.Pin(i, name, True))

    async def unpin(self, name: str) -> AdapterReply:
        return await self._command(lambda _, i: ev.Pin(i, name, False))

    async def prefetch(self, name: str, source: Source | None = None) -> AdapterReply:
        """Stage a name into the host image cache, so that its promotion is one copy."""
        return await self._command(lambda shell, i: ev.Prefetch(i, name, _optional(shell, source)))

    async def _command(self, make: Callable[[Shell, int], ev.Command]) -> AdapterReply:
        shell, _ = self._live()
        begin = time.perf_counter()
        pending: Pending = await shell.command(partial(make, shell))
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

    # looking in ---------------------------------------------------------------------------------
    def stats(self) -> Stats:
        """A frozen snapshot of slots, adapters, queues and totals."""
        self._live()
        assert self._core is not None
        return self._core.stats()

    def story(self, subject: str) -> list[str]:
        """What happened to ``"seq 3"``, ``"slot 1"`` or ``"adapter sql"``, oldest first."""
        self._live()
        assert self._core is not None
        return self._core.story(subject)

    @property
    def tokenizer(self) -> Tokenizer:
        self._live()
        assert self._tokenizer is not None
        return self._tokenizer

    @property
    def info(self) -> Any:
        """What is served (frozen): family, dtype, vocabulary, context length, KV blocks."""
        return self._live()[1].info

    def _live(self) -> tuple[Shell, Runner]:
        if self._shell is None or self._runner is None or self._thread is None:
            raise EngineClosedError("the engine is not running")
        return self._shell, self._runner


def _closed(_: Any, error: BaseException | None) -> None:
    if error is not None:
        _log.error("closing the device failed: %s", error)


def _source(source: Source) -> AdapterSource:
    if isinstance(source, tuple):
        tensors, config = source
        return BytesSource(tensors, config)
    if isinstance(source, (str, os.PathLike)):
        return DirectorySource(Path(source))
    return source


def _optional(shell: Shell, source: Source | None) -> int | None:
    return None if source is None else shell.source_id(_source(source))
