"""The LoRA delta on any `Device`: kernel specs, launch shapes, a group.

What it is: `lora.cu` (for bf16 and float32) as `KernelSpec`s with a host form each, so that one
launch code runs on the host device, the test driver and a GPU. It owns no memory: planes are the
caller's.

Invariants: the number of splits, hence the order of additions, depends on k_in alone, so a row's
result does not depend on how many rows are served with it; nothing is launched for no rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Final

import torch

from ...errors import DeviceError
from ..device import Device, Kernel, KernelSpec, Stream
from .bgmv import MAX_SLICES, LoraSlice
from .memory import strided_at, view_at

MAX_RANK: Final = 128
MAX_ROWS: Final = 65535
LONG_INPUT: Final = 4096
EXPAND_THREADS: Final = 128
SWITCHES: Final = {torch.bfloat16: "", torch.float32: "#define F32\n"}

Args = tuple[int | float, ...]


def chunk_of(k_in: int) -> int:
    """Elements of the input one block of the shrink reduces."""
    return 512 if k_in <= LONG_INPUT else 1024


def splits_of(k_in: int) -> int:
    """Planes of partial sums for an input of this length."""
    return -(-k_in // chunk_of(k_in))


def planes_bytes(n_rows: int, n_slices: int, rank: int, k_in: int) -> int:
    """Bytes of scratch one delta needs: float32 ``[splits, n_rows, n_slices, rank]``."""
    return 4 * splits_of(k_in) * n_rows * n_slices * rank


def shrink_warps(rank: int) -> int:
    """Warps of a shrink block, four ranks each (``SHRINK_WARPS`` of the source)."""
    return 4 if rank % 16 == 0 else 2


def expand_span(rank: int) -> int:
    """Output columns of an expand block (``EXPAND_THREADS * TILES`` of the source)."""
    return EXPAND_THREADS * (4 if rank <= 8 else 2 if rank <= 16 else 1)


@cache
def lora_specs(
    rank: int, chunk: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[KernelSpec, KernelSpec]:
    """Shrink and expand for one padded rank, chunk and element type.

    Raises:
        DeviceError: bad-argument, for a rank or a type the kernels are not made for.
    """
    if dtype not in SWITCHES:
        raise DeviceError(
            "no LoRA kernels for this element type",
            code="bad-argument",
            subject="dtype",
            expected="bfloat16 or float32",
            found=dtype,
        )
    if rank % 8 or not 8 <= rank <= MAX_RANK:
        raise DeviceError(
            "no LoRA kernels for this rank",
            code="bad-argument",
            subject="rank",
            expected=f"a multiple of 8 in 8..{MAX_RANK}",
            found=rank,
        )
    text = Path(__file__).with_name("lora.cu").read_text(encoding="utf-8")
    source = f"#define RANK {rank}\n#define CHUNK {chunk}\n{SWITCHES[dtype]}{text}"

    def shrink(*args: int | float) -> None:
        _host_shrink(rank, chunk, dtype, args)

    def expand(*args: int | float) -> None:
        _host_expand(rank, dtype, args)

    return (
        KernelSpec("lora_shrink", "p" * 6 + "i" * 5, shrink, source),
        KernelSpec("lora_expand", "p" * 12 + "i" * 11, expand, source, overlaps=True),
    )


def of_slices(values: Iterable[int]) -> tuple[int, ...]:
    """One value for each slice a kernel takes; 0 for those a group does not have."""
    given = tuple(values)
    return (*given, *(0,) * (MAX_SLICES - len(given)))


class Expand:
    """The launch that ends a delta: the sums in the planes times B, added to the output.

    Args:
        device: where everything lies.
        kernel: the expand of `lora_specs`, loaded on it.
        slices: tables, columns and widths; see `LoraSlice`.
        splits: planes of partial sums.
        rank: padded rank.
        max_loras: cells of each table row.
        planes: address of float32 ``[splits, rows, slices, rank]``.
    """

    def __init__(
        self,
        device: Device,
        kernel: Kernel,
        slices: tuple[LoraSlice, ...],
        *,
        splits: int,
        rank: int,
        max_loras: int,
        planes: int,
    ) -> None:
        self._device, self._kernel, self._planes = device, kernel, planes
        self._tables = (
            *of_slices(part.a_table for part in slices),
            *of_slices(part.b_table for part in slices),
            *of_slices(part.scales for part in slices),
        )
        self._counts = (splits, len(slices), max_loras)
        self._places = (
            *of_slices(part.n_out for part in slices),
            *of_slices(part.column for part in slices),
        )
        span = expand_span(rank)
        self._tiles = sum(-(-part.n_out // span) for part in slices)

    def launch(
        self, out_addr: int, out_stride: int, row_slot_addr: int, n_rows: int, stream: Stream
    ) -> None:
        """Queue it for 1 to `MAX_ROWS` rows; see `DeviceLoraGroup.apply`."""
        self._device.launch(
            self._kernel,
            (self._tiles, n_rows, 1),
            (EXPAND_THREADS, 1, 1),
            (
                *(out_addr, self._planes, *self._tables, row_slot_addr),
                *(n_rows, out_stride, *self._counts, *self._places),
            ),
            stream,
        )


class DeviceLoraGroup:
    """Up to three LoRA pairs that share one input, applied to all rows in two launches.

    Args:
        device: where everything lies.
        slices: tables, columns and widths; see `LoraSlice`.
        k_in: elements of an input row, a multiple of 8.
        rank: padded rank, a multiple of 8 in 8..128.
        max_loras: cells of each table row.
        planes: address of scratch that no other work uses at the same time.
        planes_nbytes: its size; `planes_bytes` says what a number of rows needs.
        dtype: of x, out, A and B: bfloat16 or float32.

    Raises:
        DeviceError: bad-argument, and what loading a kernel raises.
    """

    def __init__(
        self,
        device: Device,
        slices: tuple[LoraSlice, ...],
        *,
        k_in: int,
        rank: int,
        max_loras: int,
        planes: int,
        planes_nbytes: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        if not 1 <= len(slices) <= MAX_SLICES or k_in % 8 or k_in <= 0 or planes % 16:
            raise DeviceError(
                "a LoRA group the kernels cannot serve",
                code="bad-argument",
                expected=f"1 to {MAX_SLICES} slices, k_in a multiple of 8, planes on 16 bytes",
                found=f"{len(slices)} slices, k_in {k_in}, planes at {planes:#x}",
            )
        shrink, expand = lora_specs(rank, chunk_of(k_in), dtype)
        self._device = device
        self._shrink = device.load_kernel(shrink)
        self._planes, self._planes_nbytes = planes, planes_nbytes
        self._k_in, self._rank, self._max_loras = k_in, rank, max_loras
        self._splits, self._n = splits_of(k_in), len(slices)
        self._a = of_slices(part.a_table for part in slices)
        self._expand = Expand(
            device,
            device.load_kernel(expand),
            slices,
            splits=self._splits,
            rank=rank,
            max_loras=max_loras,
            planes=planes,
        )
        self._rank_tiles = rank // (4 * shrink_warps(rank)) * self._n
        self._block = (32 * shrink_warps(rank), 1, 1)

    def apply(
        self,
        x_addr: int,
        x_stride: int,
        out_addr: int,
        out_stride: int,
        row_slot_addr: int,
        n_rows: int,
        stream: Stream,
    ) -> None:
        """Queue out[row] += scale * delta for every row with an adapter.

        Args:
            x_addr: address of x ``[n_rows, k_in]``, on 16 bytes.
            x_stride: elements between rows of x, a multiple of 8.
            out_addr: address of column 0 of out; must not overlap x.
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
        need = planes_bytes(n_rows, self._n, self._rank, self._k_in)
        if x_addr % 16 or x_stride % 8 or not 0 < n_rows <= MAX_ROWS or need > self._planes_nbytes:
            raise DeviceError(
                "rows the LoRA kernels cannot serve",
                code="bad-argument",
                expected=f"x on 16 bytes, stride a multiple of 8, planes of {need} bytes",
                found=f"x at {x_addr:#x}, stride {x_stride}, planes of {self._planes_nbytes}",
            )
        self._device.launch(
            self._shrink,
            (self._rank_tiles, n_rows, self._splits),
            self._block,
            (
                *(self._planes, x_addr, *self._a, row_slot_addr),
                *(n_rows, self._k_in, x_stride, self._n, self._max_loras),
            ),
            stream,
        )
        self._expand.launch(out_addr, out_stride, row_slot_addr, n_rows, stream)


# Host forms: the same sums, in the order torch adds them.


def _cell(table: int, slot: int, max_loras: int) -> int:
    return int(view_at(table, (max_loras,), torch.int64)[slot])


def _host_shrink(rank: int, chunk: int, dtype: torch.dtype, args: Args) -> None:
    planes_addr, x_addr, a0, a1, a2, rows_addr = (int(arg) for arg in args[:6])
    n_rows, k_in, x_stride, n_slices, max_loras = (int(arg) for arg in args[6:])
    splits = -(-k_in // chunk)
    planes = view_at(planes_addr, (splits, n_rows, n_slices, rank), torch.float32)
    x = strided_at(x_addr, n_rows, k_in, x_stride, dtype)
    for row, slot in enumerate(view_at(rows_addr, (n_rows,), torch.int32).tolist()):
        for part, table in enumerate((a0, a1, a2)[:n_slices]):
            address = _cell(table, slot, max_loras) if slot >= 0 else 0
            if address == 0:
                continue
            a = view_at(address, (rank, k_in), dtype)
            for split in range(splits):
                span = slice(split * chunk, min(k_in, (split + 1) * chunk))
                planes[split, row, part] = a[:, span].float() @ x[row, span].float()


def _host_expand(rank: int, dtype: torch.dtype, args: Args) -> None:
    out_addr, planes_addr = int(args[0]), int(args[1])
    a_tables, b_tables, scales = args[2:5], args[5:8], args[8:11]
    rows_addr, n_rows, out_stride, splits, n_slices, max_loras = (int(arg) for arg in args[11:17])
    widths, columns = args[17:20], args[20:23]
    planes = view_at(planes_addr, (splits, n_rows, n_slices, rank), torch.float32)
    for row, slot in enumerate(view_at(rows_addr, (n_rows,), torch.int32).tolist()):
        for part in range(n_slices if slot >= 0 else 0):
            width = int(widths[part])
            b_addr = _cell(int(b_tables[part]), slot, max_loras)
            if b_addr == 0 or _cell(int(a_tables[part]), slot, max_loras) == 0:
                continue
            scale = view_at(int(scales[part]), (max_loras,), torch.float32)[slot]
            b = view_at(b_addr, (width, rank), dtype).float()
            total = torch.zeros(rank)
            for split in range(splits):
                total += planes[split, row, part]
            delta = (b @ total.to(dtype).float()).to(dtype).float()
            place = out_addr + dtype.itemsize * (row * out_stride + int(columns[part]))
            out = view_at(place, (width,), dtype)
            out.copy_(out.float() + scale * delta)
