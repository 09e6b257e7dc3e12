"""Starting and stopping an engine's parts, in order, at any point of failure.

Owns the order: device thread, runner (made on that thread), tokenizer, core, shell; and back. What
was opened is closed exactly once, also when opening fails half way or is cancelled.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread

from ..errors import ModelError
from ..gpu.device import open_device
from ..gpu.kernels.rope import BLOCK_TOKENS
from ..gpu.lora.recipe import Recipes
from ..gpu.lora.source import AdapterSource
from ..gpu.lora.stage import Held, StageLimits, stage
from ..gpu.model.options import RunnerOptions
from ..gpu.model.runner import Runner
from ..gpu.model.tensors import Progress
from ..gpu.model.torch_runner import TorchRunner
from .config import EngineConfig
from .core import Core, CoreConfig
from .core.config import most_step_tokens
from .core.resize import MAX_SLOTS
from .shell import Shell
from .staging import Stager
from .text.chat import ChatTemplate
from .text.tokenizer import Tokenizer
from .wake import loop_poster
from .worker import DeviceThread

_log = logging.getLogger("rota.sched.lifecycle")


class Parts:
    """A running engine's parts. Made by :meth:`open`; :meth:`close` ends them."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.thread = DeviceThread(limit=4 * (config.max_running + MAX_SLOTS) + 64)
        self.stack = AsyncExitStack()
        self.recipes = Recipes()
        self.runner: Runner | TorchRunner
        self.core: Core
        self.shell: Shell
        self.tokenizer: Tokenizer | None = None
        self.chat: ChatTemplate

    @classmethod
    async def open(
        cls, config: EngineConfig, model_dir: Path, told: Progress | None = None
    ) -> Parts:
        """Start everything. Raises ModelError or DeviceError; then nothing stays allocated."""
        parts = cls(config)
        parts.thread.start()
        try:
            await parts._open(model_dir, told)
        except BaseException:
            await parts.close()
            raise
        return parts

    async def _open(self, model_dir: Path, told: Progress | None) -> None:
        config = self.config
        self.runner = await self._on_device(partial(_load_runner, config, model_dir, told))
        self.tokenizer = await anyio.to_thread.run_sync(_load_tokenizer, model_dir)
        self.chat = await anyio.to_thread.run_sync(ChatTemplate.from_dir, model_dir)
        info = self.runner.info
        self.core = Core(
            CoreConfig(
                max_loras=config.max_loras,
                max_rank=config.max_lora_rank,
                num_blocks=info.num_blocks,
                max_context=info.context_length,
                block_size=info.block_size,
                max_running=config.max_running,
                max_waiting=config.max_waiting,
                max_step_tokens=config.max_step_tokens,
                mixed_step_tokens=config.mixed_step_tokens,
                step_depth=config.step_depth or (1 if isinstance(self.runner, Runner) else 2),
                prefix_cache=config.prefix_cache,
                spill_blocks=info.spill_blocks,
                spill_block_cost=info.kv_bytes / info.num_blocks / config.spill_bytes_per_token,
                recurrent=info.recurrent,
                snapshots=info.snapshots,
                snapshot_tokens=config.snapshot_tokens,
                state_blocks=info.state_blocks,
                drain_after_s=config.drain_after_s,
                image_cache_bytes=config.image_cache_bytes,
                arena_bytes=info.arena_bytes,
            )
        )
        stager = Stager(self._stage, workers=config.stage_workers, clock_ns=time.time_ns)
        self.stack.callback(stager.close)
        shell = Shell(self.core, self.runner, self.thread, stager)
        tasks = await self.stack.enter_async_context(anyio.create_task_group())
        self.shell = shell
        # Its task is shielded, so a cancelled start would wait for it for ever; starting it is
        # quick, and the cancel is heard right after.
        with anyio.CancelScope(shield=True):
            await tasks.start(partial(shell.run))

    def _stage(
        self, source: AdapterSource, cancelled: Callable[[], bool], held: Held | None
    ) -> Any:
        runner = self.runner
        staged = stage(
            source,
            runner.layout,
            StageLimits(annex_bytes=runner.info.arena_bytes),
            runner.base_rows,
            cancelled=cancelled,
            held=held,
            recipes=self.recipes,
        )
        if isinstance(runner, TorchRunner):
            runner.land(staged.image)
        return staged

    async def _on_device(self, job: Callable[[], Any]) -> Any:
        """Run ``job`` on the device thread and wait; a cancelled wait still waits for its end."""
        post, done = loop_poster(), anyio.Event()
        box: list[Any] = []

        def finished(result: Any, error: BaseException | None) -> None:
            box.extend((result, error))
            post(done.set)

        self.thread.put(job, finished)
        with anyio.CancelScope(shield=True):
            await done.wait()
        result, error = box
        if error is not None:
            raise error
        return result

    async def close(self) -> None:
        """End everything, once; bounded by twice ``close_timeout_s``, also under cancellation.

        Called by the task that opened: the shell's task group sits on that task's scope stack, so
        the shields below must not enclose its exit.
        """
        try:
            await self.end()
            await self.stack.aclose()
        finally:
            with anyio.CancelScope(shield=True):
                await self._close_thread()

    async def end(self) -> None:
        """End all requests and commands, from any task and as often as one likes; threads and
        memory stay until :meth:`close`."""
        with anyio.CancelScope(shield=True):
            await self._close_shell()

    async def _close_shell(self) -> None:
        shell = getattr(self, "shell", None)
        if shell is None:
            return
        limit = self.config.close_timeout_s
        shell.close()
        with anyio.move_on_after(limit) as scope:
            await shell.closed.wait()
        if scope.cancelled_caught:
            _log.error("the device did not finish within %.1f s", limit)
            shell.abort("the engine did not close in time")

    async def _close_thread(self) -> None:
        runner = getattr(self, "runner", None)
        if runner is not None:
            self.thread.put(runner.close, _closed)
        self.thread.stop()
        if not await anyio.to_thread.run_sync(self.thread.join, self.config.close_timeout_s):
            _log.error("the device thread still runs; it is left behind as a daemon")


def _load_runner(
    config: EngineConfig, model_dir: Path, told: Progress | None
) -> Runner | TorchRunner:
    options = dataclasses.replace(_options(config), progress=told)
    device = open_device(config.device)
    try:
        if not device.host_addressable:
            return TorchRunner.load(model_dir, device, options)
        return Runner.load(model_dir, device, options, use_numba=config.use_numba)
    except BaseException:
        device.close()
        raise


def _options(config: EngineConfig) -> RunnerOptions:
    return RunnerOptions(
        dtype=config.dtype,
        max_loras=config.max_loras,
        max_lora_rank=config.max_lora_rank,
        overlay_rows=config.overlay_rows,
        affine=config.affine,
        expert_adapters=config.expert_adapters,
        max_expert_rank=config.max_expert_rank,
        max_embedding_rank=config.max_embedding_rank,
        adapter_arena_bytes=config.adapter_arena_bytes,
        attention=config.attention,
        kv_bytes=config.kv_bytes,
        max_step_tokens=most_step_tokens(
            config.max_step_tokens, config.mixed_step_tokens, config.max_running, BLOCK_TOKENS
        ),
        max_sequences=config.max_running,
        spill_bytes=config.spill_bytes,
        snapshots=config.state_snapshots if config.prefix_cache else 0,
    )


def _load_tokenizer(model_dir: Path) -> Tokenizer | None:
    """The tokenizer, or ``None`` for a checkpoint without one: it is served by token ids only."""
    try:
        return Tokenizer.from_dir(model_dir)
    except ModelError as error:
        if error.code != "no-tokenizer":
            raise
        _log.info("no tokenizer.json beside the model: token ids only")
        return None


def _closed(_: Any, error: BaseException | None) -> None:
    if error is not None:
        _log.error("closing the device failed: %s", error)
