"""Engine: the public face. Owns the life time of the device thread, the shell and the runner.

async with rota.Engine(model_dir, adapters={"sql": "adapters/sql"}) as engine:
    async for event in engine.generate("How many users?", adapter="sql"):
        print(event.text, end="")
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
import msgspec

from ..errors import CommandError, EngineClosedError, RequestError, RotaError
from ..gpu.model.sampling import SamplingParams
from .adapter_commands import AdapterCommands
from .arguments import bad_argument, check, deadline_in, token_ids
from .config import EngineConfig
from .core import Core, Stats
from .core import events as ev
from .face import DEFAULT, AdapterReply, Default, Source
from .generation import Generation
from .lifecycle import Parts
from .seen import StagedReport
from .shell import Shell
from .streams import Outlet, Stream
from .text.sink import TextSink
from .text.tokenizer import Tokenizer

_log = logging.getLogger("rota.sched.engine")


class Engine(AdapterCommands):
    """Serves one base model with many LoRA adapters; see :class:`EngineConfig` for every option.

    To show progress, ``on_weights`` is told of the model's weights while they are read (tensors
    begun, tensors in all; from the device thread), ``on_load`` of each of ``adapters`` when it is
    loaded.
    Use as an async context manager, on asyncio or trio. All methods are called from the event loop
    that entered it. Raises ModelError, DeviceError or RejectError on entry when the model, the
    device or a start-up adapter cannot be served; then nothing stays allocated.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str],
        adapters: Mapping[str, Source] | None = None,
        *,
        on_load: Callable[[str, AdapterReply], None] | None = None,
        on_weights: Callable[[int, int], None] | None = None,
        **options: Any,
    ) -> None:
        self.config = _config(options)
        self._model_dir = Path(model_dir)
        self._adapters = dict(adapters or {})
        self._on_load, self._on_weights = on_load, on_weights
        self._parts: Parts | None = None
        self._entered_by: int | None = None
        self._rng = random.Random(self.config.seed)

    # life time ----------------------------------------------------------------------------------
    async def __aenter__(self) -> Self:
        if self._entered_by is not None:
            raise CommandError("the engine is running already", code="already-running")
        self._entered_by = anyio.get_current_task().id
        try:
            self._parts = await Parts.open(self.config, self._model_dir, self._on_weights)
            await self._load_startup()
        except BaseException:
            await self.aclose()
            self._entered_by = None
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()
        if self._parts is not None:
            raise CommandError(
                "left by another task than the one that entered; only that one can free the engine",
                code="wrong-task",
            )

    async def aclose(self) -> None:
        """End everything now; what runs gets EngineClosedError. Bounded by ``close_timeout_s``.

        Any task may call it, and as often as it likes; threads and memory are given back when the
        task that entered the engine calls it or leaves.
        """
        parts = self._parts
        if parts is None:
            return
        if anyio.get_current_task().id != self._entered_by:
            await parts.end()
            return
        try:
            await parts.close()
        finally:
            self._parts = self._entered_by = None

    async def _load_startup(self) -> None:
        """All start-up adapters, staged side by side; the first refusal stops the start."""
        failed: list[RotaError] = []
        if len(self._adapters) > self.config.max_loras:
            raise CommandError(
                "more start-up adapters than slots; raise max_loras",
                code="too-many-adapters",
                expected=f"at most {self.config.max_loras}",
                found=len(self._adapters),
            )

        async def one(name: str, source: Source, scope: anyio.CancelScope) -> None:
            try:
                reply = await self.load(name, source, pin=self.config.pin_adapters)
                if self._on_load is not None:
                    self._on_load(name, reply)
            except RotaError as error:
                failed.append(error)
                scope.cancel()

        async with anyio.create_task_group() as loads:
            for name, source in self._adapters.items():
                loads.start_soon(one, name, source, loads.cancel_scope)
        if failed:
            raise failed[0]

    # generating ---------------------------------------------------------------------------------
    def generate(
        self,
        prompt: str | Sequence[int],
        adapter: str | Default | None = DEFAULT,
        sampling: SamplingParams | None = None,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> Generation:
        """Start a request and return its events as an async iterator (of all ``sampling.n``
        samples, which compute the prompt once; ``event.sample`` says whose it is).

        ``prompt``: text (tokenized as it is) or token ids. ``adapter``: a name, ``None`` for base,
        or ``rota.DEFAULT``. Lower ``priority`` numbers go first. ``deadline_s``: seconds from now
        after which the request ends with reason ``deadline``. Leaving the loop, dropping the
        iterator or cancelling the task cancels the request. The request is queued at once;
        refusals (RequestError, CapacityError, EngineClosedError) are raised by the iterator.
        """
        parts = self._live()
        shell, info = parts.shell, parts.runner.info
        sampling = SamplingParams() if sampling is None else sampling
        if not isinstance(sampling, SamplingParams):
            raise bad_argument("sampling", "rota.SamplingParams", sampling)
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else token_ids(prompt)
        vocab = info.vocab_size
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
        if parts.tokenizer is None and sampling.stop:
            raise _no_tokenizer()
        outlet, samples = Outlet(), []
        for index in range(sampling.n):
            tokenizer = parts.tokenizer
            text = None if tokenizer is None else TextSink(tokenizer, sampling.stop, ids)
            stream = Stream(shell.new_id(), text, shell.stop_matched, outlet, index)
            samples.append((stream, sampling.of_sample(index)))
        streams = [stream for stream, _ in samples]
        stop_ids = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop_ids.update(info.eos_ids)
        use_default = isinstance(adapter, Default)
        event = ev.Submit(
            seq=streams[0].seq,
            prompt=tuple(ids),
            adapter=None if isinstance(adapter, Default) else adapter,
            use_default=use_default,
            max_tokens=sampling.max_tokens,
            stop_ids=tuple(sorted(stop_ids)),
            min_tokens=sampling.min_tokens,
            priority=priority,
            deadline=None if deadline_s is None else deadline_in(deadline_s),
            siblings=tuple(stream.seq for stream in streams[1:]),
        )
        check(event)
        shell.submit_samples(event, samples)
        return Generation(shell, *streams)

    async def complete(
        self,
        prompt: str | Sequence[int],
        adapter: str | Default | None = DEFAULT,
        sampling: SamplingParams | None = None,
    ) -> str:
        """The whole text of one generation (of its first sample)."""
        sampling = sampling.of_sample(0) if isinstance(sampling, SamplingParams) else sampling
        return "".join([e.text async for e in self.generate(prompt, adapter, sampling)])

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a chat, by the model's own template. Raises RequestError."""
        text = self._live().chat.render(messages)
        return self.tokenizer.encode(text, add_special_tokens=False)

    # looking in ---------------------------------------------------------------------------------
    def stats(self) -> Stats:
        """A frozen snapshot of slots, adapters, queues and totals. Raises what broke the engine,
        if anything did, so that a health check sees it."""
        parts = self._live()
        if parts.shell.broken is not None:
            raise parts.shell.broken
        return msgspec.structs.replace(parts.core.stats(), times=parts.shell.timings.snapshot())

    def story(self, subject: str) -> list[str]:
        """What happened to ``"seq 3"``, ``"slot 1"`` or ``"adapter sql"``, oldest first."""
        return self._live().core.story(subject)

    def staged(self, name: str) -> StagedReport | None:
        """What the newest staging of an adapter saw; ``None`` for one not staged since it is known
        (of the last 1024 names)."""
        return self._live().shell.seen.of(name)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises RequestError ``no-tokenizer`` if the model has none."""
        tokenizer = self._live().tokenizer
        if tokenizer is None:
            raise _no_tokenizer()
        return tokenizer

    @property
    def info(self) -> Any:
        """What is served (frozen): family, dtype, vocabulary, context length, KV blocks."""
        return self._live().runner.info

    def _serving(self) -> tuple[Shell, Core]:
        parts = self._live()
        return parts.shell, parts.core

    def _live(self) -> Parts:
        if self._parts is None:
            raise EngineClosedError("the engine is not running")
        return self._parts


def _config(options: Mapping[str, Any]) -> EngineConfig:
    try:
        return msgspec.convert(options, EngineConfig, strict=True)
    except msgspec.ValidationError as error:
        raise RequestError(
            f"an engine option is not understood: {error}",
            code="bad-option",
            expected="the fields of rota.sched.config.EngineConfig",
        ) from error


def _no_tokenizer() -> RequestError:
    return RequestError(
        "the model directory has no tokenizer.json; send token ids, without stop strings",
        code="no-tokenizer",
    )
