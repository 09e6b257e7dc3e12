"""The runner: the one object that turns rows into tokens. Driven by the device thread only.

What it owns: the device (from `Runner.load` on), its compute stream, the weights, the adapter pool,
the KV memory and every sequence's sampler. Invariants: a step checks all rows before it touches
KV memory; a row runs on the adapter its slot was last committed with, or is refused, never silently
on base; `close` gives everything back exactly once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from ...errors import DeviceError
from ..device import Device
from ..kernels.host import HostKernels
from ..kernels.rope import BLOCK_TOKENS
from ..lora.annex import Resident
from .adapters import Adapters, slots_of
from .base_rows import BaseMatrices
from .batch import Limits, StepBatch
from .config import ModelConfig, load_config
from .contract import (
    RunnerInfo,
    named_failure,
    nothing_fed,
    step_outputs,
)
from .families import HostModel, HostWeights, bind, read
from .kv import KvCache
from .linears import BaseLinears
from .options import RunnerOptions
from .rows import RowInput, RowLike, RowOutput
from .runner_base import RunnerBase
from .sampling import Choice, RowSampler, Sampler
from .spill import HostCopies, SpillStore
from .states import StateArena, snapshots_within

__all__ = ["RowInput", "RowOutput", "Runner", "RunnerInfo"]

logger = logging.getLogger("rota.gpu.model.runner")


class Runner(RunnerBase[list[torch.Tensor]]):
    """Use `Runner.load`."""

    def __init__(
        self,
        device: Device,
        config: ModelConfig,
        weights: HostWeights,
        kernels: HostKernels,
        linears: BaseLinears,
        options: RunnerOptions,
    ) -> None:
        super().__init__(device, config)
        self._kv: KvCache | None = None
        self._model: HostModel | None = None
        dtype = kernels.dtype
        self.base_rows = BaseMatrices(weights.embed, weights.head_rows, linears)
        self.layout = options.layout(config, dtype)
        self._stream = device.create_stream(label="runner")
        try:
            if options.max_loras:
                # Before the KV memory, which takes what is left.
                self._adapters = Adapters(
                    device,
                    kernels,
                    self.layout,
                    options.max_loras,
                    max_rows=options.max_step_tokens,
                    stream=self._stream,
                    adopt=True,
                    arena_option=options.adapter_arena_bytes,
                )
            if config.recurrent:
                self._states = StateArena(
                    device,
                    config,
                    dtype,
                    options.max_sequences,
                    snapshots=snapshots_within(device, config, dtype, options.snapshots),
                )
            num_blocks = options.blocks(device, config, dtype, weights.nbytes)
            self._kv = KvCache(device, config, dtype, num_blocks)
            spill_blocks, state_blocks = options.spill(config, dtype)
            self._spills = SpillStore(
                HostCopies(self._kv), spill_blocks, self._states, state_blocks
            )
            context = min(config.context, num_blocks * BLOCK_TOKENS)
            limits = Limits(
                options.max_step_tokens, options.max_sequences, context, num_blocks, config.vocab
            )
            self._batch = StepBatch(limits)
            self._sample = RowSampler(config.vocab)
            self._model = bind(
                config, weights, kernels, self._kv, self._batch, self._states, context
            )
        except BaseException:
            self._free()
            raise
        self.info = options.info(
            config,
            dtype,
            context=context,
            num_blocks=num_blocks,
            model_bytes=weights.nbytes,
            kv_bytes=self._kv.nbytes,
            pool=self._adapters.pool if self._adapters else None,
            states=self._states,
        )

    @classmethod
    def load(
        cls,
        model_dir: str | Path,
        device: Device,
        options: RunnerOptions | None = None,
        *,
        use_numba: bool = True,
    ) -> Runner:
        """Load a checkpoint folder and take over ``device``.

        Args:
            device: open and host addressable; once this returns, `close` closes it too.
            options: default `RunnerOptions()`.
            use_numba: run the numba kernels where numba is installed.

        Raises:
            ModelError: the checkpoint's fault; codes in `load_config` and `load_weights`.
            DeviceError: bad-argument, pool-too-large, kv-too-small, out-of-memory,
                attention-unavailable, and others.
        """
        options = RunnerOptions() if options is None else options
        if options.attention not in ("auto", "torch"):
            raise DeviceError(
                "this way to attend needs an accelerator",
                code="attention-unavailable",
                subject=options.attention,
                expected='attention="auto"',
                found=device.name,
            )
        path = Path(model_dir)
        config = load_config(path)
        weights, kernels = read(
            path, config, options.dtype, use_numba=use_numba, told=options.progress
        )
        linears = BaseLinears(path, kernels.dtype, config.to_lora_dims())
        return cls._warmed(lambda: cls(device, config, weights, kernels, linears, options), linears)

    def warm_up(self) -> None:
        """Run every kernel once; see `RunnerBase.warm_up`."""
        model, adapters = self._alive(), self._adapters
        rows = [RowInput(0, -1, 0, (0,), (0,), True)]
        n = self._batch.fill(rows)
        begin = time.perf_counter()
        if self._states is not None:
            self._states.begin(rows)
        with torch.inference_mode(), named_failure():
            model.embed(n)
            plan, row_slots = None, 0
            if adapters is not None:
                plan, row_slots = adapters.every_group(), adapters.set_rows([-1])
            h, delta = model.warm_up(n, plan, row_slots)
            model.head(h, delta, [0])
        if self._states is not None:
            self._states.drop(0)
        logger.info("kernels are ready after %.1f s", time.perf_counter() - begin)

    # Slots

    def relayout(
        self, max_loras: int, max_rank: int, residents: Sequence[Resident] = ()
    ) -> tuple[int, tuple[int, ...]]:
        """Exchange the pool for an empty one of ``max_loras`` slots, 1 or more, for ranks up to
        ``max_rank``, between steps; `layout` and `info` follow. Whatever is raised, the old pool is
        kept with all that is in it. Returns the bytes of the new arena, and how many of them each
        of ``residents``, who are to come back, will need.

        Raises:
            CommandError: as `Adapters.needs`.
            DeviceError: lora-off, or as `Adapters.remade`.
        """
        old = self._slots()
        needs = old.needs(residents, max_loras, max_rank)
        new = old.remade(max_loras, max_rank)
        self._exchange(new, max_rank)
        return new.pool.arena_bytes, needs

    # Steps

    def step(self, rows: Sequence[RowLike]) -> list[RowOutput]:
        """One forward pass; outputs in row order. A row with bad logits carries its own error.

        Raises:
            InternalError: bad-row, empty-slot, state-position, bad-snapshot, no-state-place.
                Nothing was touched.
            DeviceError: step-failed, runner-closed; the KV of this step's positions is undefined,
                and so are recurrent states and snapshots to be saved: these sequences go on from
                position 0 or another snapshot only.
        """
        model = self._alive()
        with torch.inference_mode(), named_failure():
            n = self._batch.fill(rows)
            unfed = nothing_fed(rows, self._batch)
            if unfed is not None:
                return unfed
            slots = slots_of(self._adapters, rows)
            if self._states is not None:
                self._states.begin(rows)
            outputs = self._run(model, rows, n, slots)
            if self._states is not None:
                self._states.save(rows)
                self._states.done(rows)
        return outputs

    def _run(
        self,
        model: HostModel,
        rows: Sequence[RowLike],
        n: int,
        slots: frozenset[int],
    ) -> list[RowOutput]:
        adapters, batch = self._adapters, self._batch
        plan = row_slots = None
        changed: frozenset[int] = frozenset()
        if adapters is not None:
            plan = adapters.plan(slots)
            if plan is not None:
                row_slots = adapters.set_rows(batch.slots)
                changed = adapters.token_matrices.of(slots)
        tokens, hidden = model.embed(n)
        if changed and adapters is not None:
            adapters.token_matrices.embed(changed, batch.slots, tokens, hidden, row_slots or 0)
        h, delta = model.layers(n, plan, row_slots or 0)
        sampling = [i for i, row in enumerate(rows) if row.sample]
        if not sampling:
            return step_outputs(rows, (), batch)
        wanted = [batch.last[i] for i in sampling]
        states, logits = model.head(h, delta, None if len(wanted) == n else wanted)
        if changed and adapters is not None:
            own = [rows[i].slot for i in sampling]
            adapters.token_matrices.logits(changed, own, states, logits)
        if self.logits_sink is not None:
            self.logits_sink([rows[i].seq for i in sampling], logits)
        return step_outputs(rows, self._choose([rows[i].seq for i in sampling], logits), batch)

    def _choose(self, seqs: list[int], logits: torch.Tensor) -> list[Choice]:
        def choose(rows: list[int], samplers: list[Sampler]) -> list[Choice]:
            whole = len(rows) == len(seqs)
            return self._sample(samplers, logits if whole else logits[rows])

        return self._sequences.choose(seqs, choose)

    # Life time

    def _alive(self) -> HostModel:
        if self._closed or self._model is None:
            raise DeviceError("the runner is closed", code="runner-closed")
        return self._model

    def _free(self) -> None:
        self._closed = True
        self._model = None
        self._sequences.clear()
        if self._spills is not None:
            self._spills.clear()
        # Last in, first out: queued work ends before the memory it uses is given back, and one
        # failure does not keep the rest.
        with ExitStack() as stack:
            stack.callback(self.base_rows.close)
            stack.callback(self._leftovers.close)
            if self._adapters is not None:
                stack.callback(self._adapters.close)
            if self._kv is not None:
                stack.callback(self._kv.close)
            if self._states is not None:
                stack.callback(self._states.close)
            stack.callback(self._device.destroy_stream, self._stream)
            stack.callback(self._device.synchronize, self._stream)
