"""The runner's side of the adapter pool: which slots are filled, and the LoRA groups of each layer.

What it owns: the pool, the four groups of a layer (q,k,v; o; gate,up; down), and per slot which
of them hold a pair. Invariants: a slot counts as filled only from a commit that succeeded to its
retire or the next commit; a group no row of the step needs is not launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ...errors import InternalError
from ..device import Device, Stream
from ..kernels.bgmv import LoraGroup, LoraSlice
from ..kernels.host import HostKernels
from ..lora.dims import LoraModule
from ..lora.image import SlotImage
from ..lora.layout import SlotLayout
from ..lora.pool import LoraPool

GROUPS: Final = (
    (LoraModule.Q_PROJ, LoraModule.K_PROJ, LoraModule.V_PROJ),
    (LoraModule.O_PROJ,),
    (LoraModule.GATE_PROJ, LoraModule.UP_PROJ),
    (LoraModule.DOWN_PROJ,),
)
"""Modules that read one input and write one fused output, in the order a layer runs them."""
MAX_PLANS: Final = 256

LayerPlan = tuple[LoraGroup | None, LoraGroup | None, LoraGroup | None, LoraGroup | None]
"""The groups to launch in one layer, in the order of `GROUPS`; ``None`` is nothing to do."""


class Adapters:
    """Slots and groups for one model.

    Args:
        max_loras: slots, 1 or more.
        max_rows: most tokens of a step (each token has a cell in the row->slot buffer).
        stream: the compute stream; commands are ordered on it.

    Raises:
        DeviceError: from `LoraPool`.
    """

    def __init__(
        self,
        device: Device,
        kernels: HostKernels,
        layout: SlotLayout,
        max_loras: int,
        *,
        max_rows: int,
        stream: Stream,
    ) -> None:
        self.pool = LoraPool(device, layout, max_loras, max_rows=max_rows)
        self._device, self._stream = device, stream
        layers = range(layout.dims.num_layers)
        self._groups = tuple(
            tuple(self._group(kernels, layout, layer, modules) for modules in GROUPS)
            for layer in layers
        )
        self._members = np.array(
            [[layout.pair_index[layer, m] for m in LoraModule] for layer in layers], np.intp
        )
        # Per filled slot: bool [layers, 4], the groups in which it has a pair.
        self._active: dict[int, npt.NDArray[np.bool_]] = {}
        self._overlays: set[int] = set()
        self._plans: dict[frozenset[int], tuple[LayerPlan, ...]] = {}

    def _group(
        self, kernels: HostKernels, layout: SlotLayout, layer: int, modules: Sequence[LoraModule]
    ) -> LoraGroup:
        slices = []
        column = 0
        for module in modules:
            index = layout.pair_index[layer, module]
            n_out = layout.pairs[index].n_out
            slices.append(LoraSlice(*self.pool.pair_tables(index), n_out, column))
            column += n_out
        k_in = layout.pairs[layout.pair_index[layer, modules[0]]].k_in
        return kernels.lora_group(
            tuple(slices), k_in=k_in, rank=layout.stride, max_loras=self.pool.max_loras
        )

    def commit(self, slot: int, image: SlotImage) -> None:
        """Fill ``slot``; the copy has landed when this returns. Raises as `LoraPool.commit`.

        After a failure the slot counts as empty, so that no row can run on half an image.
        """
        self._forget(slot)
        self.pool.commit(slot, image, self._stream)
        self._device.synchronize(self._stream)
        held = np.array(image.present, bool)[self._members]
        active = np.zeros((len(held), len(GROUPS)), bool)
        for index, modules in enumerate(GROUPS):
            active[:, index] = held[:, list(modules)].any(axis=1)
        if image.embed_rows or image.head_rows:
            self._overlays.add(slot)
        self._active[slot] = active

    def retire(self, slot: int) -> None:
        """Empty ``slot``: rows that name it are refused from here on. Idempotent."""
        self._forget(slot)
        self.pool.retire(slot, self._stream)
        self._device.synchronize(self._stream)

    def _forget(self, slot: int) -> None:
        self._active.pop(slot, None)
        self._overlays.discard(slot)
        self._plans.clear()

    def check(self, slot: int, seq: int) -> None:
        """Refuse a slot that holds no adapter.

        Raises:
            InternalError: empty-slot.
        """
        if slot != -1 and slot not in self._active:
            raise InternalError(
                "a row names a slot that holds no adapter",
                code="empty-slot",
                subject=f"sequence {seq}",
                expected=f"-1 or one of {sorted(self._active)}",
                found=slot,
            )

    def overlays(self, slots: frozenset[int]) -> frozenset[int]:
        """Those of ``slots`` whose adapter replaces token rows."""
        return slots & self._overlays

    def plan(self, slots: frozenset[int]) -> tuple[LayerPlan, ...] | None:
        """What to launch in each layer for rows in these filled slots; ``None`` for base only."""
        slots = slots - {-1}
        if not slots:
            return None
        found = self._plans.get(slots)
        if found is None:
            active = np.logical_or.reduce([self._active[slot] for slot in slots]).tolist()
            found = tuple(
                (
                    groups[0] if needed[0] else None,
                    groups[1] if needed[1] else None,
                    groups[2] if needed[2] else None,
                    groups[3] if needed[3] else None,
                )
                for groups, needed in zip(self._groups, active, strict=True)
            )
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            self._plans[slots] = found
        return found

    def every_group(self) -> tuple[LayerPlan, ...]:
        """A plan that launches all groups, to have their kernels compiled."""
        return tuple((g[0], g[1], g[2], g[3]) for g in self._groups)

    def set_rows(self, slots: Sequence[int]) -> int:
        """Write the slot of every token; returns the buffer's address."""
        self.pool.set_row_slots(slots, self._stream)
        self._device.synchronize(self._stream)
        return self.pool.row_slots_address

    def close(self) -> None:
        """Free the pool, once."""
        self._active.clear()
        self._plans.clear()
        self.pool.close()
