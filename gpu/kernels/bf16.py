"""Sixteen-lane fp32 vectors for numba kernels over raw addresses, and bf16 <-> fp32 on the way.

Every operation is written out as LLVM vector code, so the order of additions is what the kernel
says on any CPU: nothing here depends on what the auto-vectoriser decides for one caller or another.

The first argument of a load or store is a tag whose *type* picks the element: an int reads and
writes bf16 (as 16-bit words, rounding to nearest even), a float reads and writes fp32. `numba`
missing: `AVAILABLE` is False and the decorated functions raise when called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

LANES = 16

try:
    import numba
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic, models, register_model

    AVAILABLE = True
except ImportError:  # pragma: no cover - exercised by a test in a subprocess
    AVAILABLE = False


def kernel(function: Callable[..., Any]) -> Any:
    """Compile `function` with numba on its first call: no GIL, no fast-math, C division."""
    if not AVAILABLE:
        return function
    return numba.njit(nogil=True, error_model="numpy", inline="never")(function)


def inlined(function: Callable[..., Any]) -> Any:
    """A device function of kernels, inlined by LLVM."""
    if not AVAILABLE:
        return function
    return numba.njit(nogil=True, error_model="numpy")(function)


if AVAILABLE:
    F32 = ir.FloatType()
    I16 = ir.IntType(16)
    I32 = ir.IntType(32)
    V16F = ir.VectorType(F32, LANES)
    V16I = ir.VectorType(I32, LANES)
    V16H = ir.VectorType(I16, LANES)

    class Vector(types.Type):  # type: ignore[misc]
        """The numba type of sixteen fp32 lanes."""

        def __init__(self) -> None:
            super().__init__(name="rota_v16f32")

    vector = Vector()

    @register_model(Vector)
    class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
        def __init__(self, dmm: Any, fe_type: Any) -> None:
            super().__init__(dmm, fe_type, V16F)

    def _splat(builder: Any, value: Any, kind: Any = None) -> Any:
        kind = kind or ir.VectorType(value.type, LANES)
        one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, I32(0))
        mask = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
        return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), mask)

    def _const(kind: Any, value: Any) -> Any:
        return ir.Constant(kind, [value] * kind.count)

    def _call(builder: Any, name: str, result: Any, args: list[Any]) -> Any:
        module = builder.module
        function = module.globals.get(name)
        if function is None:
            function = ir.Function(module, ir.FunctionType(result, [a.type for a in args]), name)
        return builder.call(function, args)

    def _is_bf16(tag: Any) -> bool:
        return isinstance(tag, types.Integer)

    def _at(builder: Any, tag: Any, address: Any, index: Any, element: Any) -> Any:
        size = 2 if _is_bf16(tag) else 4
        place = builder.add(address, builder.mul(index, ir.Constant(index.type, size)))
        return builder.inttoptr(place, element.as_pointer())

    def _widen(builder: Any, words: Any, wide: Any, result: Any) -> Any:
        bits = builder.zext(words, wide)
        shift = _const(wide, 16) if isinstance(wide, ir.VectorType) else ir.Constant(wide, 16)
        return builder.bitcast(builder.shl(bits, shift), result)

    def _narrow(builder: Any, value: Any) -> Any:
        """fp32 to bf16 words, nearest even, NaN stays NaN; scalar or vector."""
        if isinstance(value.type, ir.VectorType):
            wide, half = V16I, V16H

            def number(x: int) -> Any:
                return _const(V16I, x)
        else:
            wide, half = I32, I16

            def number(x: int) -> Any:
                return ir.Constant(I32, x)

        bits = builder.bitcast(value, wide)
        odd = builder.and_(builder.lshr(bits, number(16)), number(1))
        rounded = builder.add(bits, builder.add(odd, number(0x7FFF)))
        nan = builder.fcmp_unordered("uno", value, value)
        rounded = builder.select(nan, number(0x7FC00000), rounded)
        return builder.trunc(builder.lshr(rounded, number(16)), half)

    def _load_vector(builder: Any, tag: Any, address: Any, index: Any) -> Any:
        if _is_bf16(tag):
            words = builder.load(_at(builder, tag, address, index, V16H), align=2)
            return _widen(builder, words, V16I, V16F)
        return builder.load(_at(builder, tag, address, index, V16F), align=4)

    def _lane_mask(builder: Any, count: Any) -> Any:
        lanes = ir.Constant(V16I, list(range(LANES)))
        return builder.icmp_signed("<", lanes, _splat(builder, builder.trunc(count, I32)))

    def _copy(builder: Any, tag: Any, target: Any, source: Any, count: Any) -> None:
        size = 2 if _is_bf16(tag) else 4
        cgutils.raw_memcpy(builder, target, source, count, size)

    INDEX = types.int64

    @intrinsic  # type: ignore[untyped-decorator]
    def width(typingctx: Any, tag: Any) -> Any:
        """Bytes of an element: 2 or 4."""

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return ir.Constant(ir.IntType(64), 2 if _is_bf16(tag) else 4)

        return types.int64(tag), codegen

    @intrinsic  # type: ignore[untyped-decorator]
    def ld(typingctx: Any, tag: Any, address: Any, index: Any) -> Any:
        """Element `index` at `address` as fp32."""

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            if _is_bf16(tag):
                word = builder.load(_at(builder, tag, args[1], args[2], I16), align=2)
                return _widen(builder, word, I32, F32)
            return builder.load(_at(builder, tag, args[1], args[2], F32), align=4)

        return types.float32(tag, INDEX, INDEX), codegen

    @intrinsic  # type: ignore[untyped-decorator]
    def st(typingctx: Any, tag: Any, address: Any, index: Any, value: Any) -> Any:
        """Round fp32 `value` to the element type and store it."""

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            if _is_bf16(tag):
                place = _at(builder, tag, args[1], args[2], I16)
                builder.store(_narrow(builder, args[3]), place, align=2)
            else:
                builder.store(args[3], _at(builder, tag, args[1], args[2], F32), align=4)
            return context.get_dummy_value()

        return types.void(tag, INDEX, INDEX, types.float32), codegen

    @intrinsic  # type: ignore[untyped-decorator]
    def ld_i32(typingctx: Any, address: Any, index: Any) -> Any:
        """i32 at `address` + 4 * `index`, as i64."""

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            value = builder.load(_at(builder, types.float32, args[0], args[1], I32), align=4)
            return builder.sext(value, ir.IntType(64))

        return types.int64(INDEX, INDEX), codegen

    @intrinsic  # type: ignore[untyped-decorator]
    def ld_i64(typingctx: Any, address: Any, index: Any) -> Any:
        """i64 at `address` + 8 * `index`."""

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            place = builder.add(args[0], builder.mul(args[1], ir.Constant(args[1].type, 8)))
            return builder.load(builder.inttoptr(place, ir.IntType(64).as_pointer()), align=8)

        return types.int64(INDEX, INDEX), codegen

    @intrinsic  # type: ignore[untyped-decorator]
    def st_i32(typingctx: Any, address: Any, index: Any, value: Any) -> Any:
        """Store `value` as i32 at `address` + 4 * `index`."""

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            place = _at(builder, types.float32, args[0], args[1], I32)
            builder.store(builder.trunc(args[2], I32), place, align=4)
            return context.get_dummy_value()

        return types.void(INDEX, INDEX, INDEX), codegen

    @intrinsic  # type: ignore[untyped-decorator]
    def vld(typingctx: Any, tag: Any, address: Any, index: Any) -> Any:
        """Sixteen elements from `index` on."""

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return _load_vector(builder, tag, args[1], args[2])

        return vector(tag, INDEX, INDEX), codegen

    @intrinsic  # type: ignore[untyped-decorator]
    def vld_part(typingctx: Any, tag: Any, address: Any, index: Any, count: Any) -> Any:
        """The first `count` of sixteen elements from `index` on, zero in the other lanes."""

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            kind = V16H if _is_bf16(tag) else V16F
            buffer = cgutils.alloca_once(builder, kind)
            builder.store(ir.Constant(kind, None), buffer)
            source = _at(builder, tag, args[1], args[2], kind.element)
            _copy(builder, tag, buffer, source, args[3])
            words = builder.load(buffer)
            return _widen(builder, words, V16I, V16F) if _is_bf16(tag) else words

        return vector(tag, INDEX, INDEX, INDEX), codegen

    @intrinsic  # type: ignore[untyped-decorator]
    def vld_pairs(typingctx: Any, tag: Any, address: Any, index: Any) -> Any:
        """Thirty-two elements from `index` on as two vectors, ordered as the element type fixes.

        bf16: the even elements, then the odd ones (one shift and one mask). fp32: the first half,
        then the second. Two operands loaded this way meet lane by lane.
        """
        pair = types.UniTuple(vector, 2)

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            if _is_bf16(tag):
                bits = builder.load(_at(builder, tag, args[1], args[2], V16I), align=2)
                low = builder.shl(bits, _const(V16I, 16))
                high = builder.and_(bits, _const(V16I, -65536))
                parts = [builder.bitcast(low, V16F), builder.bitcast(high, V16F)]
            else:
                next16 = builder.add(args[2], ir.Constant(args[2].type, LANES))
                parts = [_load_vector(builder, tag, args[1], i) for i in (args[2], next16)]
            return context.make_tuple(builder, pair, parts)

        return pair(tag, INDEX, INDEX), codegen

    @intrinsic  # type: ignore[untyped-decorator]
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
            half = _is_bf16(tag)

            def rows(first: int) -> list[Any]:
                found = []
                for lane in range(LANES):
                    step = builder.mul(args[3], ir.Constant(args[3].type, lane))
                    place = builder.add(
                        builder.add(args[2], step), ir.Constant(args[2].type, first)
                    )
                    pointer = _at(builder, tag, args[1], place, quad)
                    found.append(builder.load(pointer, align=2 if half else 4))
                return found

            if half:
                parts = []
                for bits in transpose(builder, rows(0)):
                    parts.append(builder.shl(bits, _const(V16I, 16)))
                    parts.append(builder.and_(bits, _const(V16I, -65536)))
            else:
                parts = transpose(builder, rows(0)) + transpose(builder, rows(4))
            return context.make_tuple(builder, eight, [builder.bitcast(p, V16F) for p in parts])

        return eight(tag, INDEX, INDEX, INDEX), codegen

    @intrinsic  # type: ignore[untyped-decorator]
    def vst(typingctx: Any, tag: Any, address: Any, index: Any, value: Any) -> Any:
        """Round and store sixteen elements."""

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            if _is_bf16(tag):
                place = _at(builder, tag, args[1], args[2], V16H)
                builder.store(_narrow(builder, args[3]), place, align=2)
            else:
                builder.store(args[3], _at(builder, tag, args[1], args[2], V16F), align=4)
            return context.get_dummy_value()

        return types.void(tag, INDEX, INDEX, vector), codegen

    @intrinsic  # type: ignore[untyped-decorator]
    def vst_part(typingctx: Any, tag: Any, address: Any, index: Any, value: Any, count: Any) -> Any:
        """Round and store the first `count` lanes."""

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            words = _narrow(builder, args[3]) if _is_bf16(tag) else args[3]
            buffer = cgutils.alloca_once(builder, words.type)
            builder.store(words, buffer)
            target = _at(builder, tag, args[1], args[2], words.type.element)
            _copy(builder, tag, target, buffer, args[4])
            return context.get_dummy_value()

        return types.void(tag, INDEX, INDEX, vector, INDEX), codegen

    @intrinsic  # type: ignore[untyped-decorator]
    def vround(typingctx: Any, tag: Any, value: Any) -> Any:
        """Round a vector to the element type and widen it again."""

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            if _is_bf16(tag):
                return _widen(builder, _narrow(builder, args[1]), V16I, V16F)
            return args[1]

        return vector(tag, vector), codegen

    @intrinsic  # type: ignore[untyped-decorator]
    def vsplat(typingctx: Any, value: Any) -> Any:
        """`value` in every lane."""

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return _splat(builder, args[0])

        return vector(types.float32), codegen

    def _binary(name: str, doc: str) -> Any:
        def typer(typingctx: Any, a: Any, b: Any) -> Any:
            def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
                return getattr(builder, name)(args[0], args[1])

            return vector(vector, vector), codegen

        typer.__doc__ = doc
        return intrinsic(typer)

    vadd = _binary("fadd", "a + b")
    vsub = _binary("fsub", "a - b")
    vmul = _binary("fmul", "a * b")
    vdiv = _binary("fdiv", "a / b")

    @intrinsic  # type: ignore[untyped-decorator]
    def vmax(typingctx: Any, a: Any, b: Any) -> Any:
        """The larger of a and b in every lane."""

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", args[0], args[1]), args[0], args[1])

        return vector(vector, vector), codegen

    @intrinsic  # type: ignore[untyped-decorator]
    def vfma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
        """a * b + c, rounded once."""

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return _call(builder, "llvm.fma.v16f32", V16F, list(args))

        return vector(vector, vector, vector), codegen

    @intrinsic  # type: ignore[untyped-decorator]
    def vfirst(typingctx: Any, value: Any, count: Any, other: Any) -> Any:
        """`value` in the first `count` lanes, `other` in the rest."""

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return builder.select(_lane_mask(builder, args[1]), args[0], args[2])

        return vector(vector, INDEX, vector), codegen

    def _fold(builder: Any, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
        for width in (8, 4, 2, 1):
            order = [lane ^ width for lane in range(LANES)]
            other = builder.shuffle_vector(value, value, ir.Constant(V16I, order))
            value = combine(value, other)
        return builder.extract_element(value, I32(0))

    @intrinsic  # type: ignore[untyped-decorator]
    def vsum(typingctx: Any, value: Any) -> Any:
        """The sum of the lanes: halves, quarters, eighths, pairs."""

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return _fold(builder, args[0], builder.fadd)

        return types.float32(vector), codegen

    @intrinsic  # type: ignore[untyped-decorator]
    def vmaximum(typingctx: Any, value: Any) -> Any:
        """The largest lane."""

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            def larger(a: Any, b: Any) -> Any:
                return builder.select(builder.fcmp_ordered(">", a, b), a, b)

            return _fold(builder, args[0], larger)

        return types.float32(vector), codegen

    @intrinsic  # type: ignore[untyped-decorator]
    def vexp(typingctx: Any, value: Any) -> Any:
        """exp of every lane, about 1 ulp: 2^n times a degree-6 polynomial on |r| <= ln 2 / 2.

        Coefficients are the Taylor series of exp. Below -87.3 the result is 0, above 88.7 it is
        inf.
        """

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            x = args[0]

            def number(v: float) -> Any:
                return _const(V16F, v)

            def fma(a: Any, b: Any, c: Any) -> Any:
                return _call(builder, "llvm.fma.v16f32", V16F, [a, b, c])

            low = builder.fcmp_ordered("<", x, number(-87.0))
            high = builder.fcmp_ordered(">", x, number(88.5))
            inside = builder.select(low, number(-87.0), builder.select(high, number(88.0), x))
            scaled = builder.fmul(inside, number(1.4426950408889634))
            n = _call(builder, "llvm.rint.v16f32", V16F, [scaled])
            r = fma(n, number(-0.693145751953125), inside)
            r = fma(n, number(-1.42860677e-06), r)
            poly = number(1.0 / 720)
            for coefficient in (1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
                poly = fma(poly, r, number(coefficient))
            bits = builder.shl(builder.fptosi(n, V16I), _const(V16I, 23))
            whole = builder.bitcast(builder.add(builder.bitcast(poly, V16I), bits), V16F)
            result = builder.select(low, number(0.0), whole)
            result = builder.select(high, number(float("inf")), result)
            return builder.select(builder.fcmp_unordered("uno", x, x), x, result)

        return vector(vector), codegen

    @inlined
    def vld_upto(tag, address, index, count):  # type: ignore[no-untyped-def]
        """`vld` where `count` is at least 16, else `vld_part`."""
        if count >= LANES:
            return vld(tag, address, index)
        return vld_part(tag, address, index, count)

    @inlined
    def vst_upto(tag, address, index, value, count):  # type: ignore[no-untyped-def]
        """`vst` where `count` is at least 16, else `vst_part`."""
        if count >= LANES:
            vst(tag, address, index, value)
        else:
            vst_part(tag, address, index, value, count)
