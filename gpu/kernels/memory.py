"""Views of raw host memory for the torch references, and scratch memory for the numba kernels.

A view does not keep the memory alive, so it is made, used and dropped inside one call. `Scratch`
owns its memory; one thread at a time may run kernels with it.
"""

from __future__ import annotations

import ctypes

import torch


def view_at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a writable contiguous tensor of `shape` over the memory that starts at `address`."""
    count = 1
    for size in shape:
        count *= size
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    buffer = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype, count=count).view(shape)


def strided_at(
    address: int, rows: int, columns: int, stride: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return a writable view [rows, columns] over `address`, rows `stride` elements apart."""
    if rows == 0 or columns == 0:
        return torch.empty((rows, columns), dtype=dtype)
    flat = view_at(address, ((rows - 1) * stride + columns,), dtype)
    return flat.as_strided((rows, columns), (stride, 1))


class Scratch:
    """Host memory that only grows; its contents live for one kernel call.

    Attributes:
        address: of the memory, 16-byte aligned; changes when it grows.
        size: bytes there are.
    """

    __slots__ = ("_memory", "address", "size")

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.address = 0
        self.size = 0

    def at_least(self, size: int) -> int:
        """Return the address of at least `size` bytes."""
        if size > self.size:
            self._memory = torch.empty(size, dtype=torch.uint8)
            self.address = self._memory.data_ptr()
            self.size = size
        return self.address
