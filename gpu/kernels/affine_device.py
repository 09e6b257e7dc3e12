"""Factors and offsets per output on any `Device`: the kernel's spec, its host form, a group.

What it is: `affine.cu` as a `KernelSpec`, launched like the LoRA kernels of `lora_device`. It owns
no memory. Invariant: nothing is launched for no rows.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

import torch

from ...errors import DeviceError
from ..device import Device, KernelSpec, Stream
from .affine import AffineSlice, affine_reference
from .bgmv import MAX_SLICES
from .lora_device import MAX_ROWS, of_slices

THREADS: Final = 256


@cache
def affine_spec(dtype: torch.dtype) -> KernelSpec:
    """The kernel for outputs of bfloat16 or float32.

    Raises:
        DeviceError: bad-argument, for another dtype.
    """
    if dtype not in (torch.bfloat16, torch.float32):
        raise DeviceError(
            "no affine kernel for this dtype", code="bad-argument", subject="dtype", found=dtype
        )
    text = Path(__file__).with_name("affine.cu").read_text(encoding="utf-8")
    source = "#define F32 1\n" + text if dtype == torch.float32 else text

    def host(*args: int | float) -> None:
        _host_affine(dtype, tuple(int(arg) for arg in args))

    return KernelSpec("lora_affine", "p" * 5 + "i" * 13, host, source)


class DeviceAffineGroup:
    """Up to three pairs' vectors over one fused output, applied to all rows in one launch.

    Args:
        device: where everything lies.
        slices: tables, columns and widths; see `AffineSlice`.
        max_loras: cells of each table row.
        dtype: of the output, bfloat16 or float32.

    Raises:
        DeviceError: bad-argument, and what loading a kernel raises.
    """

    def __init__(
        self,
        device: Device,
        slices: tuple[AffineSlice, ...],
        *,
        max_loras: int,
        dtype: torch.dtype,
    ) -> None:
        if not 1 <= len(slices) <= MAX_SLICES:
            raise DeviceError(
                "an affine group the kernel cannot serve",
                code="bad-argument",
                expected=f"1 to {MAX_SLICES} slices",
                found=len(slices),
            )
        self._device = device
        self._kernel = device.load_kernel(affine_spec(dtype))
        self._max_loras = max_loras
        self._tables = of_slices(part.table for part in slices)
        self._shape = (
            *of_slices(part.n_out for part in slices),
            *of_slices(part.column for part in slices),
            *of_slices(part.add_after for part in slices),
        )
        self._tiles = -(-max(part.n_out for part in slices) // THREADS)
        self._n = len(slices)

    def apply(
        self, out_addr: int, out_stride: int, row_slot_addr: int, n_rows: int, stream: Stream
    ) -> None:
        """Queue out = mul * out + add for every row whose slot has vectors.

        Args:
            out_addr: address of column 0 of out.
            out_stride: elements between rows of out.
            row_slot_addr: address of int32 ``[n_rows]``, -1 = base; a slot outside the tables kills
                the device.
            n_rows: rows, at most 65535.
            stream: the order it takes.

        Raises:
            DeviceError: bad-argument, and what a launch raises.
        """
        if n_rows == 0:
            return
        if not 0 < n_rows <= MAX_ROWS:
            raise DeviceError(
                "rows the affine kernel cannot serve",
                code="bad-argument",
                expected=f"at most {MAX_ROWS}",
                found=n_rows,
            )
        self._device.launch(
            self._kernel,
            (self._tiles, n_rows, self._n),
            (THREADS, 1, 1),
            (
                *(out_addr, *self._tables, row_slot_addr),
                *(n_rows, out_stride, self._n, self._max_loras, *self._shape),
            ),
            stream,
        )


def _host_affine(dtype: torch.dtype, args: tuple[int, ...]) -> None:
    out_addr, tables, rows_addr = args[0], args[1:4], args[4]
    n_rows, out_stride, n_slices, max_loras = args[5:9]
    widths, columns, after = args[9:12], args[12:15], args[15:18]
    slices = tuple(AffineSlice(tables[j], after[j], widths[j], columns[j]) for j in range(n_slices))
    affine_reference(slices, max_loras, dtype, out_addr, out_stride, rows_addr, n_rows)
