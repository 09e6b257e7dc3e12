"""A simulated engine with the whole face of the real one: for the faces' tests and for trying a
client without a model.

The real core, shell, device thread and staging workers over :class:`SimExecutor`. A token names the
content of the slot it came from and its position (:func:`sim_token`), as printable ASCII, so a
reader who knows the content knows the text. An adapter's content is the digest of its bytes; base's
is ``"base"``. A step takes ``step_s`` seconds of the device thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.abc
import msgspec
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from ...errors import EngineClosedError, RejectError, RequestError
from ...gpu.lora.safefile import FileLimits
from ...gpu.lora.source import AdapterSource, RawAdapter
from ...gpu.model.params import SamplingParams
from ..adapter_commands import AdapterCommands
from ..core import Core, CoreConfig, Stats
from ..core import events as ev
from ..face import DEFAULT, Default, Source
from ..generation import Generation
from ..seen import StagedReport
from ..shell import Shell
from ..staging import Held, Stager
from ..streams import Outlet, Stream
from ..text.chat import ChatTemplate
from ..text.detokenizer import byte_alphabet
from ..text.sink import TextSink
from ..text.tokenizer import Tokenizer
from ..worker import DeviceThread
from .device import SimExecutor, SimImage, SimOutput, SimStaged, token_of

_PRINTABLE = range(0x21, 0x7F)
_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class SimInfo(msgspec.Struct, frozen=True):
    """As the runner's info."""

    family: str = "sim"
    dtype: str = "none"
    vocab_size: int = 256
    context_length: int = 2048
    block_size: int = 16
    num_blocks: int = 4096
    eos_ids: tuple[int, ...] = ()


def sim_token(content: str, position: int) -> int:
    """The token id at ``position`` of a sequence (0-based, prompt included) under ``content``."""
    return _PRINTABLE[token_of(content, position) % len(_PRINTABLE)]


def sim_text(content: str, prompt_tokens: int, tokens: int) -> str:
    """The text a request of ``prompt_tokens`` gets for ``tokens`` new tokens."""
    return "".join(chr(sim_token(content, prompt_tokens + i)) for i in range(tokens))


def sim_content(tensors: bytes, config: bytes) -> str:
    """What an adapter of these bytes is, for :func:`sim_token`."""
    return RawAdapter(config, (np.frombuffer(tensors, np.uint8),)).digest()


def byte_tokenizer() -> Tokenizer:
    """One token a byte; token ids are the bytes."""
    vocab = {char: byte for char, byte in byte_alphabet().items()}
    raw = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    return Tokenizer(raw)


class _Executor(SimExecutor):
    def __init__(self, slots: int, step_s: float) -> None:
        super().__init__(slots)
        self._step_s = step_s
        self._samplings: dict[int, Any] = {}

    def open_sequence(self, seq: int, prompt: Sequence[int], sampling: Any) -> None:
        super().open_sequence(seq, prompt, sampling)
        self._samplings[seq] = sampling

    def close_sequence(self, seq: int) -> None:
        super().close_sequence(seq)
        del self._samplings[seq]

    def step(self, rows: Sequence[Any]) -> list[SimOutput]:
        if self._step_s:
            time.sleep(self._step_s)  # what a step takes, on the device thread
        outputs = [self._printable(output) for output in super().step(rows)]
        self.sampled = [(output.seq, output.token) for output in outputs]
        return outputs

    def _printable(self, output: SimOutput) -> SimOutput:
        if output.token < 0:
            return output
        token = _PRINTABLE[output.token % len(_PRINTABLE)]
        wanted = self._samplings[output.seq].logprobs
        if wanted is None:
            return SimOutput(output.seq, token)
        top = tuple((_PRINTABLE[(token + i) % len(_PRINTABLE)], -1.0 - i) for i in range(wanted))
        return SimOutput(output.seq, token, -0.5, top)


class SimEngine(AdapterCommands):
    """See the module. ``gate``: staging waits until it is set (a test holds a load back)."""

    def __init__(
        self,
        adapters: Mapping[str, Source] | None = None,
        *,
        max_loras: int = 4,
        step_s: float = 0.0,
        gate: threading.Event | None = None,
        **config: Any,
    ) -> None:
        self.info = SimInfo()
        self.tokenizer = byte_tokenizer()
        self._chat = ChatTemplate(_TEMPLATE)
        self._adapters = dict(adapters or {})
        self._gate = gate
        self._step_s = step_s
        options: dict[str, Any] = {
            "max_loras": max_loras,
            "num_blocks": self.info.num_blocks,
            "max_context": self.info.context_length,
        }
        self.core = Core(CoreConfig(**options | config))
        self._slots = max_loras
        self._tasks: anyio.abc.TaskGroup | None = None
        self._shell: Shell | None = None
        self.executor = _Executor(max_loras, step_s)
        self._thread = DeviceThread(limit=4096)

    async def __aenter__(self) -> Self:
        self._thread.start()
        self._stager = Stager(self._stage, workers=2, clock_ns=time.time_ns)
        self._shell = Shell(self.core, self.executor, self._thread, self._stager)
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        await self._tasks.start(partial(self._shell.run))
        for name, source in self._adapters.items():
            await self.load(name, source)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End everything; harmless when ended."""
        shell, self._shell = self._shell, None
        if shell is None:
            return
        if self._gate is not None:
            self._gate.set()
        shell.close()
        assert self._tasks is not None
        # The shell's loop shields itself, so this waits for its orderly end even when cancelled.
        try:
            await self._tasks.__aexit__(None, None, None)
        finally:
            self._stager.close()
            self._thread.stop()
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._thread.join, 10.0)

    def _stage(
        self, source: AdapterSource, cancelled: Callable[[], bool], held: Held | None
    ) -> SimStaged:
        if self._gate is not None:
            self._gate.wait()
        raw = source.read(FileLimits())
        if b"refuse" in raw.config:
            raise RejectError("refused on purpose", code="sim-refused", subject="config")
        return SimStaged(
            SimImage(raw.digest(), 1000, layout=self.executor.max_rank), None, raw.digest()
        )

    def _serving(self) -> tuple[Shell, Core]:
        return self._live(), self.core

    def _live(self) -> Shell:
        if self._shell is None:
            raise EngineClosedError("the engine is not running")
        return self._shell

    def generate(
        self,
        prompt: str | Sequence[int],
        adapter: str | Default | None = DEFAULT,
        sampling: SamplingParams | None = None,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> Generation:
        shell = self._live()
        sampling = sampling or SamplingParams()
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else [*prompt]
        for position, token in enumerate(ids):
            if not 0 <= token < self.info.vocab_size:
                raise RequestError(
                    "a token id outside the vocabulary",
                    code="bad-token",
                    subject=f"prompt[{position}]",
                    found=token,
                )
        outlet, samples = Outlet(), []
        for index in range(sampling.n):
            text = TextSink(self.tokenizer, sampling.stop, ids)
            stream = Stream(shell.new_id(), text, shell.stop_matched, outlet, index)
            samples.append((stream, sampling.of_sample(index)))
        streams = [stream for stream, _ in samples]
        named = None if isinstance(adapter, Default) else adapter
        event = ev.Submit(
            streams[0].seq,
            tuple(ids),
            named,
            isinstance(adapter, Default),
            sampling.max_tokens,
            stop_ids=sampling.stop_token_ids,
            priority=priority,
            deadline=None if deadline_s is None else anyio.current_time() + deadline_s,
            siblings=tuple(stream.seq for stream in streams[1:]),
        )
        shell.submit_samples(event, samples)
        return Generation(shell, *streams)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        text = self._chat.render(messages)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def stats(self) -> Stats:
        times = self._live().timings.snapshot()
        return msgspec.structs.replace(self.core.stats(), times=times)

    def story(self, subject: str) -> list[str]:
        self._live()
        return self.core.story(subject)

    def staged(self, name: str) -> StagedReport | None:
        return self._live().seen.of(name)
