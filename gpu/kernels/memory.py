"""Views of raw host memory for the torch references of kernels that take addresses.

Owns nothing: a view does not keep the memory alive, so it is made, used and dropped inside one
call.
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
