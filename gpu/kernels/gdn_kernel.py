"""The numba kernels of `gdn.delta_net_reference`: convolution, then delta rule and gated norm."""

from __future__ import annotations

import math

import numpy as np

from .bf16 import (
    inlined,
    kernel,
    ld,
    ld_i32,
    vadd,
    vdiv,
    vexp,
    vfma,
    vld_upto,
    vmul,
    vround,
    vsplat,
    vst_upto,
    vsub,
    vsum,
)

_L2_EPS = np.float32(1e-6)
_LINEAR_FROM = 20.0


@inlined
def _sigmoid(x):  # type: ignore[no-untyped-def]  # numba types it
    one = vsplat(np.float32(1.0))
    return vdiv(one, vadd(one, vexp(vsub(vsplat(np.float32(0.0)), x))))


@kernel
def conv_kernel(  # type: ignore[no-untyped-def]  # numba types it
    tag, x, stride, w, taps, channels, states, first, count, slot, rows
):
    """Convolve the first `channels` columns of `x` in place, silu them, and advance the states."""
    last = taps - 1
    for row in range(rows):
        start, tokens = ld_i32(first, row), ld_i32(count, row)
        held = ld_i32(slot, row) * last * channels
        for c in range(0, channels, 16):
            left = channels - c
            for token in range(start, start + tokens):
                at = token * stride + c
                now = vld_upto(tag, x, at, left)
                total = vsplat(np.float32(0.0))
                for tap in range(last):
                    old = vld_upto(tag, states, held + tap * channels + c, left)
                    total = vfma(old, vld_upto(tag, w, tap * channels + c, left), total)
                    if tap > 0:
                        vst_upto(tag, states, held + (tap - 1) * channels + c, old, left)
                total = vfma(now, vld_upto(tag, w, last * channels + c, left), total)
                vst_upto(tag, states, held + (last - 1) * channels + c, now, left)
                total = vround(tag, total)
                vst_upto(tag, x, at, vmul(total, _sigmoid(total)), left)


@inlined
def _normed(tag, x, at, width, scale, target, to):  # type: ignore[no-untyped-def]  # numba types it
    """x / |x| * scale as fp32 into `target`."""
    total = vsplat(np.float32(0.0))
    for i in range(0, width, 16):
        v = vld_upto(tag, x, at + i, width - i)
        total = vfma(v, v, total)
    factor = vsplat(np.float32(1.0) / np.float32(math.sqrt(vsum(total) + _L2_EPS)))
    for i in range(0, width, 16):
        v = vmul(vmul(vld_upto(tag, x, at + i, width - i), factor), vsplat(scale))
        vst_upto(0.0, target, to + i, v, width - i)


@kernel
def delta_kernel(  # type: ignore[no-untyped-def]  # numba types it
    tag,
    x,
    stride,
    key_heads,
    heads,
    key_dim,
    dim,
    states,
    decay,
    dt_bias,
    norm_w,
    eps,
    first,
    count,
    slot,
    rows,
    out,
    out_stride,
    scratch,
):
    """Delta rule and gated norm over what `conv_kernel` left; `scratch`: `scratch_bytes`."""
    keys = key_heads * key_dim
    z_at = 2 * keys + heads * dim
    b_at = z_at + heads * dim
    scale = np.float32(1.0) / np.float32(math.sqrt(np.float32(key_dim)))
    k_at, o_at = key_dim, 2 * key_dim
    for row in range(rows):
        start, tokens = ld_i32(first, row), ld_i32(count, row)
        for head in range(heads):
            memory = (ld_i32(slot, row) * heads + head) * key_dim * dim
            key_head = head // (heads // key_heads)
            for token in range(start, start + tokens):
                at = token * stride
                _normed(tag, x, at + key_head * key_dim, key_dim, scale, scratch, 0)
                key_at = at + keys + key_head * key_dim
                _normed(tag, x, key_at, key_dim, np.float32(1.0), scratch, k_at)
                beta = vround(tag, _sigmoid(vsplat(ld(tag, x, at + b_at + head))))
                a = ld(tag, x, at + b_at + heads + head) + ld(0.0, dt_bias, head)
                wait = float(a)
                if wait <= _LINEAR_FROM:
                    wait = math.log1p(math.exp(wait))
                fade = vexp(vsplat(ld(0.0, decay, head) * np.float32(wait)))
                squares = vsplat(np.float32(0.0))
                for j in range(0, dim, 16):
                    left = dim - j
                    told = vsplat(np.float32(0.0))
                    for i in range(key_dim):
                        place = memory + i * dim + j
                        s = vmul(vld_upto(0.0, states, place, left), fade)
                        vst_upto(0.0, states, place, s, left)
                        told = vfma(vsplat(ld(0.0, scratch, k_at + i)), s, told)
                    v = vld_upto(tag, x, at + 2 * keys + head * dim + j, left)
                    delta = vmul(vsub(v, told), beta)
                    read = vsplat(np.float32(0.0))
                    for i in range(key_dim):
                        place = memory + i * dim + j
                        s = vld_upto(0.0, states, place, left)
                        s = vfma(vsplat(ld(0.0, scratch, k_at + i)), delta, s)
                        vst_upto(0.0, states, place, s, left)
                        read = vfma(vsplat(ld(0.0, scratch, i)), s, read)
                    read = vround(tag, read)
                    squares = vfma(read, read, squares)
                    vst_upto(0.0, scratch, o_at + j, read, left)
                mean = vsum(squares) / np.float32(dim)
                factor = vsplat(np.float32(1.0) / np.float32(math.sqrt(mean + np.float32(eps))))
                for j in range(0, dim, 16):
                    left = dim - j
                    y = vround(tag, vmul(vld_upto(0.0, scratch, o_at + j, left), factor))
                    y = vround(tag, vmul(vld_upto(tag, norm_w, j, left), y))
                    z = vld_upto(tag, x, at + z_at + head * dim + j, left)
                    y = vmul(y, vmul(z, _sigmoid(z)))
                    vst_upto(tag, out, token * out_stride + head * dim + j, y, left)


def scratch_bytes(key_dim: int, dim: int) -> int:
    """Bytes `delta_kernel` needs."""
    return 4 * (2 * key_dim + dim + 16)
