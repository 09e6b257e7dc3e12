"""Dot products of bf16 pairs for numba kernels on processors with AVX512-BF16. Imports numba.

Here a vector of sixteen fp32 lanes may also carry thirty-two bf16 as raw bits, two a lane; only
loads, stores, shuffles and `vdot` touch such a vector. The instructions take denormals as zero and
give zero for them, whatever the processor's state says.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from typing import Any

import llvmlite.binding
from llvmlite import ir
from llvmlite.ir.types import _BaseFloatType
from numba.core import cgutils

from .lanes import F32, I16, I32, INDEX, LANES, V16F, V16I, call, const, lowered, types, vector


class _BFloat(_BaseFloatType):  # type: ignore[misc]  # its base has no types
    """LLVM's bfloat, only ever reached by a bitcast."""

    null = "0.0"
    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"


_BFloat._create_instance()

V16B = ir.VectorType(_BFloat(), LANES)
V32B = ir.VectorType(_BFloat(), 2 * LANES)
V8I = ir.VectorType(I32, 8)
V32H = ir.VectorType(I16, 2 * LANES)


def has_dot() -> bool:
    """Whether this processor multiplies pairs of bf16 sixteen lanes at a time."""
    found = llvmlite.binding.get_host_cpu_features()
    return all(found.get(name, False) for name in ("avx512f", "avx512bw", "avx512bf16"))


def _shuffle(builder: Any, a: Any, b: Any, order: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(order)), order))


def _place(builder: Any, address: Any, index: Any, kind: Any) -> Any:
    at = builder.add(address, builder.shl(index, ir.Constant(index.type, 1)))
    return builder.inttoptr(at, kind.as_pointer())


def _rounded(builder: Any, value: Any) -> Any:
    return call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", V16B, [value])


@lowered
def vdot(typingctx: Any, total: Any, a: Any, b: Any) -> Any:
    """total + the products of the two pairs in every lane, each addition rounded to nearest."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pairs = [builder.bitcast(value, V32B) for value in args[1:]]
        return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", V16F, [args[0], *pairs])

    return vector(vector, vector, vector), codegen


@lowered
def vld_raw(typingctx: Any, address: Any, index: Any) -> Any:
    """Thirty-two bf16 from element `index` on."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load(_place(builder, args[0], args[1], V16F), align=2)

    return vector(INDEX, INDEX), codegen


@lowered
def vld_raw_part(typingctx: Any, address: Any, index: Any, count: Any) -> Any:
    """The first `count` of thirty-two bf16, zero after them."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        buffer = cgutils.alloca_once(builder, V32H)
        builder.store(ir.Constant(V32H, None), buffer)
        cgutils.raw_memcpy(builder, buffer, _place(builder, args[0], args[1], I16), args[2], 2)
        return builder.bitcast(builder.load(buffer), V16F)

    return vector(INDEX, INDEX, INDEX), codegen


def _unpacked(builder: Any, rows: list[Any]) -> list[Any]:
    """Four vectors to four: in each quarter, vector c gets lane c of all four."""

    def across(order: list[int]) -> list[int]:
        return [4 * q + i if i < 4 else 12 + 4 * q + i for q in range(4) for i in order]

    low32, high32 = across([0, 4, 1, 5]), across([2, 6, 3, 7])
    low64, high64 = across([0, 1, 4, 5]), across([2, 3, 6, 7])
    t = [_shuffle(builder, rows[i], rows[i + 1], o) for i in (0, 2) for o in (low32, high32)]
    return [_shuffle(builder, t[i], t[i + 2], o) for i in (0, 1) for o in (low64, high64)]


@lowered
def vld_raw_columns8(typingctx: Any, address: Any, index: Any) -> Any:
    """A matrix [16, 16] of bf16 without gaps, as columns: lane l of vector c holds elements
    (l, 2c) and (l, 2c + 1)."""
    eight = types.UniTuple(vector, 8)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        rows = []
        for j in range(8):
            at = builder.add(args[1], ir.Constant(args[1].type, 32 * j))
            rows.append(builder.load(_place(builder, args[0], at, V16F), align=2))
        # Quarter q of a vector of `halves[g][c]` holds pair c + 4 * (q % 2) of row 2j + q // 2 for
        # the four j of that half.
        halves = [_unpacked(builder, rows[:4]), _unpacked(builder, rows[4:])]
        parts = []
        for c in range(8):
            high = c // 4
            order = []
            for row in range(16):
                half, j, odd = row // 8, row % 8 // 2, row % 2
                order.append(16 * half + 4 * (2 * odd + high) + j)
            parts.append(_shuffle(builder, halves[0][c % 4], halves[1][c % 4], order))
        return context.make_tuple(builder, eight, parts)

    return eight(INDEX, INDEX), codegen


@lowered
def vld_raw_columns4(typingctx: Any, address: Any, index: Any, stride: Any) -> Any:
    """Eight columns of sixteen rows `stride` elements apart: lane l of vector c holds elements
    (l, 2c) and (l, 2c + 1)."""
    four = types.UniTuple(vector, 4)
    quad = ir.VectorType(F32, 4)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        rows = []
        for lane in range(LANES):
            step = builder.mul(args[2], ir.Constant(args[2].type, lane))
            place = _place(builder, args[0], builder.add(args[1], step), quad)
            rows.append(builder.load(place, align=2))
        z = []
        for i in range(4):
            low = _shuffle(builder, rows[i], rows[4 + i], list(range(8)))
            high = _shuffle(builder, rows[8 + i], rows[12 + i], list(range(8)))
            z.append(_shuffle(builder, low, high, list(range(16))))
        return context.make_tuple(builder, four, _unpacked(builder, z))

    return four(INDEX, INDEX, INDEX), codegen


@lowered
def vsums(typingctx: Any, values: Any) -> Any:
    """Lane i of the result: the sum of the lanes of vector i of sixteen, in the order of `vsum`.

    Lanes eight apart meet first, then four, two and one apart; two vectors share an addition.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        held = [builder.extract_value(args[0], i) for i in range(LANES)]
        # After a level, vector i carries the vectors i and i + len / 2 of before side by side.
        for width in (8, 4, 2, 1):
            half = len(held) // 2
            keep = [lane for lane in range(LANES) if not lane & width]
            joined = []
            for i in range(half):
                first, second = held[i], held[i + half]
                low, high = [0] * LANES, [0] * LANES
                for lane in keep:
                    low[lane], high[lane] = lane, lane + width
                    low[lane + width], high[lane + width] = LANES + lane, LANES + lane + width
                joined.append(
                    builder.fadd(
                        _shuffle(builder, first, second, low),
                        _shuffle(builder, first, second, high),
                    )
                )
            held = joined
        return held[0]

    return vector(types.UniTuple(vector, LANES)), codegen


@lowered
def vst_rounded_pairs(
    typingctx: Any, address: Any, low: Any, high: Any, step: Any, value: Any
) -> Any:
    """Round to bf16; store pair i of lanes 0..7 at `address` + 4 * (`low` + i * `step`), then those
    of lanes 8..15 from `high` on."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pairs = builder.bitcast(_rounded(builder, args[4]), V8I)
        for i in range(8):
            ahead = builder.mul(args[3], ir.Constant(args[3].type, i % 4))
            at = builder.add(args[1 + i // 4], ahead)
            place = builder.add(args[0], builder.shl(at, ir.Constant(at.type, 2)))
            word = builder.extract_element(pairs, I32(i))
            builder.store(word, builder.inttoptr(place, I32.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(INDEX, INDEX, INDEX, INDEX, vector), codegen


@lowered
def vround_raw(typingctx: Any, value: Any) -> Any:
    """Round to bf16 and widen again."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        words = builder.bitcast(_rounded(builder, args[0]), ir.VectorType(I16, LANES))
        return builder.bitcast(builder.shl(builder.zext(words, V16I), const(V16I, 16)), V16F)

    return vector(vector), codegen


@lowered
def vst_rounded(typingctx: Any, address: Any, index: Any, value: Any) -> Any:
    """Round sixteen lanes to bf16 and store them from element `index` on."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        words = builder.bitcast(_rounded(builder, args[2]), ir.VectorType(I16, LANES))
        builder.store(words, _place(builder, args[0], args[1], words.type), align=2)
        return context.get_dummy_value()

    return types.void(INDEX, INDEX, vector), codegen


@lowered
def st_i64(typingctx: Any, address: Any, index: Any, value: Any) -> Any:
    """Store `value` as i64 at `address` + 8 * `index`."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        place = builder.add(args[0], builder.shl(args[1], ir.Constant(args[1].type, 3)))
        builder.store(args[2], builder.inttoptr(place, ir.IntType(64).as_pointer()), align=8)
        return context.get_dummy_value()

    return types.void(INDEX, INDEX, INDEX), codegen
