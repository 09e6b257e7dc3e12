"""An embedding's LoRA delta on any `Device`: the look-up's spec, its host form, a group.

What it is: `lookup.cu` as a `KernelSpec`, and `lora_device.Expand` behind it. It owns no
memory: planes are the caller's. Invariants: those of `lora_device`.

Formula: PEFT 0.21, `peft/tuners/lora/layer.py` (`Embedding.forward`): scale * B A[:, token].
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

import torch

from ...errors import DeviceError
from ..device import Device, KernelSpec, Stream
from .bgmv import LoraSlice
from .lora_device import MAX_ROWS, SWITCHES, Args, Expand, lora_specs
from .memory import view_at

THREADS: Final = 128


@cache
def lookup_spec(rank: int, dtype: torch.dtype) -> KernelSpec:
    """The look-up for one padded rank and element type, both as `lora_specs` takes them."""
    text = Path(__file__).with_name("lookup.cu").read_text(encoding="utf-8")

    def host(*args: int | float) -> None:
        _host_lookup(rank, dtype, args)

    return KernelSpec(
        "lora_lookup", "ppppiii", host, f"#define RANK {rank}\n{SWITCHES[dtype]}{text}"
    )


class DeviceLookupGroup:
    """The pair of an embedding, applied to all rows in two launches; see `LookupGroup`.

    Args:
        device: where everything lies.
        part: tables, and the width of the output; A is ``[rank, vocab]``.
        vocab: columns of A.
        rank: padded rank, a multiple of 8 in 8..128.
        max_loras: cells of each table row.
        planes: address of scratch that no other work uses at the same time.
        planes_nbytes: its size, ``4 * rank`` bytes a row.
        dtype: of out, A and B: bfloat16 or float32.

    Raises:
        DeviceError: bad-argument, and what loading a kernel raises.
    """

    def __init__(
        self,
        device: Device,
        part: LoraSlice,
        *,
        vocab: int,
        rank: int,
        max_loras: int,
        planes: int,
        planes_nbytes: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        # The shrink that the expand is made with does not matter: the look-up takes its place.
        expand = lora_specs(rank, 512, dtype)[1]
        self._device, self._a_table = device, part.a_table
        self._lookup = device.load_kernel(lookup_spec(rank, dtype))
        self._expand = Expand(
            device,
            device.load_kernel(expand),
            (part,),
            splits=1,
            rank=rank,
            max_loras=max_loras,
            planes=planes,
        )
        self._planes, self._planes_nbytes = planes, planes_nbytes
        self._vocab, self._rank, self._max_loras = vocab, rank, max_loras

    def apply(
        self,
        tokens_addr: int,
        out_addr: int,
        out_stride: int,
        row_slot_addr: int,
        n_rows: int,
        stream: Stream,
    ) -> None:
        """Queue out[row] += scale * B A[:, token] for every row with an adapter.

        Args:
            tokens_addr: address of int64 ``[n_rows]``; a token outside the vocabulary, of a row
                whose slot has the pair, kills the device.
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
        need = 4 * n_rows * self._rank
        if not 0 < n_rows <= MAX_ROWS or need > self._planes_nbytes:
            raise DeviceError(
                "rows the look-up of an embedding cannot serve",
                code="bad-argument",
                expected=f"at most {MAX_ROWS}, planes of {need} bytes",
                found=f"{n_rows}, planes of {self._planes_nbytes}",
            )
        self._device.launch(
            self._lookup,
            (-(-n_rows * self._rank // THREADS), 1, 1),
            (THREADS, 1, 1),
            (
                *(self._planes, tokens_addr, self._a_table, row_slot_addr),
                *(n_rows, self._vocab, self._max_loras),
            ),
            stream,
        )
        self._expand.launch(out_addr, out_stride, row_slot_addr, n_rows, stream)


def _host_lookup(rank: int, dtype: torch.dtype, args: Args) -> None:
    planes_addr, tokens_addr, a_table, rows_addr = (int(arg) for arg in args[:4])
    n_rows, vocab, max_loras = (int(arg) for arg in args[4:])
    planes = view_at(planes_addr, (n_rows, rank), torch.float32)
    tokens = view_at(tokens_addr, (n_rows,), torch.int64).tolist()
    for row, slot in enumerate(view_at(rows_addr, (n_rows,), torch.int32).tolist()):
        cell = int(view_at(a_table, (max_loras,), torch.int64)[slot]) if slot >= 0 else 0
        if cell:
            planes[row] = view_at(cell, (rank, vocab), dtype)[:, tokens[row]].float()
