"""The runner's side of the adapter pool: which slots are filled, and the LoRA groups of each layer.

What it owns: the pool, the groups of every layer (modules that share an input and an output), and
per slot which of them hold a pair. Invariants: a slot counts as filled only from a commit that
succeeded to its retire or the next commit; a group no row of the step needs is not launched, nor
its affine part unless one of the rows' adapters has vectors there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from ...errors import InternalError
from ..device import Device, Stream
from ..kernels.affine import AffineSlice
from ..kernels.bgmv import LoraSlice
from ..lora.annex import Resident, arena_bytes, check_residents
from ..lora.dims import TOKEN_MODULES, LoraModule
from ..lora.image import SlotImage
from ..lora.layout import SlotLayout, affine_step
from ..lora.pool import LoraPool
from .groups import Affine, Delta, DeltaThenAffine, GroupMaker, LateVectors
from .rows import RowLike
from .token_matrices import TokenMatrices

GROUPS: Final = (
    (LoraModule.Q_PROJ, LoraModule.K_PROJ, LoraModule.V_PROJ),
    (LoraModule.O_PROJ,),
    (LoraModule.GATE_PROJ, LoraModule.UP_PROJ),
    (LoraModule.DOWN_PROJ,),
    (LoraModule.IN_PROJ_QKV, LoraModule.IN_PROJ_Z),
    (LoraModule.IN_PROJ_B, LoraModule.IN_PROJ_A),
    (LoraModule.OUT_PROJ,),
    (LoraModule.ROUTER,),
    (LoraModule.SHARED_GATE_PROJ, LoraModule.SHARED_UP_PROJ),
    (LoraModule.SHARED_DOWN_PROJ,),
    (LoraModule.SHARED_EXPERT_GATE,),
)
"""Modules that read one input and write side by side into one output."""
QKV, ATTN_OUT, GATE_UP, DOWN, IN_QKV_Z, IN_B_A, GDN_OUT = range(7)
ROUTER, SHARED_GATE_UP, SHARED_DOWN, SHARED_GATE = range(7, 11)
OF_EXPERT: Final = (
    (LoraModule.EXPERT_GATE_PROJ, LoraModule.EXPERT_UP_PROJ),
    (LoraModule.EXPERT_DOWN_PROJ,),
)
"""The groups of one expert. In a plan they follow `GROUPS`: the first of every expert in turn, then
the second of every expert; a plan of a pool without room for them ends before."""
FIRST_EXPERT: Final = len(GROUPS)
MAX_PLANS: Final = 256


_Held = tuple[tuple[bool, ...], tuple[bool, ...]]
LayerPlan = tuple[Delta | None, ...]
"""What to launch in one layer, in the order of `GROUPS`; ``None`` is nothing to do."""


class Adapters:
    """Slots and groups for one model.

    Attributes:
        pool: the slots' memory and tables.
        token_matrices: what the filled slots change in embed_tokens and lm_head.

    Args:
        max_loras: slots, 1 or more.
        max_rows: most tokens of a step (each token has a cell in the row->slot buffer).
        adopt: see `LoraPool`.
        arena_option: bytes of the pool's arena, or ``None`` for the default; see
            `gpu.lora.annex.arena_bytes`.
        stream: the compute stream; commands are ordered on it.

    Raises:
        DeviceError: from `LoraPool`.
    """

    def __init__(
        self,
        device: Device,
        kernels: GroupMaker,
        layout: SlotLayout,
        max_loras: int,
        *,
        max_rows: int,
        stream: Stream,
        adopt: bool = False,
        arena_option: int | None = None,
    ) -> None:
        self._arena_option = arena_option
        self.pool = LoraPool(
            device,
            layout,
            max_loras,
            max_rows=max_rows,
            adopt=adopt,
            ahead=not device.host_addressable,
            arena_bytes=arena_bytes(arena_option, layout.max_annex_bytes, max_loras),
        )
        self._adopt = adopt
        self._device, self._kernels, self._stream = device, kernels, stream
        members = [(modules, 0) for modules in GROUPS]
        if layout.dims.expert_adapters:
            members += [(mods, e) for mods in OF_EXPERT for e in range(layout.dims.experts)]
        try:
            self._groups = tuple(
                tuple(self._group(kernels, layout, layer, *member) for member in members)
                for layer in range(layout.dims.num_layers)
            )
            self._with_affine = tuple(
                tuple(
                    lora
                    and DeltaThenAffine(lora, self._affine_group(kernels, layout, layer, modules))
                    # Those of experts are made when first applied: they are many.
                    for lora, modules in zip(groups, GROUPS, strict=False)
                )
                for layer, groups in enumerate(self._groups if layout.affine else ())
            )
        except BaseException:
            self.pool.close()
            raise
        self._members = tuple(members)
        self._routed: dict[tuple[int, int], DeltaThenAffine] = {}
        group_of = {(m, e): i for i, (modules, e) in enumerate(members) for m in modules}
        self.token_matrices = TokenMatrices(self.pool, kernels)
        # The pairs of the token matrices come last, and are of no layer.
        pairs = [pair for pair in layout.pairs if pair.module not in TOKEN_MODULES]
        self._pair_layers = np.array([pair.layer for pair in pairs], np.intp)
        self._pair_groups = np.array(
            [group_of[pair.module, pair.expert] for pair in pairs], np.intp
        )
        # Per filled slot: int [layers, groups], 0 where the group has nothing, 1 a pair, 2 vectors.
        self._active: dict[int, npt.NDArray[np.int8]] = {}
        # What the last image held, and that: most adapters of an engine hold the same pairs.
        self._last: tuple[_Held, npt.NDArray[np.int8]] | None = None
        self._plans: dict[frozenset[int], tuple[LayerPlan, ...]] = {}

    def _group(
        self,
        kernels: GroupMaker,
        layout: SlotLayout,
        layer: int,
        modules: Sequence[LoraModule],
        expert: int,
    ) -> Delta | None:
        if not layout.dims.applies_to_layer(layer, modules[0]):
            return None
        slices = []
        column = 0
        for module in modules:
            index = layout.pair_index[layer, module] + expert
            n_out = layout.pairs[index].n_out
            slices.append(LoraSlice(*self.pool.pair_tables(index), n_out, column))
            column += n_out
        first = layout.pairs[layout.pair_index[layer, modules[0]]]
        return kernels.lora_group(
            tuple(slices), k_in=first.k_in, rank=first.stride, max_loras=self.pool.max_loras
        )

    def _affine_group(
        self,
        kernels: GroupMaker,
        layout: SlotLayout,
        layer: int,
        modules: Sequence[LoraModule],
        expert: int = 0,
    ) -> Affine:
        slices = []
        column = 0
        for module in modules:
            index = layout.pair_index[layer, module] + expert
            n_out = layout.pairs[index].n_out
            table = self.pool.affine_table(index)
            slices.append(AffineSlice(table, affine_step(n_out), n_out, column))
            column += n_out
        return kernels.affine_group(tuple(slices), max_loras=self.pool.max_loras)

    def commit(self, slot: int, image: SlotImage, extent: int | None = None) -> None:
        """Fill ``slot``, and ``extent`` of the arena; the image has landed when this returns.
        Raises as `LoraPool.commit`.

        After a failure the slot counts as empty, so that no row can run on half an image.
        """
        self._forget(slot)
        self.pool.commit(slot, image, self._stream, extent)
        self._device.synchronize(self._stream)
        self.token_matrices.commit(slot, image)
        held = image.present, image.affine
        if self._last is None or self._last[0] != held:
            self._last = held, self._needs(image)
        self._active[slot] = self._last[1]

    def _needs(self, image: SlotImage) -> npt.NDArray[np.int8]:
        needs = np.array(image.present, np.int8)
        if image.affine:
            needs[np.array(image.affine)] = 2
        active = np.zeros((len(self._groups), len(self._groups[0])), np.int8)
        in_layers = needs[: len(self._pair_layers)]
        np.maximum.at(active, (self._pair_layers, self._pair_groups), in_layers)
        active.flags.writeable = False
        return active

    def retire(self, slot: int) -> None:
        """Empty ``slot``: rows that name it are refused from here on. Idempotent."""
        self._forget(slot)
        self.pool.retire(slot, self._stream)
        self._device.synchronize(self._stream)

    def _forget(self, slot: int) -> None:
        self._active.pop(slot, None)
        self.token_matrices.forget(slot)
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

    def plan(self, slots: frozenset[int]) -> tuple[LayerPlan, ...] | None:
        """What to launch in each layer for rows in these filled slots; ``None`` for base only."""
        slots = slots - {-1}
        if not slots:
            return None
        found = self._plans.get(slots)
        if found is None:
            active = np.maximum.reduce([self._active[slot] for slot in slots]).tolist()
            found = tuple(self._layer_plan(layer, needed) for layer, needed in enumerate(active))
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            self._plans[slots] = found
        return found

    def _layer_plan(self, layer: int, needed: Sequence[int]) -> LayerPlan:
        return tuple(
            None
            if not need
            else self._vectors_of(layer, i)
            if need == 2
            else self._groups[layer][i]
            for i, need in enumerate(needed)
        )

    def _vectors_of(self, layer: int, i: int) -> Delta | None:
        """A group with its vectors."""
        if i < FIRST_EXPERT:
            return self._with_affine[layer][i]
        found, lora = self._routed.get((layer, i)), self._groups[layer][i]
        if found is None and lora is not None:
            make = partial(
                self._affine_group, self._kernels, self.pool.layout, layer, *self._members[i]
            )
            found = self._routed[layer, i] = DeltaThenAffine(lora, LateVectors(make))
        return found

    def expert_halves(
        self, slots: frozenset[int], *, vectors: bool = False
    ) -> frozenset[tuple[int, int]]:
        """(layer, half of `OF_EXPERT`) where adapters in these filled slots have experts' pairs, or
        ``vectors`` there."""
        slots = slots - {-1}
        layers, width = len(self._groups), len(self._groups[0])
        if not slots or width == FIRST_EXPERT:
            return frozenset()
        active = np.maximum.reduce([self._active[slot] for slot in slots])[:, FIRST_EXPERT:]
        found = active == 2 if vectors else active > 0
        halves = found.reshape(layers, len(OF_EXPERT), -1).any(2)
        return frozenset((int(layer), int(half)) for layer, half in np.argwhere(halves))

    def every_half(self) -> frozenset[tuple[int, int]]:
        """Every (layer, half) of a pool with room for experts' pairs."""
        if len(self._groups[0]) == FIRST_EXPERT:
            return frozenset()
        return frozenset((i, half) for i in range(len(self._groups)) for half in range(2))

    def affine(self, slots: frozenset[int]) -> bool:
        """True if an adapter in these filled slots has vectors in a layer."""
        return any(bool((self._active[slot] == 2).any()) for slot in slots if slot >= 0)

    def every_group(self, *, affine: bool = True) -> tuple[LayerPlan, ...]:
        """A plan that launches all groups, whatever the slots hold; ``affine``: and their vectors,
        where slots have room for any."""
        all_of = (2 if self._with_affine and affine else 1,) * len(GROUPS)
        all_of += (1,) * (len(self._groups[0]) - len(GROUPS))
        return tuple(self._layer_plan(layer, all_of) for layer in range(len(self._groups)))

    def set_rows(self, slots: Sequence[int]) -> int:
        """Write the slot of every token; returns the buffer's address."""
        self.pool.set_row_slots(slots, self._stream)
        self._device.synchronize(self._stream)
        return self.pool.row_slots_address

    def needs(
        self, residents: Sequence[Resident], max_loras: int, max_rank: int
    ) -> tuple[int, ...]:
        """Bytes that each resident will need in the arena of slots of that number and rank.

        Raises:
            CommandError: as `check_residents`.
        """
        layout, tables = replace(self.pool.layout, max_rank=max_rank), self.pool.tables
        needs = tuple(tables.annex_bytes(r.slot, layout) for r in residents)
        arena = arena_bytes(self._arena_option, layout.max_annex_bytes, max_loras)
        check_residents(residents, needs, arena)
        return needs

    def remade(self, max_loras: int, max_rank: int, kernels: GroupMaker | None = None) -> Adapters:
        """Empty slots of another number and rank, beside these (which the caller closes when all
        work on them is queued): the new pool's pre-flight, twice its size within the free memory,
        counts these as used. ``kernels``: if not those of these. No captured step may still hold
        their addresses.

        Raises:
            DeviceError: pool-too-large, bad-argument, or what the device raises; nothing changed.
        """
        layout = replace(self.pool.layout, max_rank=max_rank)
        new = Adapters(
            self._device,
            self._kernels if kernels is None else kernels,
            layout,
            max_loras,
            max_rows=self.pool.max_rows,
            stream=self._stream,
            adopt=self._adopt,
            arena_option=self._arena_option,
        )
        try:
            self._device.synchronize(self._stream)  # the old ones may go now
        except BaseException:
            new.close()
            raise
        return new

    def close(self) -> None:
        """Free the pool, once."""
        self._active.clear()
        self._plans.clear()
        self.pool.close()


def slots_of(adapters: Adapters | None, rows: Sequence[RowLike]) -> frozenset[int]:
    """The slots a step's rows name, each of them filled.

    Args:
        adapters: ``None`` in a runner without slots.

    Raises:
        InternalError: empty-slot.
    """
    slots = frozenset(row.slot for row in rows)
    if slots == {-1}:
        return slots
    for row in rows:
        if adapters is not None:
            adapters.check(row.slot, row.seq)
        elif row.slot != -1:
            raise InternalError(
                "a row names a slot, and this runner has none",
                code="empty-slot",
                subject=f"sequence {row.seq}",
                expected=-1,
                found=row.slot,
            )
    return slots
