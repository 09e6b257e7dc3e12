"""Arithmetic on sixteen fp32 lanes for numba kernels. Imports numba; see `lanes`."""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from .lanes import (
    I32,
    INDEX,
    LANES,
    V16F,
    V16I,
    call,
    const,
    is_bf16,
    lane_mask,
    lowered,
    rounded_bits,
    splat,
    types,
    vector,
)


@lowered
def vround(typingctx: Any, tag: Any, value: Any) -> Any:
    """Round a vector to the element type and widen it again."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if is_bf16(tag):
            high = builder.and_(rounded_bits(builder, args[1]), const(V16I, -65536))
            return builder.bitcast(high, V16F)
        return args[1]

    return vector(tag, vector), codegen


@lowered
def vsplat(typingctx: Any, value: Any) -> Any:
    """`value` in every lane."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return splat(builder, args[0])

    return vector(types.float32), codegen


def _binary(name: str, doc: str) -> Any:
    def typer(typingctx: Any, a: Any, b: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return getattr(builder, name)(args[0], args[1])

        return vector(vector, vector), codegen

    typer.__doc__ = doc
    return lowered(typer)


vadd = _binary("fadd", "a + b")
vsub = _binary("fsub", "a - b")
vmul = _binary("fmul", "a * b")
vdiv = _binary("fdiv", "a / b")


@lowered
def vmax(typingctx: Any, a: Any, b: Any) -> Any:
    """The larger of a and b in every lane."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", args[0], args[1]), args[0], args[1])

    return vector(vector, vector), codegen


@lowered
def vfma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return call(builder, "llvm.fma.v16f32", V16F, list(args))

    return vector(vector, vector, vector), codegen


@lowered
def vfirst(typingctx: Any, value: Any, count: Any, other: Any) -> Any:
    """`value` in the first `count` lanes, `other` in the rest."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.select(lane_mask(builder, args[1]), args[0], args[2])

    return vector(vector, INDEX, vector), codegen


def _fold(builder: Any, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
    for width in (8, 4, 2, 1):
        order = [lane ^ width for lane in range(LANES)]
        other = builder.shuffle_vector(value, value, ir.Constant(V16I, order))
        value = combine(value, other)
    return builder.extract_element(value, I32(0))


@lowered
def vsum(typingctx: Any, value: Any) -> Any:
    """The sum of the lanes: halves, quarters, eighths, pairs."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _fold(builder, args[0], builder.fadd)

    return types.float32(vector), codegen


@lowered
def vmaximum(typingctx: Any, value: Any) -> Any:
    """The largest lane."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        def larger(a: Any, b: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", a, b), a, b)

        return _fold(builder, args[0], larger)

    return types.float32(vector), codegen


@lowered
def vexp(typingctx: Any, value: Any) -> Any:
    """exp of every lane, about 1 ulp: 2^n times a degree-6 polynomial on |r| <= ln 2 / 2.

    Coefficients are the Taylor series of exp. Below -87.3 the result is 0, above 88.7 it is
    inf.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        x = args[0]

        def number(v: float) -> Any:
            return const(V16F, v)

        def fma(a: Any, b: Any, c: Any) -> Any:
            return call(builder, "llvm.fma.v16f32", V16F, [a, b, c])

        low = builder.fcmp_ordered("<", x, number(-87.0))
        high = builder.fcmp_ordered(">", x, number(88.5))
        inside = builder.select(low, number(-87.0), builder.select(high, number(88.0), x))
        scaled = builder.fmul(inside, number(1.4426950408889634))
        n = call(builder, "llvm.rint.v16f32", V16F, [scaled])
        r = fma(n, number(-0.693145751953125), inside)
        r = fma(n, number(-1.42860677e-06), r)
        poly = number(1.0 / 720)
        for coefficient in (1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
            poly = fma(poly, r, number(coefficient))
        bits = builder.shl(builder.fptosi(n, V16I), const(V16I, 23))
        whole = builder.bitcast(builder.add(builder.bitcast(poly, V16I), bits), V16F)
        result = builder.select(low, number(0.0), whole)
        result = builder.select(high, number(float("inf")), result)
        return builder.select(builder.fcmp_unordered("uno", x, x), x, result)

    return vector(vector), codegen
