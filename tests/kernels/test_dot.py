"""The instruction for pairs of bf16 adds in the order written down; its helpers move what they say.

Only on a processor that has it: numba compiles the helpers into a function here.
"""

from __future__ import annotations

import pytest
import torch

from rota.gpu.kernels.bf16 import (
    has_dot,
    kernel,
    vdot,
    vld,
    vld_raw,
    vld_raw_columns4,
    vld_raw_columns8,
    vld_raw_part,
    vst,
    vst_rounded_pairs,
    vsums,
)

pytestmark = pytest.mark.skipif(not has_dot(), reason="needs a processor with AVX512-BF16")


@kernel
def dots(tag, total, a, b, out, n):  # type: ignore[no-untyped-def]  # numba types it
    for i in range(n):
        sums = vdot(vld(0.0, total, 16 * i), vld_raw(a, 32 * i), vld_raw(b, 32 * i))
        vst(0.0, out, 16 * i, sums)


@kernel
def columns(tag, b, stride, out):  # type: ignore[no-untyped-def]  # numba types it
    if stride == 16:
        c0, c1, c2, c3, c4, c5, c6, c7 = vld_raw_columns8(b, 0)
        vst(0.0, out, 64, c4)
        vst(0.0, out, 80, c5)
        vst(0.0, out, 96, c6)
        vst(0.0, out, 112, c7)
    else:
        c0, c1, c2, c3 = vld_raw_columns4(b, 0, stride)
    vst(0.0, out, 0, c0)
    vst(0.0, out, 16, c1)
    vst(0.0, out, 32, c2)
    vst(0.0, out, 48, c3)


@kernel
def sums(tag, a, out):  # type: ignore[no-untyped-def]  # numba types it
    d0, d1, d2, d3 = vld(0.0, a, 0), vld(0.0, a, 16), vld(0.0, a, 32), vld(0.0, a, 48)
    d4, d5, d6, d7 = vld(0.0, a, 64), vld(0.0, a, 80), vld(0.0, a, 96), vld(0.0, a, 112)
    e0, e1, e2, e3 = vld(0.0, a, 128), vld(0.0, a, 144), vld(0.0, a, 160), vld(0.0, a, 176)
    e4, e5, e6, e7 = vld(0.0, a, 192), vld(0.0, a, 208), vld(0.0, a, 224), vld(0.0, a, 240)
    every = vsums((d0, d1, d2, d3, d4, d5, d6, d7, e0, e1, e2, e3, e4, e5, e6, e7))
    vst(0.0, out, 0, every)
    vst_rounded_pairs(out, 16, 17, 3, every)


@kernel
def part(tag, a, out, count):  # type: ignore[no-untyped-def]  # numba types it
    vst(0.0, out, 0, vld_raw_part(a, 0, count))


def test_the_odd_product_is_added_before_the_even_one() -> None:
    generator = torch.Generator().manual_seed(0)
    total = torch.randn((500, 16), generator=generator)
    a, b = (torch.randn((500, 32), generator=generator).bfloat16() for _ in range(2))
    out = torch.empty_like(total)
    dots(0, total.data_ptr(), a.data_ptr(), b.data_ptr(), out.data_ptr(), 500)
    products = a.float() * b.float()
    assert torch.equal(out, (total + products[:, 1::2]) + products[:, 0::2])
    assert not torch.equal(out, (total + products[:, 0::2]) + products[:, 1::2])


def test_denormals_count_as_zero() -> None:
    total = torch.full((1, 16), 2.0**-140)
    a = torch.full((1, 32), 2.0**-130).bfloat16()
    b = torch.full((1, 32), 2.0**100).bfloat16()
    out = torch.ones_like(total)
    dots(0, total.data_ptr(), a.data_ptr(), b.data_ptr(), out.data_ptr(), 1)
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("stride", [8, 16, 24])
def test_columns_hold_pairs_of_rows(stride: int) -> None:
    b = torch.arange(16 * stride, dtype=torch.int16).view(16, stride)
    count = 8 if stride == 16 else 4
    out = torch.empty((count, 16, 2), dtype=torch.int16)
    columns(0, b.data_ptr(), stride, out.data_ptr())
    assert torch.equal(out, b[:, : 2 * count].view(16, count, 2).transpose(0, 1))


def test_sixteen_sums_keep_the_order_of_one() -> None:
    a = torch.randn((16, 16), generator=torch.Generator().manual_seed(1))
    out = torch.zeros(32)
    sums(0, a.data_ptr(), out.data_ptr())
    lanes = a.clone()
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    assert torch.equal(out[:16], lanes[:, 0])
    wanted = torch.zeros(16)
    wanted[0:12:3], wanted[1:13:3] = lanes[:, 0].bfloat16().view(torch.float32).view(2, 4)
    assert torch.equal(out[16:], wanted)


@pytest.mark.parametrize("count", [0, 1, 2, 17, 31])
def test_nothing_after_the_part_is_read(count: int) -> None:
    a = torch.arange(1, count + 1, dtype=torch.int16)
    out = torch.empty(32, dtype=torch.int16)
    part(0, a.data_ptr(), out.data_ptr(), count)
    assert torch.equal(out[:count], a)
    assert not out[count:].any()
