"""Loads and stores of sixteen fp32 lanes for numba kernels over raw addresses. Imports numba.

Every operation is written out as LLVM vector code, so the order of operations is what the kernel
says on any CPU: nothing depends on what the auto-vectoriser decides for one caller or another.

The first argument of a load or store is a tag whose *type* picks the element: an int reads and
writes bf16 (16-bit words, rounded to nearest even), a float reads and writes fp32. The index
counts elements.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from .compiled import Compiled

LANES = 16
types: Any = numba.types


def lowered(function: Callable[..., Any]) -> Any:
    """Make a numba intrinsic of a typer; a typed door for the type checker."""
    return intrinsic(function)


def inlined(function: Callable[..., Any]) -> Any:
    """A device function of kernels, inlined by LLVM."""
    return numba.njit(nogil=True, error_model="numpy", forceinline=True)(function)


def kernel(function: Callable[..., Any]) -> Any:
    """An entry point, compiled on the first call unless its code was kept: no GIL, no fast-math, C
    division. Other kernels call its ``device`` form."""
    return Compiled(function)


F32 = ir.FloatType()
I16 = ir.IntType(16)
I32 = ir.IntType(32)
V16F = ir.VectorType(F32, LANES)
V16I = ir.VectorType(I32, LANES)
V16H = ir.VectorType(I16, LANES)


class Vector(types.Type):  # type: ignore[misc]  # its base has no types
    """The numba type of sixteen fp32 lanes."""

    def __init__(self) -> None:
        super().__init__(name="rota_v16f32")


vector: Any = Vector()


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, V16F)


def splat(builder: Any, value: Any, kind: Any = None) -> Any:
    kind = kind or ir.VectorType(value.type, LANES)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, I32(0))
    mask = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), mask)


def const(kind: Any, value: Any) -> Any:
    return ir.Constant(kind, [value] * kind.count)


def call(builder: Any, name: str, result: Any, args: list[Any]) -> Any:
    module = builder.module
    function = module.globals.get(name)
    if function is None:
        function = ir.Function(module, ir.FunctionType(result, [a.type for a in args]), name)
    return builder.call(function, args)


def is_bf16(tag: Any) -> bool:
    return isinstance(tag, types.Integer)


def _at(builder: Any, tag: Any, address: Any, index: Any, element: Any) -> Any:
    size = 2 if is_bf16(tag) else 4
    place = builder.add(address, builder.mul(index, ir.Constant(index.type, size)))
    return builder.inttoptr(place, element.as_pointer())


def widen(builder: Any, words: Any, wide: Any, result: Any) -> Any:
    bits = builder.zext(words, wide)
    shift = const(wide, 16) if isinstance(wide, ir.VectorType) else ir.Constant(wide, 16)
    return builder.bitcast(builder.shl(bits, shift), result)


def rounded_bits(builder: Any, value: Any) -> Any:
    """fp32 rounded to bf16, nearest even, NaN stays NaN: 32-bit words whose high half counts."""
    wide = V16I if isinstance(value.type, ir.VectorType) else I32

    def number(x: int) -> Any:
        return ir.Constant(wide, [x] * LANES if wide is V16I else x)

    bits = builder.bitcast(value, wide)
    odd = builder.and_(builder.lshr(bits, number(16)), number(1))
    rounded = builder.add(bits, builder.add(odd, number(0x7FFF)))
    nan = builder.fcmp_unordered("uno", value, value)
    return builder.select(nan, number(0x7FC00000), rounded)


def narrow(builder: Any, value: Any) -> Any:
    """fp32 to bf16 words; scalar or vector."""
    vectorial = isinstance(value.type, ir.VectorType)
    shift = const(V16I, 16) if vectorial else ir.Constant(I32, 16)
    high = builder.lshr(rounded_bits(builder, value), shift)
    return builder.trunc(high, V16H if vectorial else I16)


def _load_vector(builder: Any, tag: Any, address: Any, index: Any) -> Any:
    if is_bf16(tag):
        words = builder.load(_at(builder, tag, address, index, V16H), align=2)
        return widen(builder, words, V16I, V16F)
    return builder.load(_at(builder, tag, address, index, V16F), align=4)


def lane_mask(builder: Any, count: Any) -> Any:
    lanes = ir.Constant(V16I, list(range(LANES)))
    return builder.icmp_signed("<", lanes, splat(builder, builder.trunc(count, I32)))


def _copy(builder: Any, tag: Any, target: Any, source: Any, count: Any) -> None:
    size = 2 if is_bf16(tag) else 4
    cgutils.raw_memcpy(builder, target, source, count, size)


INDEX = types.int64


@lowered
def width(typingctx: Any, tag: Any) -> Any:
    """Bytes of an element: 2 or 4."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return ir.Constant(ir.IntType(64), 2 if is_bf16(tag) else 4)

    return types.int64(tag), codegen


@lowered
def ld(typingctx: Any, tag: Any, address: Any, index: Any) -> Any:
    """Element `index` at `address` as fp32."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if is_bf16(tag):
            word = builder.load(_at(builder, tag, args[1], args[2], I16), align=2)
            return widen(builder, word, I32, F32)
        return builder.load(_at(builder, tag, args[1], args[2], F32), align=4)

    return types.float32(tag, INDEX, INDEX), codegen


@lowered
def st(typingctx: Any, tag: Any, address: Any, index: Any, value: Any) -> Any:
    """Round fp32 `value` to the element type and store it."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if is_bf16(tag):
            place = _at(builder, tag, args[1], args[2], I16)
            builder.store(narrow(builder, args[3]), place, align=2)
        else:
            builder.store(args[3], _at(builder, tag, args[1], args[2], F32), align=4)
        return context.get_dummy_value()

    return types.void(tag, INDEX, INDEX, types.float32), codegen


@lowered
def ld_i32(typingctx: Any, address: Any, index: Any) -> Any:
    """i32 at `address` + 4 * `index`, as i64."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value = builder.load(_at(builder, types.float32, args[0], args[1], I32), align=4)
        return builder.sext(value, ir.IntType(64))

    return types.int64(INDEX, INDEX), codegen


@lowered
def ld_i64(typingctx: Any, address: Any, index: Any) -> Any:
    """i64 at `address` + 8 * `index`."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        place = builder.add(args[0], builder.mul(args[1], ir.Constant(args[1].type, 8)))
        return builder.load(builder.inttoptr(place, ir.IntType(64).as_pointer()), align=8)

    return types.int64(INDEX, INDEX), codegen


@lowered
def st_i32(typingctx: Any, address: Any, index: Any, value: Any) -> Any:
    """Store `value` as i32 at `address` + 4 * `index`."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        place = _at(builder, types.float32, args[0], args[1], I32)
        builder.store(builder.trunc(args[2], I32), place, align=4)
        return context.get_dummy_value()

    return types.void(INDEX, INDEX, INDEX), codegen


@lowered
def prefetch(typingctx: Any, address: Any) -> Any:
    """Ask for the cache line at `address`; any address is harmless."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(8).as_pointer())
        call(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, I32(0), I32(3), I32(1)])
        return context.get_dummy_value()

    return types.void(INDEX), codegen


@lowered
def vld(typingctx: Any, tag: Any, address: Any, index: Any) -> Any:
    """Sixteen elements from `index` on."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _load_vector(builder, tag, args[1], args[2])

    return vector(tag, INDEX, INDEX), codegen


@lowered
def vld_part(typingctx: Any, tag: Any, address: Any, index: Any, count: Any) -> Any:
    """The first `count` of sixteen elements from `index` on, zero in the other lanes."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = V16H if is_bf16(tag) else V16F
        buffer = cgutils.alloca_once(builder, kind)
        builder.store(ir.Constant(kind, None), buffer)
        source = _at(builder, tag, args[1], args[2], kind.element)
        _copy(builder, tag, buffer, source, args[3])
        words = builder.load(buffer)
        return widen(builder, words, V16I, V16F) if is_bf16(tag) else words

    return vector(tag, INDEX, INDEX, INDEX), codegen


@lowered
def vld_pairs(typingctx: Any, tag: Any, address: Any, index: Any) -> Any:
    """Thirty-two elements from `index` on as two vectors, ordered as the element type fixes.

    bf16: the even elements, then the odd ones (one shift and one mask). fp32: the first half,
    then the second. Two operands loaded this way meet lane by lane.
    """
    pair = types.UniTuple(vector, 2)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if is_bf16(tag):
            bits = builder.load(_at(builder, tag, args[1], args[2], V16I), align=2)
            low = builder.shl(bits, const(V16I, 16))
            high = builder.and_(bits, const(V16I, -65536))
            parts = [builder.bitcast(low, V16F), builder.bitcast(high, V16F)]
        else:
            next16 = builder.add(args[2], ir.Constant(args[2].type, LANES))
            parts = [_load_vector(builder, tag, args[1], i) for i in (args[2], next16)]
        return context.make_tuple(builder, pair, parts)

    return pair(tag, INDEX, INDEX), codegen


@lowered
def vld_columns(typingctx: Any, tag: Any, address: Any, index: Any, stride: Any) -> Any:
    """Eight columns of sixteen rows: lane l of vector c is element index + l * stride + c."""
    eight = types.UniTuple(vector, 8)
    quad = ir.VectorType(I32, 4)

    def shuffle(builder: Any, a: Any, b: Any, order: list[int]) -> Any:
        mask = ir.Constant(ir.VectorType(I32, len(order)), order)
        return builder.shuffle_vector(a, b, mask)

    def in_lanes(order: list[int]) -> list[int]:
        # indices 0..3 name the first operand's quarter, 4..7 the second's
        return [4 * q + i if i < 4 else 12 + 4 * q + i for q in range(4) for i in order]

    def transpose(builder: Any, rows: list[Any]) -> list[Any]:
        """Sixteen <4 x i32> rows to four vectors of columns."""
        z = []
        for i in range(4):
            low = shuffle(builder, rows[i], rows[4 + i], list(range(8)))
            high = shuffle(builder, rows[8 + i], rows[12 + i], list(range(8)))
            z.append(shuffle(builder, low, high, list(range(16))))
        low32, high32 = in_lanes([0, 4, 1, 5]), in_lanes([2, 6, 3, 7])
        low64, high64 = in_lanes([0, 1, 4, 5]), in_lanes([2, 3, 6, 7])
        t = [shuffle(builder, z[i], z[i + 1], o) for i in (0, 2) for o in (low32, high32)]
        return [shuffle(builder, t[i], t[i + 2], o) for i in (0, 1) for o in (low64, high64)]

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        half = is_bf16(tag)

        def rows(first: int) -> list[Any]:
            found = []
            for lane in range(LANES):
                step = builder.mul(args[3], ir.Constant(args[3].type, lane))
                place = builder.add(builder.add(args[2], step), ir.Constant(args[2].type, first))
                pointer = _at(builder, tag, args[1], place, quad)
                found.append(builder.load(pointer, align=2 if half else 4))
            return found

        if half:
            parts = []
            for bits in transpose(builder, rows(0)):
                parts.append(builder.shl(bits, const(V16I, 16)))
                parts.append(builder.and_(bits, const(V16I, -65536)))
        else:
            parts = transpose(builder, rows(0)) + transpose(builder, rows(4))
        return context.make_tuple(builder, eight, [builder.bitcast(p, V16F) for p in parts])

    return eight(tag, INDEX, INDEX, INDEX), codegen


@lowered
def vst(typingctx: Any, tag: Any, address: Any, index: Any, value: Any) -> Any:
    """Round and store sixteen elements."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if is_bf16(tag):
            place = _at(builder, tag, args[1], args[2], V16H)
            builder.store(narrow(builder, args[3]), place, align=2)
        else:
            builder.store(args[3], _at(builder, tag, args[1], args[2], V16F), align=4)
        return context.get_dummy_value()

    return types.void(tag, INDEX, INDEX, vector), codegen


@lowered
def vst_pairs(typingctx: Any, tag: Any, address: Any, index: Any, low: Any, high: Any) -> Any:
    """Round and store thirty-two elements that are ordered as `vld_pairs` orders them."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if is_bf16(tag):
            even = builder.lshr(rounded_bits(builder, args[3]), const(V16I, 16))
            odd = builder.and_(rounded_bits(builder, args[4]), const(V16I, -65536))
            place = _at(builder, tag, args[1], args[2], V16I)
            builder.store(builder.or_(even, odd), place, align=2)
        else:
            next16 = builder.add(args[2], ir.Constant(args[2].type, LANES))
            for value, at in ((args[3], args[2]), (args[4], next16)):
                builder.store(value, _at(builder, tag, args[1], at, V16F), align=4)
        return context.get_dummy_value()

    return types.void(tag, INDEX, INDEX, vector, vector), codegen


@lowered
def vst_part(typingctx: Any, tag: Any, address: Any, index: Any, value: Any, count: Any) -> Any:
    """Round and store the first `count` lanes."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        words = narrow(builder, args[3]) if is_bf16(tag) else args[3]
        buffer = cgutils.alloca_once(builder, words.type)
        builder.store(words, buffer)
        target = _at(builder, tag, args[1], args[2], words.type.element)
        _copy(builder, tag, target, buffer, args[4])
        return context.get_dummy_value()

    return types.void(tag, INDEX, INDEX, vector, INDEX), codegen


@inlined
def vld_upto(tag, address, index, count):  # type: ignore[no-untyped-def]  # numba types it
    """`vld` where `count` is at least 16, else `vld_part`."""
    if count >= LANES:
        return vld(tag, address, index)
    return vld_part(tag, address, index, count)


@inlined
def vst_upto(tag, address, index, value, count):  # type: ignore[no-untyped-def]  # numba types it
    """`vst` where `count` is at least 16, else `vst_part`."""
    if count >= LANES:
        vst(tag, address, index, value)
    else:
        vst_part(tag, address, index, value, count)
