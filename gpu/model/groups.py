"""What adds the deltas of adapters to an output, and who makes such things for a device.

What it owns: nothing; the protocols the host's and the accelerator's groups follow, and groups with
their vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..kernels.affine import AffineSlice
from ..kernels.bgmv import LoraSlice


class Delta(Protocol):
    """What a layer calls after the linear that ``out`` came from; see `LoraGroup.apply`."""

    def apply(
        self,
        x_addr: int,
        x_stride: int,
        out_addr: int,
        out_stride: int,
        row_slot_addr: int,
        n_rows: int,
    ) -> None: ...


class Affine(Protocol):
    """The factors and offsets of a group's outputs; see `AffineGroup.apply`."""

    def apply(self, out_addr: int, out_stride: int, row_slot_addr: int, n_rows: int) -> None: ...


class Lookup(Protocol):
    """The delta of an embedding, added where its rows were looked up; see `LookupGroup.apply`."""

    def apply(
        self, tokens_addr: int, out_addr: int, out_stride: int, row_slot_addr: int, n_rows: int
    ) -> None: ...


class GroupMaker(Protocol):
    """Makes the groups of one model, for its device and dtype; see `HostKernels`."""

    def lora_group(
        self, slices: tuple[LoraSlice, ...], *, k_in: int, rank: int, max_loras: int
    ) -> Delta:
        """A group of pairs that share one input."""
        ...

    def affine_group(self, slices: tuple[AffineSlice, ...], *, max_loras: int) -> Affine:
        """The vectors of such a group; asked for only with an affine layout."""
        ...

    def lookup_group(self, part: LoraSlice, *, vocab: int, rank: int, max_loras: int) -> Lookup:
        """The pair of the embedding; asked for only of layouts with room for one."""
        ...


class DeltaThenAffine:
    """A group's delta and then its vectors: y = mul * (y + delta) + add."""

    def __init__(self, lora: Delta, affine: Affine) -> None:
        self.lora, self.affine = lora, affine

    def apply(
        self,
        x_addr: int,
        x_stride: int,
        out_addr: int,
        out_stride: int,
        row_slot_addr: int,
        n_rows: int,
    ) -> None:
        """See `LoraGroup.apply`."""
        self.lora.apply(x_addr, x_stride, out_addr, out_stride, row_slot_addr, n_rows)
        self.affine.apply(out_addr, out_stride, row_slot_addr, n_rows)


class LateVectors:
    """A group's vectors that are made when they are first applied."""

    def __init__(self, make: Callable[[], Affine]) -> None:
        self._make = make
        self._made: Affine | None = None

    def apply(self, out_addr: int, out_stride: int, row_slot_addr: int, n_rows: int) -> None:
        """See `AffineGroup.apply`."""
        if self._made is None:
            self._made = self._make()
        self._made.apply(out_addr, out_stride, row_slot_addr, n_rows)
