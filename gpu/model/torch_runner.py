"""The runner of a model in torch on a tensor space: an accelerator, or the host in its place.

What it owns: what `gpu.model.runner.Runner` owns, the captured decode steps, and the arrays and
results of a step on the device. Same contract, same refusals; the difference is where the base
model's math runs, and that a row's last bits may depend on the size of its batch (a BLAS chooses).

A step whose rows all feed one token is padded to a bucket and replayed from a graph (`gpu.graphs`):
the first step of a shape runs eagerly, which loads its kernels, the next one is captured. Other
steps, and steps with a token overlay, run eagerly. Invariants: padding rows have slot -1 and write
KV nobody reads; a refused capture costs one log line and no step. Steps may be in flight (`begin`,
`torch_flights`): whatever else is asked for has its place behind them on the same stream.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from ...errors import DeviceError
from ..device import Device
from ..graphs import GraphCache
from ..kernels.rope import BLOCK_TOKENS
from ..lora.annex import Resident
from ..lora.image import SlotImage
from ..tensors import TensorSpace, open_space
from .adapters import Adapters
from .base_rows import BaseMatrices
from .batch import Limits, StepBatch
from .config import ModelConfig, load_config
from .contract import named_failure
from .linears import BaseLinears
from .options import RunnerOptions
from .rows import RowInput, RowLike, RowOutput
from .runner_base import RunnerBase
from .spill import SpillStore
from .states import StateArena, snapshots_within
from .torch_attention import AttentionSpec
from .torch_attention_choice import choose_attention
from .torch_families import bind, read
from .torch_flights import Flights, StepFlight
from .torch_kv import TorchKv
from .torch_lora import DeviceGroups, widest_input
from .torch_spill import PinnedCopies
from .torch_step import StepRunner, rows_of_buckets
from .weights import HybridWeights, Weights

logger = logging.getLogger("rota.gpu.model.torch_runner")


class TorchRunner(RunnerBase[list[int]]):
    """Use `TorchRunner.load`.

    ``logits_sink`` is called after sampling here, with logits in host memory.
    """

    def __init__(
        self,
        device: Device,
        space: TensorSpace,
        config: ModelConfig,
        weights: Weights | HybridWeights,
        dtype: torch.dtype,
        linears: BaseLinears,
        options: RunnerOptions,
        *,
        graphs: bool,
    ) -> None:
        super().__init__(device, config)
        self._space = space
        self._groups: DeviceGroups | None = None
        self._kv: TorchKv | None = None
        self._copies: PinnedCopies | None = None
        self._steps: StepRunner | None = None
        self._flights: Flights | None = None
        self.layout = options.layout(config, dtype)
        self.base_rows = BaseMatrices(weights.embed, weights.head_rows, linears)
        self._stream = device.create_stream(label="runner")
        padded = max(options.max_step_tokens, rows_of_buckets(options.max_sequences))
        captured = graphs and space.captures
        spec = AttentionSpec.of(
            device, space, self._stream, config, dtype, rows_of_buckets(options.max_sequences)
        )
        try:
            chosen = choose_attention(options.attention, spec, graphs=captured)
            with space.computing(self._stream):
                if options.max_loras:
                    self._groups = DeviceGroups(
                        device,
                        self._stream,
                        dtype,
                        max_rows=padded,
                        widest=widest_input(self.layout),
                        rank=self.layout.stride,
                    )
                    # Before the KV memory, which takes what is left.
                    self._adapters = Adapters(
                        device,
                        self._groups,
                        self.layout,
                        options.max_loras,
                        max_rows=1,
                        stream=self._stream,
                        arena_option=options.adapter_arena_bytes,
                    )
                if config.recurrent:
                    self._states = StateArena(
                        device,
                        config,
                        dtype,
                        options.max_sequences,
                        space=space,
                        spare=1,
                        snapshots=snapshots_within(device, config, dtype, options.snapshots),
                    )
                attention = chosen.make(spec)
                num_blocks = options.blocks(device, config, dtype, weights.nbytes)
                self._kv = TorchKv(device, space, config, dtype, num_blocks)
                spill_blocks, state_blocks = options.spill(config, dtype)
                self._copies = PinnedCopies(
                    device, space, self._stream, self._kv, max(spill_blocks, 1)
                )
                self._spills = SpillStore(self._copies, spill_blocks, self._states, state_blocks)
                context = min(config.context, num_blocks * BLOCK_TOKENS)
                limits = Limits(
                    options.max_step_tokens,
                    options.max_sequences,
                    context,
                    num_blocks,
                    config.vocab,
                )
                self._batch = StepBatch(limits)
                self._steps = StepRunner(
                    device,
                    space,
                    self._stream,
                    config,
                    dtype,
                    bind(config, weights, space, self._kv, self._states, context),
                    self._kv,
                    self._states,
                    self._batch,
                    self._adapters,
                    attention,
                    GraphCache(device) if captured else None,
                )
                self._flights = Flights(
                    device,
                    space,
                    self._stream,
                    self._batch,
                    self._sequences,
                    self._states,
                    self._steps,
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
            attention=chosen.name,
            attention_passed=chosen.passed_over,
        )

    @classmethod
    def load(
        cls,
        model_dir: str | Path,
        device: Device,
        options: RunnerOptions | None = None,
        *,
        graphs: bool = True,
        space: TensorSpace | None = None,
    ) -> TorchRunner:
        """Load a checkpoint folder and take over ``device``.

        Args:
            options: default `RunnerOptions()`.
            graphs: replay decode steps from graphs where the space can capture.
            space: of the device; ``None`` opens the one that fits it.

        Raises:
            ModelError: the checkpoint's fault.
            DeviceError: bad-argument, pool-too-large, kv-too-small, out-of-memory,
                cuda-unavailable, attention-unavailable, and others.
        """
        options = RunnerOptions() if options is None else options
        path = Path(model_dir)
        config = load_config(path)
        chosen = open_space(device) if space is None else space
        weights, served_in = read(path, config, options.dtype, chosen, options.progress)
        linears = BaseLinears(path, served_in, config.to_lora_dims())
        return cls._warmed(
            lambda: cls(
                device, chosen, config, weights, served_in, linears, options, graphs=graphs
            ),
            linears,
        )

    def warm_up(self) -> None:
        """Run one decode step of each kind eagerly; see `RunnerBase.warm_up`."""
        steps = self._alive()
        begin = time.perf_counter()
        row = RowInput(0, -1, 0, (0,), (0,), True)
        with torch.inference_mode(), named_failure(), self._space.computing(self._stream):
            for every_group in {False, self._adapters is not None}:
                self._batch.fill([row])
                if self._states is not None:
                    self._states.begin([row])
                steps.warm(every_group)
        self.drop_state(row.seq)
        self._device.synchronize(self._stream)
        logger.info("kernels are ready after %.1f s", time.perf_counter() - begin)

    @contextmanager
    def _copying(self) -> Iterator[None]:
        with torch.inference_mode(), named_failure(), self._space.computing(self._stream):
            yield

    # Slots

    def commit(self, slot: int, image: SlotImage, extent: int | None = None) -> None:
        """See `RunnerBase.commit`."""
        steps = self._alive()
        super().commit(slot, image, extent)
        steps.committed(slot, image)

    def land(self, image: SlotImage) -> bool:
        """Bring a staged image to the device before its commit; see `LoraPool.land`. Any thread."""
        adapters = self._adapters
        return adapters is not None and adapters.pool.land(image)

    def relayout(
        self, max_loras: int, max_rank: int, residents: Sequence[Resident] = ()
    ) -> tuple[int, tuple[int, ...]]:
        """See `Runner.relayout`; the graphs of the old pool are destroyed."""
        steps, old, old_groups = self._alive(), self._slots(), self._groups
        assert old_groups is not None
        needs = old.needs(residents, max_loras, max_rank)
        with self._space.computing(self._stream):
            groups = old_groups.of_rank(replace(self.layout, max_rank=max_rank).stride)
            with ExitStack() as undo:
                undo.callback(groups.close)
                new = old.remade(max_loras, max_rank, groups)
                undo.callback(new.close)
                steps.relayout(new)
                undo.pop_all()
        self._groups = groups
        self._exchange(new, max_rank)
        self._leftovers.give_up(old_groups)
        return new.pool.arena_bytes, needs

    # Steps

    @property
    def captured(self) -> int:
        """Decode steps captured so far."""
        return self._alive().captures

    def step(self, rows: Sequence[RowLike]) -> list[RowOutput]:
        """See `Runner.step`."""
        return self.begin(rows).finish()

    def begin(self, rows: Sequence[RowLike]) -> StepFlight:
        """Queue a step, whose rows the one before may feed. With two in flight already, the first
        of them is waited for. A step that cannot be queued raises as `step` does; what goes wrong
        later is raised by `StepFlight.finish`, and by those of the steps behind it.
        """
        self._alive()
        assert self._flights is not None
        return self._flights.begin(rows, self._adapters, self.logits_sink)

    # Life time

    def _alive(self) -> StepRunner:
        if self._closed or self._steps is None:
            raise DeviceError("the runner is closed", code="runner-closed")
        return self._steps

    def _free(self) -> None:
        self._closed = True
        self._sequences.clear()
        # Last in, first out: queued work ends, then graphs go, then the memory they name.
        with ExitStack() as stack:
            stack.callback(self.base_rows.close)
            stack.callback(self._leftovers.close)
            for part in (self._groups, self._adapters, self._kv, self._states, self._copies):
                if part is not None:
                    stack.callback(part.close)
            stack.callback(self._device.destroy_stream, self._stream)
            if self._flights is not None:
                stack.callback(self._flights.close)
            if self._steps is not None:
                stack.callback(self._steps.close)
            stack.callback(self._device.synchronize, self._stream)
        self._steps = None
