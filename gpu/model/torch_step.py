"""One forward pass on a tensor space: eager for mixed steps, captured for decode steps.

What it owns: the step's device arrays, its logits and results, the way to attend, and the graphs.
Invariants: what a graph bakes is in its key (padded rows, LoRA or none, the KV blocks its attention
covers) or at an address that never changes; a graph is captured only after its shape ran eagerly
once, since CUDA loads kernels lazily and may not while capturing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

import torch

from ...errors import DeviceError
from ..device import Device, Stream
from ..graphs import BUCKETS, Case, GraphCache, GraphKey, bucket_of
from ..kernels.rope import BLOCK_TOKENS
from ..lora.image import SlotImage
from ..tensors import TensorSpace
from .adapters import Adapters, LayerPlan
from .batch import StepBatch
from .config import ModelConfig
from .rows import RowLike
from .states import StateArena
from .token_matrices import TokenMatrices
from .torch_attention import Attention
from .torch_batch import DeviceBatch
from .torch_deltas import Chunk, SlotViews, StepDeltas, split_rows
from .torch_gdn import StateStep
from .torch_kv import TorchKv
from .torch_model import Step, TorchModel
from .torch_overlay import Overlays
from .torch_rows import MixedRows, StepRows
from .torch_sampling import DeviceSampler

logger = logging.getLogger("rota.gpu.model.torch_step")

NOWHERE: Final[frozenset[tuple[int, int]]] = frozenset()
MAX_WARM: Final = 4096
"""Shapes remembered as run eagerly."""


def rows_of_buckets(max_sequences: int) -> int:
    """Rows of the largest padded decode step: never more than the next bucket."""
    return max(max_sequences, bucket_of(min(max_sequences, BUCKETS[-1])) or 0)


def span_of(blocks: int, most: int) -> int:
    """KV blocks a padded step covers: the power of two that holds ``blocks``, at most ``most``."""
    return min(1 << (blocks - 1).bit_length(), most)


class StepRunner:
    """Runs what `StepBatch` holds. Use it inside ``space.computing(stream)``.

    Args:
        attention: given over.
        graphs: ``None`` runs everything eagerly.

    Raises:
        DeviceError: what the allocations raise.
    """

    def __init__(
        self,
        device: Device,
        space: TensorSpace,
        stream: Stream,
        config: ModelConfig,
        dtype: torch.dtype,
        model: TorchModel,
        kv: TorchKv,
        states: StateArena | None,
        batch: StepBatch,
        adapters: Adapters | None,
        attention: Attention,
        graphs: GraphCache | None,
    ) -> None:
        self._device, self._space, self._stream = device, space, stream
        self._model, self._kv, self._states, self._batch = model, kv, states, batch
        self._adapters, self._attention, self._graphs = adapters, attention, graphs
        self._dtype = dtype
        limits = batch.limits
        self._rows = rows_of_buckets(limits.max_sequences)
        self._blocks = batch.block_tables.shape[1]
        self._warm: set[GraphKey] = set()
        self._views = self._overlays = None
        if adapters is not None:
            self._views = SlotViews(adapters.pool, space, dtype)
            self._overlays = Overlays(adapters.pool, space, dtype)
        self._logits_at: int | None = None
        self._arrays: DeviceBatch | None = None
        self._sampler: DeviceSampler | None = None
        try:
            nbytes = self._rows * config.vocab * dtype.itemsize
            self._logits_at = device.alloc(nbytes, label="logits")
            self._logits = space.view(self._logits_at, (self._rows, config.vocab), dtype)
            self._arrays = DeviceBatch(
                device,
                space,
                tokens=max(limits.max_step_tokens, self._rows),
                rows=self._rows,
                blocks=self._blocks,
            )
            self._sampler = DeviceSampler(device, space, config.vocab, self._rows, self._arrays)
        except BaseException:
            self.close()
            raise

    @property
    def captures(self) -> int:
        """Captures that succeeded, ever."""
        return 0 if self._graphs is None else self._graphs.captures

    def relayout(self, adapters: Adapters) -> None:
        """Go over to another pool: every graph is destroyed, for it bakes the old one's addresses.
        The caller has ended the stream's work, and frees the old pool after."""
        views = SlotViews(adapters.pool, self._space, self._dtype)
        overlays = Overlays(adapters.pool, self._space, self._dtype)
        if self._graphs is not None and self._graphs.drain():
            logger.warning("graphs of the old pool are left; none of them is replayed")
        self._space.forget()
        self._warm.clear()
        if self._views is not None:
            self._views.clear()
        self._adapters, self._views, self._overlays = adapters, views, overlays

    def committed(self, slot: int, image: SlotImage) -> None:
        """Tell what a slot holds now."""
        if self._overlays is not None:
            self._overlays.commit(slot, image)

    def warm(self, every_group: bool) -> None:
        """Run the one-row batch eagerly, with all LoRA kernels or none."""
        self._send([1], [-1], [], padded=1, twin=0)
        self._attention.plan(self.arrays.host(1, 0))
        self._decode(1, 1, "tokens" if every_group else "none")

    def needs_tokens(self, slots: frozenset[int]) -> bool:
        """Whether a step whose rows name these slots must know its tokens on the host."""
        return self._adapters is not None and bool(self._adapters.token_matrices.overlays(slots))

    def run(
        self,
        rows: Sequence[RowLike],
        n: int,
        slots: frozenset[int],
        sampling: list[int],
        fed: Sequence[tuple[int, int]],
        twin: int,
    ) -> tuple[torch.Tensor | None, list[int]]:
        """Queue the forward pass of the filled batch, argmax included.

        Args:
            n: tokens of the batch.
            slots: that its rows name.
            sampling: indices of the rows that sample.
            fed: (row, row of the last step's logits) of rows that step feeds.
            twin: the pinned block to use; no step in flight may have it.

        Returns:
            Logits on the device (``None`` if no row samples) and the row of each sampling row.
        """
        overlaid: frozenset[int] = frozenset()
        if self._adapters is not None:
            overlaid = self._adapters.token_matrices.overlays(slots)
        at_tokens = [(self._batch.last[row], place) for row, place in fed]
        bucket = bucket_of(n) if n == len(rows) and not overlaid else None
        if bucket is None or bucket > self._rows:
            return self._mixed(rows, n, slots, overlaid, sampling, at_tokens, twin)
        self._send([1] * n, self._batch.slots, [], at_tokens, padded=bucket, twin=twin)
        self._attention.plan(self.arrays.host(bucket, twin))
        longest = max(row.start for row in rows) // BLOCK_TOKENS + 1
        case: Case = "none"
        if self._adapters is not None and slots != {-1}:
            if self._adapters.token_matrices.deltas(slots):
                case = "tokens"
            else:
                case = "affine" if self._adapters.affine(slots) else "routed"
        span = span_of(longest, self._blocks) if self._attention.spans else 0
        self._replay(bucket, span, case)
        return (self._logits[:bucket], sampling) if sampling else (None, [])

    @property
    def arrays(self) -> DeviceBatch:
        """The step's arrays."""
        assert self._arrays is not None
        return self._arrays

    @property
    def sampler(self) -> DeviceSampler:
        """Chooses from the logits that `run` returns; it has seen them."""
        assert self._sampler is not None
        return self._sampler

    def _send(
        self,
        lengths: list[int],
        slots: Sequence[int],
        picked: list[int],
        fed: Sequence[tuple[int, int]] = (),
        *,
        padded: int,
        twin: int,
    ) -> tuple[Chunk, ...]:
        kernel_slots, chunks = split_rows(lengths, slots)
        states = self._states
        self.arrays.send(
            self._batch,
            twin=twin,
            n=len(kernel_slots),
            rows=len(lengths),
            fed=fed,
            kernel_slots=kernel_slots,
            picked=picked,
            places=() if states is None else states.held.tolist(),
            padded=padded,
            waste=self._kv.waste_cell,
            waste_place=0 if states is None else states.spare_place,
            stream=self._stream,
        )
        self._space.join(self._stream)
        return chunks

    # Decode steps

    def _replay(self, bucket: int, span: int, case: Case) -> None:
        key = GraphKey("decode", bucket, case, 1, span)
        if self._graphs is None or key not in self._warm:
            if len(self._warm) >= MAX_WARM:
                self._warm.clear()
            self._warm.add(key)
            self._decode(bucket, span, case)
            return

        def record() -> None:
            with self._space.recording():
                self._decode(bucket, span, case)

        try:
            self._graphs.run(key, self._stream, record)
        except (DeviceError, RuntimeError) as error:
            if getattr(error, "code", None) in ("device-dead", "device-closed"):
                raise
            logger.warning("decode steps run without graphs from now on: %s", error)
            self._device.synchronize(self._stream)  # a step in flight may replay one
            self._drop_graphs()
            self._decode(bucket, span, case)

    def _decode(self, rows: int, span: int, case: Case) -> None:
        """Queue a padded decode step over ``span`` blocks (0: all); nothing depends on values."""
        arrays, sampler = self.arrays, self.sampler
        tables, lens = arrays.tables[:rows, : span or self._blocks], arrays.lens[:rows]
        attend = self._attention.decode(tables, lens, self._kv.zero_cell)
        plan, tokens = None, arrays.tokens(rows)
        experts = shifted = NOWHERE
        matrices: TokenMatrices | None = None
        if case != "none" and self._adapters is not None:
            plan = self._adapters.every_group(affine=case != "routed")
            experts = self._adapters.every_half()
            shifted = NOWHERE if case == "routed" else experts
            matrices = self._adapters.token_matrices if case == "tokens" else None
        states = None if self._states is None else StateStep(arrays.places[:rows])
        h = self._model.embed(tokens)
        if matrices is not None:
            matrices.add_embed(None, tokens, h, arrays.row_slots)
            self._space.join(self._stream)
        step = Step(
            arrays.positions[:rows],
            arrays.mapping[:rows],
            attend,
            self._deltas(rows, plan, (), experts, shifted),
            states,
        )
        h = self._model.layers(h, step)
        logits, given = self._logits[:rows], self._model.states(h)
        logits.copy_(self._model.head(given))
        if matrices is not None:
            matrices.add_head(None, given, logits, arrays.row_slots)
            self._space.join(self._stream)
        sampler.greedy(logits)

    def _deltas(
        self,
        n: int,
        plan: tuple[LayerPlan, ...] | None,
        chunks: tuple[Chunk, ...],
        experts: frozenset[tuple[int, int]],
        shifted: frozenset[tuple[int, int]],
    ) -> StepDeltas | None:
        if self._adapters is None or self._views is None or (plan is None and not chunks):
            return None
        return StepDeltas(
            self._adapters.pool,
            self._views,
            self._space,
            self._stream,
            plan,
            self.arrays.row_slots,
            chunks,
            self.arrays.slots[:n],
            experts,
            shifted,
        )

    # Other steps

    def _mixed(
        self,
        rows: Sequence[RowLike],
        n: int,
        slots: frozenset[int],
        overlaid: frozenset[int],
        sampling: list[int],
        fed: Sequence[tuple[int, int]],
        twin: int,
    ) -> tuple[torch.Tensor | None, list[int]]:
        arrays, sampler, model = self.arrays, self.sampler, self._model
        picked = [self._batch.last[i] for i in sampling]
        by_kind = StepRows.of(rows)
        lengths = by_kind.lengths
        slots_of_rows = [row.slot for row in rows]
        chunks = self._send(lengths, slots_of_rows, picked, fed, padded=n, twin=twin)
        plan = None
        experts = shifted = NOWHERE
        matrices: TokenMatrices | None = None
        changed: frozenset[int] = frozenset()
        if self._adapters is not None:
            experts = self._adapters.expert_halves(slots)
            shifted = self._adapters.expert_halves(slots, vectors=True)
            in_chunks = {chunk.begin for chunk in chunks}
            starts = [last + 1 - k for last, k in zip(self._batch.last, lengths, strict=True)]
            others = (row.slot for row, at in zip(rows, starts, strict=True) if at not in in_chunks)
            plan = self._adapters.plan(frozenset(others))
            matrices = self._adapters.token_matrices
            changed = matrices.deltas(slots)
        tokens = arrays.tokens(n)
        h = model.embed(tokens)
        if overlaid and self._overlays is not None:
            self._overlays.embeddings(
                overlaid, self._batch.slots, self._batch.tokens[:n].numpy(), h
            )
        # Not the kernels' slots: those leave out what goes through GEMMs.
        own = arrays.slots[:n].to(torch.int32) if changed else None
        if own is not None and matrices is not None:
            matrices.add_embed(changed, tokens, h, own.data_ptr())
            self._space.join(self._stream)
        count = len(rows)
        host = arrays.host(count, twin)
        mixed = MixedRows(by_kind, arrays.tables[:count], arrays.lens[:count], host)
        step = Step(
            arrays.positions[:n],
            arrays.mapping[:n],
            self._attention.mixed(mixed, self._kv.zero_cell),
            self._deltas(n, plan, chunks, experts, shifted),
            None
            if self._states is None
            else mixed.states(self._states.held.tolist(), arrays.places),
        )
        h = model.layers(h, step)
        if not sampling:
            return None, []
        which = arrays.picked[: len(picked)]
        states = model.states(h.index_select(0, which))
        logits = self._logits[: len(picked)]
        logits.copy_(model.head(states))
        if overlaid and self._overlays is not None:
            self._overlays.logits(overlaid, [rows[i].slot for i in sampling], states, logits)
        if own is not None and matrices is not None:
            sampled = own.index_select(0, which)
            matrices.add_head(changed, states, logits, sampled.data_ptr())
            self._space.join(self._stream)
        sampler.greedy(logits)
        return logits, list(range(len(picked)))

    # Life time

    def _drop_graphs(self) -> None:
        graphs, self._graphs = self._graphs, None
        if graphs is not None:
            graphs.drain()
            self._space.forget()

    def close(self) -> None:
        """Destroy the graphs and free everything, once. End the stream's work first."""
        with ExitStack() as stack:
            address, self._logits_at = self._logits_at, None
            if address is not None:
                stack.callback(self._device.free, address)
            for part in (self._arrays, self._sampler):
                if part is not None:
                    stack.callback(part.close)
            if self._views is not None:
                stack.callback(self._views.clear)
            stack.callback(self._attention.close)
            stack.callback(self._drop_graphs)
