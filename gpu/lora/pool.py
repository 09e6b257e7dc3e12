"""The pool: one device allocation that holds every slot and the arena, and the tables kernels read.

What it owns: the memory of slots and annexes, the pair tables, the overlay counts and the row->slot
buffer, all at addresses that never change while the pool is open. Called by the device thread only,
but for `land`.

Which part of the arena an annex gets is told it with the commit; that it lies in the arena and over
nobody else's is checked.

Invariants: a table cell is 0 exactly where the slot's adapter has no such pair; committing an image
rewrites all cells of that slot's column, so nothing of the previous adapter remains; other columns
keep their values. Everything is ordered on the given stream.

Tables are written by copying a host mirror in one piece: every cell of another slot is rewritten
with the value it has, and one commit costs one small copy on every kind of device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt
import torch

from ...errors import DeviceError
from ..device import Device, Stream
from .annex import ANNEX_ALIGN, round_up
from .extents import Extents
from .image import SlotImage
from .landing import Landing, Part, landing_for
from .layout import Elem, SlotLayout
from .tables import PoolTables

MAX_LORAS_LIMIT = 4096
MAX_ROWS_LIMIT = 65536


class LoraPool:
    """``max_loras`` slots of ``layout.slot_bytes`` bytes, the arena, and their tables.

    A pool that adopts serves from the image itself, which lies in the same memory and has a slot's
    layout: a commit then writes the tables and copies no weights. It keeps the image until the
    slot's next commit or retire. Images that are lent are copied all the same.

    Attributes:
        tables: the tables, and their addresses.
        address, arena_address: of the slots and of the arena.
        nbytes: of both.

    Args:
        device: where the memory lives; the pool frees what it took in `close`.
        layout: of every slot.
        max_loras: slots, 1..4096.
        max_rows: rows of the row->slot buffer, 1..65536.
        adopt: serve from images; for devices whose memory the CPU addresses, and kernels that find
            weights through the tables alone.
        ahead: have a place on the device where `land` brings one image before its commit, if there
            is room.
        arena_bytes: for the annexes of all slots together, a multiple of 256.

    Raises:
        DeviceError: bad-argument; pool-too-large, unless twice the pool fits in the free memory.
    """

    def __init__(
        self,
        device: Device,
        layout: SlotLayout,
        max_loras: int,
        *,
        max_rows: int = 1024,
        adopt: bool = False,
        ahead: bool = False,
        arena_bytes: int = 0,
    ) -> None:
        for name, value, high in (
            ("max_loras", max_loras, MAX_LORAS_LIMIT),
            ("max_rows", max_rows, MAX_ROWS_LIMIT),
        ):
            if type(value) is not int or not 1 <= value <= high:
                raise DeviceError(
                    "a pool parameter is out of range",
                    code="bad-argument",
                    subject=name,
                    expected=f"an integer in 1..{high}",
                    found=repr(value),
                )
        self.device, self.layout = device, layout
        self.max_loras, self.max_rows = max_loras, max_rows
        self._adopt = adopt and device.host_addressable
        # Images that a slot serves from; more than one only after a commit that failed half way.
        self._held: list[list[SlotImage]] = [[] for _ in range(max_loras)]
        self.arena_bytes = arena_bytes
        self._annexes = Extents(arena_bytes, max_loras)
        slots_bytes = max_loras * layout.slot_bytes
        arena_at = round_up(slots_bytes, ANNEX_ALIGN)
        self.nbytes = arena_at + arena_bytes if arena_bytes else slots_bytes
        free, _ = device.memory_info()
        if 2 * self.nbytes > free:
            raise DeviceError(
                "the adapter pool leaves too little memory; lower max_loras, max_lora_rank or "
                "adapter_arena_bytes",
                code="pool-too-large",
                subject=f"{max_loras} slots of {layout.slot_bytes} bytes, arena of {arena_bytes}",
                expected=f"2 x pool <= {free} bytes free",
                found=2 * self.nbytes,
            )
        self._rows = np.full(max_rows, -1, np.int32)
        self.tables = PoolTables(layout, max_loras)
        self._views: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._allocations: list[int] = []
        self._landing: Landing | None = None
        try:
            self.address = self._alloc(self.nbytes, "lora pool")
            self.arena_address = self.address + arena_at
            self.tables.address = self._alloc(self.tables.nbytes, "lora tables")
            self.row_slots_address = self._alloc(4 * max_rows, "lora row slots")
            stream = device.create_stream(label="lora pool start")
            try:
                if not self._adopt:  # else no page of it is touched before it is needed
                    device.memset(self.address, 0, self.nbytes, stream)
                self._write_tables(stream)
                self._copy(self.row_slots_address, self._rows, stream)
                device.synchronize(stream)
            finally:
                device.destroy_stream(stream)
            largest = layout.slot_bytes + min(layout.max_annex_bytes, arena_bytes)
            self._landing = landing_for(device, largest) if ahead else None
        except BaseException:
            self.close()
            raise

    def _alloc(self, nbytes: int, label: str) -> int:
        address = self.device.alloc(nbytes, label=label)
        self._allocations.append(address)
        return address

    def _copy(self, dst: int, src: npt.NDArray[np.generic], stream: Stream) -> None:
        # Pageable source: it has been read when the call returns, so the mirror may change then.
        address = int(src.__array_interface__["data"][0])
        self.device.copy_h2d(dst, address, int(src.nbytes), stream)

    def _write_tables(self, stream: Stream) -> None:
        self._copy(self.tables.address, self.tables.mirror, stream)

    # Addresses kernels take

    def pair_tables(self, pair: int) -> tuple[int, int, int]:
        """Addresses of pair ``pair``'s rows of the a, b and scale tables (``max_loras`` cells)."""
        cells, t = pair * self.max_loras, self.tables
        return t.a_table + 8 * cells, t.b_table + 8 * cells, t.scale_table + 4 * cells

    def affine_table(self, pair: int) -> int:
        """Address of pair ``pair``'s row of the affine table: u64 ``[max_loras]``, absolute address
        of mul, 0 = none. Only for layouts with an affine region."""
        return self.tables.affine_table + 8 * pair * self.max_loras

    def slot_address(self, slot: int) -> int:
        """Address of the first byte of ``slot``: until its next command where the pool adopts.
        Raises DeviceError bad-slot."""
        self._check(slot)
        held = self._held[slot]
        return held[-1].address if held else self.address + slot * self.layout.slot_bytes

    # Commands, in stream order

    def commit(
        self, slot: int, image: SlotImage, stream: Stream, extent: int | None = None
    ) -> None:
        """Copy or adopt ``image`` and rewrite the slot's column of every table.

        Args:
            extent: where in the arena its annex goes, a multiple of 256; used only where it is
                copied.

        No memory and no table changes if this raises before the copy: DeviceError bad-slot,
        layout-mismatch (packed for another layout), bad-extent, pool-closed, or what the device
        raises.
        """
        self._check(slot)
        layout, slot_bytes = self.layout, self.layout.slot_bytes
        whole = slot_bytes + image.annex_bytes
        if image.fingerprint != layout.fingerprint() or image.nbytes != whole:
            raise DeviceError(
                "the image was packed for another layout",
                code="layout-mismatch",
                subject=image.digest,
                expected=layout.fingerprint(),
                found=image.fingerprint,
            )
        kept = [image] if self._adopt and not image.lent else []
        self._annexes.clear(slot)  # what it held may be given to others by now
        if kept:
            base, annex_base = image.address, image.address + slot_bytes
        else:
            base = self.address + slot * slot_bytes
            parts = [Part(base, 0, slot_bytes)]
            annex_base = self.arena_address
            if image.annex is not None:
                annex_base += self._annexes.put(slot, image, extent)
                parts.append(Part(annex_base, slot_bytes, image.annex.nbytes))
            if self._landing is None or not self._landing.copy_to(parts, image, stream):
                for part in parts:
                    source = image.address + part.begin
                    self.device.copy_h2d(part.target, source, part.nbytes, stream)
        self.tables.fill(slot, image, base, annex_base)
        self._hold(slot, kept, stream)

    def land(self, image: SlotImage) -> bool:
        """Copy an image to the device ahead of its commit, from any thread and while steps run;
        true if the commit of this very image will find it there. Never raises."""
        if self._landing is None or image.fingerprint != self.layout.fingerprint():
            return False
        return self._landing.upload(image)

    def _hold(self, slot: int, kept: list[SlotImage], stream: Stream) -> None:
        """Write the tables; let go of the slot's old images when nothing can read them any more."""
        old = self._held[slot]
        self._held[slot] = old + kept
        self._write_tables(stream)
        if old:
            self.device.synchronize(stream)
        self._held[slot] = kept
        self._views = {
            key: view
            for key, view in self._views.items()
            if key[0] != slot or not (old or kept or self.layout.pairs[key[1]].annex)
        }

    def retire(self, slot: int, stream: Stream) -> None:
        """Set every table cell of ``slot`` to 0: rows that name it get no delta. Idempotent."""
        self._check(slot)
        self._annexes.clear(slot)
        self.tables.clear(slot)
        self._hold(slot, [], stream)

    def set_row_slots(self, slots: Sequence[int], stream: Stream) -> None:
        """Write the row->slot buffer: ``slots`` in row order, then -1 to the end.

        Raises:
            DeviceError: too-many-rows; bad-slot for a value that is neither -1 nor a slot.
        """
        if len(slots) > self.max_rows:
            raise DeviceError(
                "more rows than the row->slot buffer holds",
                code="too-many-rows",
                expected=f"at most {self.max_rows}",
                found=len(slots),
            )
        rows = np.asarray(slots, np.int32)
        if rows.size and not -1 <= int(rows.min()) <= int(rows.max()) < self.max_loras:
            bad = next(s for s in slots if not -1 <= s < self.max_loras)
            raise self._bad_slot(bad)
        self._rows[: len(slots)] = rows
        self._rows[len(slots) :] = -1
        self._copy(self.row_slots_address, self._rows, stream)

    # Reading

    def present(self, slot: int, pair: int) -> bool:
        """True when ``slot`` holds an adapter with that pair (as of the last command)."""
        self._check(slot)
        return bool(self.tables.a[pair, slot] != 0)

    def scale(self, slot: int, pair: int) -> float:
        """Scale of that pair, 0.0 where absent (as of the last command)."""
        self._check(slot)
        return float(self.tables.scale[pair, slot])

    def vectors(self, slot: int, pair: int) -> bool:
        """True when ``slot`` holds an adapter with mul and add there (as of the last command)."""
        self._check(slot)
        return bool(len(self.tables.affine) and self.tables.affine[pair, slot] != 0)

    def overlay_counts(self, slot: int) -> tuple[int, int]:
        """(embedding rows, lm_head rows) in use in ``slot``."""
        self._check(slot)
        return int(self.tables.embed_counts[slot]), int(self.tables.head_counts[slot])

    def view(self, slot: int, pair: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A ``[R, in]`` and B ``[out, R]`` of one pair, as tensors over the pool's own memory.

        Dtype bfloat16 or float32 after `Elem`. The tensors do not keep the pool alive: drop them
        before `close`. They are made once per (slot, pair), and again when it lies elsewhere.

        Raises:
            DeviceError: bad-slot, pool-closed; no-pair for one of an annex that is not there;
                not-host-addressable on a device whose memory the
                CPU cannot read.
        """
        found = self._views.get((slot, pair))
        if found is not None:
            return found
        place = self.layout.pairs[pair]
        a, b = self.pair_address(slot, pair)
        made = (
            self._tensor(a, (place.stride, place.k_in)),
            self._tensor(b, (place.n_out, place.stride)),
        )
        self._views[slot, pair] = made
        return made

    def pair_address(self, slot: int, pair: int) -> tuple[int, int]:
        """Addresses of A and B of one pair: until the slot's next command.

        Raises:
            DeviceError: bad-slot, pool-closed; no-pair for one of an annex that is not there.
        """
        base, place = self.slot_address(slot), self.layout.pairs[pair]
        if not place.annex:
            return base + place.a_off, base + place.b_off
        a, b = int(self.tables.a[pair, slot]), int(self.tables.b[pair, slot])
        if a == 0:
            raise DeviceError(
                "the slot's adapter has no such pair", code="no-pair", subject=f"slot {slot}"
            )
        return a, b

    def overlay_addresses(self, slot: int) -> tuple[int, int, int, int] | None:
        """Addresses of embed_ids, embed_rows, head_ids, head_rows of ``slot``, ``None`` without an
        overlay: until its next command. Raises DeviceError bad-slot, pool-closed."""
        self._check(slot)
        return self.tables.overlays[slot]

    def overlay_view(
        self, slot: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """embed_ids, embed_rows, head_ids, head_rows of ``slot``.

        Ids are int32 ``[n]``, rows ``[n, hidden]``; ``None`` when the adapter has no overlay.
        Raises as `view`. Only meaningful after the stream of the last command has passed it.
        """
        addresses = self.overlay_addresses(slot)
        if addresses is None:
            return None
        hidden, (n_embed, n_head) = self.layout.dims.hidden, self.overlay_counts(slot)
        embed_ids, embed_rows, head_ids, head_rows = addresses
        return (
            self._tensor(embed_ids, (n_embed,), torch.int32),
            self._tensor(embed_rows, (n_embed, hidden)),
            self._tensor(head_ids, (n_head,), torch.int32),
            self._tensor(head_rows, (n_head, hidden)),
        )

    def _tensor(
        self, address: int, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        if not self.device.host_addressable:
            raise DeviceError(
                "views need memory the CPU can read",
                code="not-host-addressable",
                subject=self.device.name,
            )
        elem = torch.bfloat16 if self.layout.elem is Elem.BF16 else torch.float32
        chosen = elem if dtype is None else dtype
        count = int(np.prod(shape))
        if count == 0:
            return torch.empty(shape, dtype=chosen)
        raw = (ctypes.c_char * (count * chosen.itemsize)).from_address(address)
        return torch.frombuffer(raw, dtype=chosen, count=count).reshape(shape)

    def _check(self, slot: int) -> None:
        if not self._allocations:
            raise DeviceError("the pool is closed", code="pool-closed")
        if not 0 <= slot < self.max_loras:
            raise self._bad_slot(slot)

    def _bad_slot(self, slot: int) -> DeviceError:
        return DeviceError(
            "no such slot",
            code="bad-slot",
            expected=f"0..{self.max_loras - 1}",
            found=slot,
        )

    def close(self) -> None:
        """Free everything the pool took, once. Finish the work that uses it first.

        What the device does not take back stays the pool's: the rest is freed all the same, and
        another call asks again.
        """
        self._views.clear()
        self._held = [[] for _ in self._held]
        with ExitStack() as stack:
            for address in reversed(self._allocations):
                stack.callback(self._free, address)
            if self._landing is not None:
                stack.callback(self._landing.close)

    def _free(self, address: int) -> None:
        self.device.free(address)
        self._allocations.remove(address)
