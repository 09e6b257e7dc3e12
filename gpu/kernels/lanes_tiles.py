"""Matrix tiles for numba kernels on processors with AMX. Imports numba.

A processor with AMX has eight tiles of up to sixteen rows of 64 bytes. A kernel sets their sizes
with `tile_config` before anything else here and gives them back with `tile_release`: other code of
the same thread, such as a library, finds them as if nobody had used them. Tile numbers are part of
an instruction, so each operation says which tiles it touches; a kernel uses them as

    0..3  sums, fp32 [rows of x, 16 outputs]
    4..7  operands: weights [16 pairs, 16 outputs, 2] bf16, and rows of x [rows, 32] bf16

A product of tiles adds 32 products to each sum: the even ones in order, the odd ones in order,
these two together, and that to the sum, every addition rounded to nearest. It takes denormals as
zero and gives zero for them.

Numbers of the permission: Linux, arch/x86/include/uapi/asm/prctl.h and Documentation/arch/x86/
xstate.rst. Instructions and the configuration's layout: Intel, Software Developer's Manual, vol. 1,
chapter 18.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import ctypes
import os
import platform
import sys
from functools import cache
from typing import Any, Final

import llvmlite.binding
from llvmlite import ir

from .lanes import INDEX, call, lowered, types

_SYS_ARCH_PRCTL: Final = 158
_REQUEST_PERMISSION: Final = 0x1023
_TILE_DATA: Final = 18
_FEATURES: Final = ("amx-tile", "amx-bf16", "avx512f", "avx512bw", "avx512bf16")

_I8 = ir.IntType(8)
_I64 = ir.IntType(64)
_VOID = ir.VoidType()
TILE_BYTES: Final = 1024
_ROW_BYTES = ir.Constant(_I64, 64)


def why_no_tiles() -> str | None:
    """Why this process cannot use tiles, or ``None`` when it can.

    The first call asks the system for the process's permission, which holds for all its threads.
    """
    return _asked()


@cache
def _asked() -> str | None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "tiles need Linux on x86-64"
    found = llvmlite.binding.get_host_cpu_features()
    missing = [name for name in _FEATURES if not found.get(name, False)]
    if missing:
        return f"the processor has no {', '.join(missing)}"
    libc: Any = ctypes.CDLL(None, use_errno=True)
    words = (_SYS_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)
    if libc.syscall(*(ctypes.c_long(word) for word in words)) != 0:
        return f"the system does not permit tiles: {os.strerror(ctypes.get_errno())}"
    return None


def has_tiles() -> bool:
    """Whether this process may use tiles of bf16."""
    return why_no_tiles() is None


def _tile(number: int) -> Any:
    return ir.Constant(_I8, number)


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _I8.as_pointer())


def _zero(builder: Any, tiles: int) -> None:
    for tile in range(tiles):
        call(builder, "llvm.x86.tilezero", _VOID, [_tile(tile)])


def _load(builder: Any, tile: int, address: Any, stride: Any = _ROW_BYTES) -> None:
    place = _pointer(builder, address)
    call(builder, "llvm.x86.tileloadd64", _VOID, [_tile(tile), place, stride])


def _multiply(builder: Any, total: int, x: int, w: int) -> None:
    call(builder, "llvm.x86.tdpbf16ps", _VOID, [_tile(total), _tile(x), _tile(w)])


def _store(builder: Any, tiles: int, address: Any) -> None:
    for tile in range(tiles):
        at = builder.add(address, ir.Constant(_I64, TILE_BYTES * tile))
        place = _pointer(builder, at)
        call(builder, "llvm.x86.tilestored64", _VOID, [_tile(tile), place, _ROW_BYTES])


@lowered
def tile_config(typingctx: Any, address: Any) -> Any:
    """Take the tiles with the sizes at `address` (64 bytes); all of them become zero."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        call(builder, "llvm.x86.ldtilecfg", _VOID, [_pointer(builder, args[0])])
        return context.get_dummy_value()

    return types.void(INDEX), codegen


@lowered
def tile_release(typingctx: Any) -> Any:
    """Give the tiles back."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        call(builder, "llvm.x86.tilerelease", _VOID, [])
        return context.get_dummy_value()

    return types.void(), codegen


@lowered
def tile_zero1(typingctx: Any) -> Any:
    """Sum 0 becomes zero."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _zero(builder, 1)
        return context.get_dummy_value()

    return types.void(), codegen


@lowered
def tile_zero4(typingctx: Any) -> Any:
    """All four sums become zero."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _zero(builder, 4)
        return context.get_dummy_value()

    return types.void(), codegen


@lowered
def tile_store1(typingctx: Any, address: Any) -> Any:
    """Sum 0 to `address`, its rows 64 bytes apart."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _store(builder, 1, args[0])
        return context.get_dummy_value()

    return types.void(INDEX), codegen


@lowered
def tile_store4(typingctx: Any, address: Any) -> Any:
    """All four sums to `address`, one after the other."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _store(builder, 4, args[0])
        return context.get_dummy_value()

    return types.void(INDEX), codegen


@lowered
def tile_step1(typingctx: Any, x: Any, stride: Any, w: Any) -> Any:
    """Sum 0 += x w: rows of x `stride` bytes apart in tile 7, weights in tile 4."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _load(builder, 7, args[0], args[1])
        _load(builder, 4, args[2])
        _multiply(builder, 0, 7, 4)
        return context.get_dummy_value()

    return types.void(INDEX, INDEX, INDEX), codegen


@lowered
def tile_step4(typingctx: Any, x: Any, stride: Any, w: Any, apart: Any) -> Any:
    """Sum j += x w_j for four w_j `apart` bytes from each other: x in tile 7, weights in 4..6."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _load(builder, 7, args[0], args[1])
        at = args[2]
        for j in range(4):
            _load(builder, 4 + j % 3, at)
            _multiply(builder, j, 7, 4 + j % 3)
            at = builder.add(at, args[3])
        return context.get_dummy_value()

    return types.void(INDEX, INDEX, INDEX, INDEX), codegen


@lowered
def tile_step22(typingctx: Any, x0: Any, x1: Any, w0: Any, w1: Any) -> Any:
    """Sums 0, 1 += x0 w0, x0 w1; sums 2, 3 += x1 w0, x1 w1: sixteen rows of x each, side by side;
    weights in tiles 4 and 5, x in 6 and 7."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _load(builder, 4, args[2])
        _load(builder, 6, args[0])
        _multiply(builder, 0, 6, 4)
        _load(builder, 5, args[3])
        _multiply(builder, 1, 6, 5)
        _load(builder, 7, args[1])
        _multiply(builder, 2, 7, 4)
        _multiply(builder, 3, 7, 5)
        return context.get_dummy_value()

    return types.void(INDEX, INDEX, INDEX, INDEX), codegen
