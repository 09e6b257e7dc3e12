"""The table refresh on any `Device`: the kernel's spec, its host form, its launch.

What it is: `tables.cu` as a `KernelSpec`. It owns no memory. Invariant: only cells of the given
slot are written, so rows of other slots may be served while it runs.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from ...errors import DeviceError
from ..device import Device, Kernel, KernelSpec, Stream

PAIRS_PER_BLOCK: Final = 128


@cache
def refresh_spec() -> KernelSpec:
    """The kernel that rewrites one slot's column of the tables; see `refresh_tables`."""
    text = Path(__file__).with_name("tables.cu").read_text(encoding="utf-8")
    return KernelSpec("lora_refresh", "p" * 7 + "piii", _host_refresh, text)


@dataclass(frozen=True, slots=True)
class Columns:
    """Addresses of the tables ``[n_pairs, max_loras]`` and of what fills them.

    Attributes:
        a_table: u64. b_table: u64. scale_table: float32.
        a_offsets: u64 ``[n_pairs]``, bytes from a slot's start. b_offsets: likewise.
        n_pairs: rows of the tables.
        max_loras: cells in a row.
    """

    a_table: int
    b_table: int
    scale_table: int
    a_offsets: int
    b_offsets: int
    n_pairs: int
    max_loras: int


def refresh_tables(
    device: Device,
    kernel: Kernel,
    columns: Columns,
    slot: int,
    stream: Stream,
    *,
    base: int = 0,
    present: int = 0,
    scales: int = 0,
) -> None:
    """Rewrite the cells of ``slot`` on the stream and nothing else.

    Args:
        device: of all addresses.
        kernel: `refresh_spec` loaded on it.
        columns: the tables.
        slot: whose cells.
        stream: the order it takes.
        base: address of the slot's first byte; 0 empties the slot.
        present: address of u8 ``[n_pairs]`` on the device, unused with base 0.
        scales: address of float32 ``[n_pairs]`` on the device, unused with base 0.

    Raises:
        DeviceError: bad-argument for a slot outside the tables, and what the launch raises.
    """
    if not 0 <= slot < columns.max_loras:
        raise DeviceError(
            "no such slot",
            code="bad-argument",
            subject="slot",
            expected=f"0..{columns.max_loras - 1}",
            found=slot,
        )
    args = (
        *(columns.a_table, columns.b_table, columns.scale_table),
        *(columns.a_offsets, columns.b_offsets, present, scales),
        *(base, slot, columns.max_loras, columns.n_pairs),
    )
    grid = (-(-columns.n_pairs // PAIRS_PER_BLOCK), 1, 1)
    device.launch(kernel, grid, (PAIRS_PER_BLOCK, 1, 1), args, stream)


def _array(address: int, count: int, dtype: type[np.generic]) -> Any:
    raw: Any = (ctypes.c_char * (count * np.dtype(dtype).itemsize)).from_address(address)
    return np.frombuffer(raw, dtype)


def _host_refresh(*args: int | float) -> None:
    a_table, b_table, scale_table, a_off, b_off, present, scales, base, slot, loras, pairs = (
        int(arg) for arg in args
    )
    targets = [
        _array(address, pairs * loras, kind).reshape(pairs, loras)[:, slot]
        for address, kind in ((a_table, np.uint64), (b_table, np.uint64), (scale_table, np.float32))
    ]
    if base == 0:
        for column in targets:
            column[:] = 0
        return
    on = _array(present, pairs, np.uint8) != 0
    targets[0][:] = np.where(on, _array(a_off, pairs, np.uint64) + np.uint64(base), 0)
    targets[1][:] = np.where(on, _array(b_off, pairs, np.uint64) + np.uint64(base), 0)
    targets[2][:] = np.where(on, _array(scales, pairs, np.float32), 0)
