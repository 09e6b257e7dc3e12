"""The tables of a pool: where each slot's pairs, vectors and overlay lie, as absolute addresses.

What it owns: the host's mirror of the tables kernels read, and the places of overlays, which only
the host reads. Invariants: filling a slot rewrites all cells of its column, so nothing of the
previous adapter remains; a cell is 0 exactly where the slot's adapter has no such pair. Writing the
mirror to the device is the pool's.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .annex import round_up
from .image import SlotImage
from .layout import SlotLayout


class PoolTables:
    """Cells of ``max_loras`` slots.

    Attributes:
        mirror: uint8 ``[nbytes]``: a u64, b u64, scale f32, embed and head counts i32, affine u64
            (of no rows without an affine region).
        address: of the tables on the device, set by the pool.
    """

    def __init__(self, layout: SlotLayout, max_loras: int) -> None:
        self.address = 0
        n_pairs, n_affine = len(layout.pairs), len(layout.affine_offsets)
        cells = n_pairs * max_loras
        self._b_off, self._scale_off = 8 * cells, 16 * cells
        self._embed_off = round_up(20 * cells, 16)
        self._head_off = round_up(self._embed_off + 4 * max_loras, 16)
        self._affine_off = round_up(self._head_off + 4 * max_loras, 16)
        self.nbytes = round_up(self._affine_off + 8 * n_affine * max_loras, 16)
        self.mirror = np.zeros(self.nbytes, np.uint8)

        def part(begin: int, rows: int, item: int) -> npt.NDArray[np.uint8]:
            return self.mirror[begin : begin + rows * max_loras * item]

        shape = (n_pairs, max_loras)
        self._factors = part(0, 2 * n_pairs, 8).view(np.uint64).reshape(2, *shape)
        self.a, self.b = self._factors
        self.scale = part(self._scale_off, n_pairs, 4).view(np.float32).reshape(shape)
        self.embed_counts = part(self._embed_off, 1, 4).view(np.int32)
        self.head_counts = part(self._head_off, 1, 4).view(np.int32)
        self.affine = (
            part(self._affine_off, n_affine, 8).view(np.uint64).reshape(n_affine, max_loras)
        )
        #: Addresses of each slot's four overlay arrays.
        self.overlays: list[tuple[int, int, int, int] | None] = [None] * max_loras
        offsets = [[p.a_off for p in layout.pairs], [p.b_off for p in layout.pairs]]
        self._offsets = np.array(offsets, np.uint64)
        self._in_annex = np.array([p.annex for p in layout.pairs], bool)
        self._vectors = np.array(layout.affine_offsets, np.int64).view(np.uint64)

    @property
    def a_table(self) -> int:
        """Address of u64 ``[n_pairs, max_loras]``."""
        return self.address

    @property
    def b_table(self) -> int:
        """Address of u64 ``[n_pairs, max_loras]``."""
        return self.address + self._b_off

    @property
    def scale_table(self) -> int:
        """Address of float32 ``[n_pairs, max_loras]``."""
        return self.address + self._scale_off

    @property
    def embed_count_table(self) -> int:
        """Address of int32 ``[max_loras]``."""
        return self.address + self._embed_off

    @property
    def head_count_table(self) -> int:
        """Address of int32 ``[max_loras]``."""
        return self.address + self._head_off

    @property
    def affine_table(self) -> int:
        """Address of u64 ``[n_pairs, max_loras]``."""
        return self.address + self._affine_off

    def fill(self, slot: int, image: SlotImage, base: int, annex_base: int) -> None:
        """Write the slot's column.

        Args:
            base: address of the image's slot part.
            annex_base: address of its annex.
        """
        cells, vector_cells = self._offsets + np.uint64(base), self._vectors + np.uint64(base)
        scales, annex = image.scales, image.annex
        self.overlays[slot] = None
        if annex is not None:
            moved, mine = annex_base - annex.begin, self._in_annex
            # Offsets of pairs in an annex are from where the pair begins.
            starts = (annex.pairs[mine] + moved).view(np.uint64)
            cells[:, mine] = self._offsets[:, mine] + starts
            if len(vector_cells):
                vector_cells[mine] = (annex.vectors[mine] + moved).view(np.uint64)
            if (at := annex.overlay) is not None:
                self.overlays[slot] = (
                    moved + at.embed_ids,
                    moved + at.embed_rows,
                    moved + at.head_ids,
                    moved + at.head_rows,
                )
        if not all(image.present):
            absent = ~np.array(image.present, bool)
            cells[:, absent] = 0
            scales = np.where(absent, np.float32(0), scales)
        self._factors[:, :, slot] = cells
        self.scale[:, slot] = scales
        if len(self.affine):
            vectors = np.array(image.affine or (False,) * len(self.affine), bool)
            self.affine[:, slot] = np.where(vectors, vector_cells, np.uint64(0))
        self.embed_counts[slot] = image.embed_rows
        self.head_counts[slot] = image.head_rows

    def annex_bytes(self, slot: int, layout: SlotLayout) -> int:
        """Bytes of the annex the slot's adapter would have in ``layout``, which has the same pairs
        (of other strides)."""
        present = (self.a[:, slot] != 0).tolist()
        affine = (self.affine[:, slot] != 0).tolist() if layout.affine else ()
        rows = int(self.embed_counts[slot]), int(self.head_counts[slot])
        annex = layout.annex_for(present, affine, *rows)
        return 0 if annex is None else annex.nbytes

    def clear(self, slot: int) -> None:
        """Set every cell of the slot's column to 0."""
        self._factors[:, :, slot] = 0
        self.scale[:, slot] = self.affine[:, slot] = 0
        self.embed_counts[slot] = self.head_counts[slot] = 0
        self.overlays[slot] = None
