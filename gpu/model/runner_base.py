"""What every runner does alike, wherever its math runs: sequences, slots, and the end of it all.

What it owns: which sequences are open, and whether the runner is. The device and all memory are
the runner's, which frees them once, in `RunnerBase._free`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Generic, Self

from ...errors import DeviceError
from ..device import Device
from ..lora.image import SlotImage
from ..lora.layout import SlotLayout
from .adapters import Adapters
from .base_rows import BaseMatrices
from .config import ModelConfig
from .contract import LogitsSink, OpenSequences, RunnerInfo, named_failure
from .leftovers import Leftovers
from .linears import BaseLinears
from .sampling import SamplingParams
from .spill import HeldT, SpillStore
from .states import StateArena


class RunnerBase(ABC, Generic[HeldT]):
    """Of ``HeldT`` are the host copies of preempted sequences' blocks.

    Attributes:
        info: what is served.
        layout: of every slot, for those who stage (also when ``max_loras`` is 0).
        base_rows: the base model's matrices for staging; may be read by any thread until `close`.
        logits_sink: debug hook, see `LogitsSink`; ``None`` costs nothing.
    """

    info: RunnerInfo
    layout: SlotLayout
    base_rows: BaseMatrices
    logits_sink: LogitsSink | None

    def __init__(self, device: Device, config: ModelConfig) -> None:
        self._device = device
        self._closed = False
        self._sequences = OpenSequences(config.vocab, config.eos_ids)
        self._adapters: Adapters | None = None
        self._states: StateArena | None = None
        self._spills: SpillStore[HeldT] | None = None
        self._leftovers = Leftovers()
        self.logits_sink = None

    @classmethod
    def _warmed(cls, make: Callable[[], Self], linears: BaseLinears) -> Self:
        """The runner that ``make`` gives, warmed up; if that fails nothing is left open."""
        try:
            runner = make()
        except BaseException:
            linears.close()
            raise
        try:
            runner.warm_up()
        except BaseException:
            runner._free()
            raise
        return runner

    @abstractmethod
    def warm_up(self) -> None:
        """Run what a step runs once, so that no request waits for a compiler.

        Takes seconds the first time. Call it before the first step: it writes KV block 0.

        Raises:
            DeviceError: step-failed, runner-closed.
        """

    # Sequences

    def open_sequence(self, seq: int, prompt: Sequence[int], sampling: SamplingParams) -> None:
        """Make the sampler state of ``seq``.

        Raises:
            InternalError: sequence-open, too-many-sequences. RequestError: as `Sampler`.
        """
        self._alive()
        self._sequences.open(seq, prompt, sampling)

    def close_sequence(self, seq: int) -> None:
        """Forget sampler, recurrent state and host copy of ``seq``. Idempotent."""
        self._sequences.close(seq)
        self.drop_state(seq)
        if self._spills is not None:
            self._spills.drop(seq)

    def drop_state(self, seq: int) -> None:
        """Give up the recurrent state, if any, of a sequence that starts again. Idempotent."""
        if self._states is not None:
            self._states.drop(seq)

    def spill(self, seq: int, blocks: Sequence[int]) -> None:
        """Copy ``blocks`` to host memory for ``seq``; they may be written by steps that come later.

        Raises:
            DeviceError: runner-closed, step-failed. InternalError: as `SpillStore.spill`.
        """
        store = self._store()
        with self._copying():
            store.spill(seq, blocks)

    def restore(self, seq: int, places: Sequence[tuple[int, int]]) -> None:
        """Copy spilled blocks of ``seq`` back.

        Raises:
            DeviceError: runner-closed, step-failed. InternalError: as `SpillStore.restore`.
        """
        store = self._store()
        with self._copying():
            store.restore(seq, places)

    def _store(self) -> SpillStore[HeldT]:
        self._alive()
        assert self._spills is not None
        return self._spills

    def _copying(self) -> AbstractContextManager[None]:
        """Blocks are copied within it."""
        return named_failure()

    # Slots

    def commit(self, slot: int, image: SlotImage, extent: int | None = None) -> None:
        """Fill ``slot`` between steps. ``extent``: the offset in the arena that an image's annex is
        copied to, where images are copied. Raises DeviceError lora-off, and as `LoraPool.commit`.
        """
        self._slots().commit(slot, image, extent)

    def retire(self, slot: int) -> None:
        """Empty ``slot``. Raises DeviceError lora-off, bad-slot."""
        self._slots().retire(slot)

    def _slots(self) -> Adapters:
        self._alive()
        if self._adapters is None:
            raise DeviceError("this runner has no adapter slots", code="lora-off")
        return self._adapters

    def _exchange(self, new: Adapters, max_rank: int) -> None:
        """Serve from another pool, for ranks up to ``max_rank``; the one before is given up."""
        old = self._slots()
        self._adapters, self.layout = new, new.pool.layout
        self.info = self.info.with_pool(new.pool, max_rank)
        self._leftovers.give_up(old)

    # Life time

    def close(self) -> None:
        """Free everything and close the device. Idempotent."""
        if not self._closed:
            try:
                self._free()
            finally:
                self._device.close()

    @abstractmethod
    def _alive(self) -> object:
        """What steps run on. Raises DeviceError runner-closed."""

    @abstractmethod
    def _free(self) -> None:
        """Give back everything but the device, also of a runner that was only partly made."""
