"""The pool: one device allocation that holds every slot, and the tables kernels read.

What it owns: the slots' memory, the pair tables, the overlay counts and the row->slot buffer, all
at addresses that never change while the pool is open. Called by the device thread only, but for
`land`.

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
from .image import SlotImage
from .landing import Landing, landing_for
from .layout import Elem, SlotLayout, round_up

MAX_LORAS_LIMIT = 4096
MAX_ROWS_LIMIT = 65536


class LoraPool:
    """``max_loras`` slots of ``layout.slot_bytes`` bytes and their tables.

    A pool that adopts serves from the image itself, which lies in the same memory and has a slot's
    layout: a commit then writes the tables and copies no weights. It keeps the image until the
    slot's next commit or retire. Images that are lent are copied all the same.

    Args:
        device: where the memory lives; the pool frees what it took in `close`.
        layout: of every slot.
        max_loras: slots, 1..4096.
        max_rows: rows of the row->slot buffer, 1..65536.
        adopt: serve from images; for devices whose memory the CPU addresses, and kernels that find
            weights through the tables alone.
        ahead: have a place on the device where `land` brings one image before its commit, if there
            is room.

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
        self.device, self.layout, self.max_loras, self.max_rows = (
            device,
            layout,
            max_loras,
            max_rows,
        )
        self._adopt = adopt and device.host_addressable
        # Images that a slot serves from; more than one only after a commit that failed half way.
        self._held: list[list[SlotImage]] = [[] for _ in range(max_loras)]
        self.nbytes = max_loras * layout.slot_bytes
        free, _ = device.memory_info()
        if 2 * self.nbytes > free:
            raise DeviceError(
                "the adapter pool leaves too little memory; lower max_loras or max_lora_rank",
                code="pool-too-large",
                subject=f"{max_loras} slots of {layout.slot_bytes} bytes",
                expected=f"2 x pool <= {free} bytes free",
                found=2 * self.nbytes,
            )
        n_pairs = len(layout.pairs)
        # One host block mirrors all tables: a u64, b u64, scale f32, embed and head counts i32,
        # affine u64 (of no rows without an affine region).
        cells = n_pairs * max_loras
        self._a_off, self._b_off = 0, 8 * cells
        self._scale_off = 16 * cells
        self._embed_off = round_up(20 * cells, 16)
        self._head_off = round_up(self._embed_off + 4 * max_loras, 16)
        self._affine_off = round_up(self._head_off + 4 * max_loras, 16)
        n_affine = len(layout.affine_offsets)
        table_bytes = round_up(self._affine_off + 8 * n_affine * max_loras, 16)
        self._mirror = np.zeros(table_bytes, np.uint8)
        factors = self._mirror[: 16 * cells].view(np.uint64)
        self._factors = factors.reshape(2, n_pairs, max_loras)  # a, b
        scale = self._mirror[16 * cells : 20 * cells].view(np.float32)
        self._scale = scale.reshape(n_pairs, max_loras)
        self._embed_counts = self._mirror[self._embed_off :][: 4 * max_loras].view(np.int32)
        self._head_counts = self._mirror[self._head_off :][: 4 * max_loras].view(np.int32)
        affine = self._mirror[self._affine_off :][: 8 * n_affine * max_loras].view(np.uint64)
        self._affine = affine.reshape(n_affine, max_loras)
        self._rows = np.full(max_rows, -1, np.int32)
        offsets = [[p.a_off for p in layout.pairs], [p.b_off for p in layout.pairs]]
        self._offsets = np.array(offsets, np.uint64)
        self._affine_offsets = np.array(layout.affine_offsets, np.uint64)
        self._views: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._allocations: list[int] = []
        self._landing: Landing | None = None
        try:
            self.address = self._alloc(self.nbytes, "lora pool")
            self._tables = self._alloc(table_bytes, "lora tables")
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
            self._landing = landing_for(device, layout.slot_bytes) if ahead else None
        except BaseException:
            self.close()
            raise

    def _alloc(self, nbytes: int, label: str) -> int:
        address = self.device.alloc(nbytes, label=label)
        self._allocations.append(address)
        return address

    def _copy(self, dst: int, src: npt.NDArray[np.generic], stream: Stream) -> None:
        # Pageable source: it has been read when the call returns, so the mirror may change then.
        self.device.copy_h2d(dst, int(src.ctypes.data), int(src.nbytes), stream)

    def _write_tables(self, stream: Stream) -> None:
        self._copy(self._tables, self._mirror, stream)

    # Addresses kernels take

    @property
    def a_table(self) -> int:
        """Address of u64 ``[n_pairs, max_loras]``: absolute address of A, 0 = no pair."""
        return self._tables + self._a_off

    @property
    def b_table(self) -> int:
        """Address of u64 ``[n_pairs, max_loras]``: absolute address of B, 0 = no pair."""
        return self._tables + self._b_off

    @property
    def scale_table(self) -> int:
        """Address of float32 ``[n_pairs, max_loras]``, 0 = no pair."""
        return self._tables + self._scale_off

    @property
    def embed_count_table(self) -> int:
        """Address of int32 ``[max_loras]``: used rows of each slot's embedding overlay."""
        return self._tables + self._embed_off

    @property
    def head_count_table(self) -> int:
        """Address of int32 ``[max_loras]``: used rows of each slot's lm_head overlay."""
        return self._tables + self._head_off

    def pair_tables(self, pair: int) -> tuple[int, int, int]:
        """Addresses of pair ``pair``'s rows of the a, b and scale tables (``max_loras`` cells)."""
        cells = pair * self.max_loras
        return (
            self.a_table + 8 * cells,
            self.b_table + 8 * cells,
            self.scale_table + 4 * cells,
        )

    def affine_table(self, pair: int) -> int:
        """Address of pair ``pair``'s row of the affine table: u64 ``[max_loras]``, absolute address
        of mul, 0 = none. Only for layouts with an affine region."""
        return self._tables + self._affine_off + 8 * pair * self.max_loras

    def slot_address(self, slot: int) -> int:
        """Address of the first byte of ``slot``: until its next command where the pool adopts.
        Raises DeviceError bad-slot."""
        self._check(slot)
        held = self._held[slot]
        return held[-1].address if held else self.address + slot * self.layout.slot_bytes

    # Commands, in stream order

    def commit(self, slot: int, image: SlotImage, stream: Stream) -> None:
        """Copy or adopt ``image`` and rewrite the slot's column of every table.

        Nothing changes if this raises before the copy: DeviceError bad-slot, layout-mismatch
        (packed for another layout), pool-closed, or what the device raises.
        """
        self._check(slot)
        if image.fingerprint != self.layout.fingerprint() or image.nbytes != self.layout.slot_bytes:
            raise DeviceError(
                "the image was packed for another layout",
                code="layout-mismatch",
                subject=image.digest,
                expected=self.layout.fingerprint(),
                found=image.fingerprint,
            )
        kept = [image] if self._adopt and not image.lent else []
        if kept:
            base = image.address
        else:
            base = self.address + slot * self.layout.slot_bytes
            if self._landing is None or not self._landing.copy_to(base, image, stream):
                self.device.copy_h2d(base, image.address, image.nbytes, stream)
        cells = self._offsets + np.uint64(base)
        scales = image.scales
        if not all(image.present):
            absent = ~np.array(image.present, bool)
            cells[:, absent] = 0
            scales = np.where(absent, np.float32(0), scales)
        self._factors[:, :, slot] = cells
        self._scale[:, slot] = scales
        if len(self._affine):
            vectors = np.array(image.affine or (False,) * len(self._affine), bool)
            cells = np.where(vectors, self._affine_offsets + np.uint64(base), np.uint64(0))
            self._affine[:, slot] = cells
        self._embed_counts[slot] = image.embed_rows
        self._head_counts[slot] = image.head_rows
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
        if old or kept:
            self._held[slot] = kept
            self._views = {key: view for key, view in self._views.items() if key[0] != slot}

    def retire(self, slot: int, stream: Stream) -> None:
        """Set every table cell of ``slot`` to 0: rows that name it get no delta. Idempotent."""
        self._check(slot)
        self._factors[:, :, slot] = 0
        self._scale[:, slot] = self._affine[:, slot] = 0
        self._embed_counts[slot] = self._head_counts[slot] = 0
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
        return bool(self._factors[0, pair, slot] != 0)

    def scale(self, slot: int, pair: int) -> float:
        """Scale of that pair, 0.0 where absent (as of the last command)."""
        self._check(slot)
        return float(self._scale[pair, slot])

    def vectors(self, slot: int, pair: int) -> bool:
        """True when ``slot`` holds an adapter with mul and add there (as of the last command)."""
        self._check(slot)
        return bool(len(self._affine) and self._affine[pair, slot] != 0)

    def overlay_counts(self, slot: int) -> tuple[int, int]:
        """(embedding rows, lm_head rows) in use in ``slot``."""
        self._check(slot)
        return int(self._embed_counts[slot]), int(self._head_counts[slot])

    def view(self, slot: int, pair: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A ``[R, in]`` and B ``[out, R]`` of one pair, as tensors over the pool's own memory.

        Dtype bfloat16 or float32 after `Elem`. The tensors do not keep the pool alive: drop them
        before `close`. They are made once per (slot, pair), and again after an adopted image.

        Raises:
            DeviceError: bad-slot, pool-closed; not-host-addressable on a device whose memory the
                CPU cannot read.
        """
        found = self._views.get((slot, pair))
        if found is not None:
            return found
        base, layout = self.slot_address(slot), self.layout
        place = layout.pairs[pair]
        stride = place.stride
        made = (
            self._tensor(base + place.a_off, (stride, place.k_in)),
            self._tensor(base + place.b_off, (place.n_out, stride)),
        )
        self._views[slot, pair] = made
        return made

    def overlay_view(
        self, slot: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """embed_ids, embed_rows, head_ids, head_rows of ``slot`` cut to the rows in use.

        Ids are int32 ``[n]``, rows ``[n, hidden]``; ``None`` when the layout has no overlay.
        Raises as `view`. Only meaningful after the stream of the last command has passed it.
        """
        base, offsets = self.slot_address(slot), self.layout.overlay
        if offsets is None:
            return None
        hidden, (n_embed, n_head) = self.layout.dims.hidden, self.overlay_counts(slot)
        ids = (self.layout.overlay_rows,)
        rows = (self.layout.overlay_rows, hidden)
        return (
            self._tensor(base + offsets.embed_ids, ids, torch.int32)[:n_embed],
            self._tensor(base + offsets.embed_rows, rows)[:n_embed],
            self._tensor(base + offsets.head_ids, ids, torch.int32)[:n_head],
            self._tensor(base + offsets.head_rows, rows)[:n_head],
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
