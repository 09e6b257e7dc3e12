"""The interpreter itself: what CUDA C says each operation gives, against numpy.

These run on a GPU as well (``--gpu``): then they hold the expectations to real hardware.
"""

from __future__ import annotations

import numpy as np
import pytest

from rota.gpu.device import KernelSpec

N = 192


def run(rig, body, inputs, out_type, n=N, params="", args=()):
    """Run ``out[i] = ...`` over n threads in two blocks; inputs become pointers a, b, c."""
    c_types = {"i4": "int", "u4": "unsigned", "i8": "long long", "u8": "unsigned long long",
               "f4": "float", "i2": "short", "u2": "unsigned short", "i1": "signed char",
               "u1": "unsigned char"}  # fmt: skip

    def c_type(dtype):
        return c_types[np.dtype(dtype).str[1:]]

    names = "abc"[: len(inputs)]
    pointers = [f"const {c_type(x.dtype)}* {name}" for name, x in zip(names, inputs, strict=True)]
    head = ", ".join([f"{c_type(out_type)}* out", *pointers]) + params
    source = f"""
extern "C" __global__ void f({head}) {{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    {body}
}}
"""
    letters = "p" * (1 + len(inputs)) + "i" * len(args)
    k = rig.device.load_kernel(KernelSpec("f", letters, cuda_source=source))
    out = rig.up(np.zeros(n, out_type))
    addresses = [rig.up(x) for x in inputs]
    rig.device.launch(k, (2, 1, 1), (n // 2, 1, 1), (out, *addresses, *args), rig.stream)
    return rig.down(out, n, out_type)


def ints(dtype, seed):
    info = np.iinfo(dtype)
    rng = np.random.default_rng(seed)
    values = rng.integers(info.min, info.max, N, dtype, endpoint=True)
    edges = [info.min, info.max, 0, 1, info.max - 1]
    values[: len(edges)] = edges
    return rng.permutation(values)


def truncated(x, y):
    """Quotient and remainder as C has them."""
    q = (np.abs(x.astype(object)) // np.abs(y.astype(object))) * np.sign(x) * np.sign(y)
    return q.astype(np.int64), (x.astype(object) - q * y.astype(object)).astype(np.int64)


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, np.uint64])
def test_add_subtract_multiply_and_bits_wrap(rig, dtype):
    a, b = ints(dtype, 1), ints(dtype, 2)
    with np.errstate(over="ignore"):
        want = (a + b) ^ (a - b) ^ (a * b) ^ (a & b) ^ (a | ~b)
    body = (
        "out[i] = (a[i] + b[i]) ^ (a[i] - b[i]) ^ (a[i] * b[i]) ^ (a[i] & b[i]) ^ (a[i] | ~b[i]);"
    )
    assert np.array_equal(run(rig, body, [a, b], dtype), want)


@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
def test_division_truncates(rig, dtype):
    a = ints(dtype, 3)
    b = np.random.default_rng(4).integers(1, 1000, N).astype(dtype)
    if dtype == np.int32:
        b[::2] *= -1
        a[a == np.iinfo(np.int32).min] = 5
    q, r = truncated(a, b)
    assert np.array_equal(run(rig, "out[i] = a[i] / b[i];", [a, b], dtype), q.astype(dtype))
    assert np.array_equal(run(rig, "out[i] = a[i] % b[i];", [a, b], dtype), r.astype(dtype))


@pytest.mark.parametrize("divisor", [3, 5, 7, 10, 24, 96])
def test_division_by_constants_is_multiplication_in_disguise(rig, divisor):
    a, u = np.abs(ints(np.int32, 5) // 2), ints(np.uint32, 6)
    got = run(rig, f"out[i] = a[i] / {divisor} * 1000 + a[i] % {divisor};", [a], np.int32)
    with np.errstate(over="ignore"):
        assert np.array_equal(got, a // divisor * 1000 + a % divisor)
    got = run(rig, f"out[i] = a[i] / {divisor}u;", [u], np.uint32)
    assert np.array_equal(got, u // np.uint32(divisor))


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, np.uint64])
def test_shifts(rig, dtype):
    a, by = ints(dtype, 7), np.arange(N, dtype=np.int32) % (8 * np.dtype(dtype).itemsize)
    assert np.array_equal(run(rig, "out[i] = a[i] >> b[i];", [a, by], dtype), a >> by.astype(dtype))
    assert np.array_equal(run(rig, "out[i] = a[i] << b[i];", [a, by], dtype), a << by.astype(dtype))


def test_high_products_and_minima(rig):
    a, b = ints(np.int32, 8), ints(np.int32, 9)
    wide = a.astype(np.int64) * b
    got = run(rig, "out[i] = __mulhi(a[i], b[i]);", [a, b], np.int32)
    assert np.array_equal(got, (wide >> 32).astype(np.int32))
    got = run(rig, "out[i] = (long long)a[i] * b[i];", [a, b], np.int64)
    assert np.array_equal(got, wide)
    got = run(rig, "out[i] = min(a[i], b[i]);", [a, b], np.int32)
    assert np.array_equal(got, np.minimum(a, b))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16])
def test_narrow_loads_and_stores_extend_by_their_sign(rig, dtype):
    a = ints(dtype, 10)
    assert np.array_equal(run(rig, "out[i] = a[i];", [a], np.int64), a.astype(np.int64))
    b = ints(np.int32, 11)
    assert np.array_equal(run(rig, "out[i] = a[i];", [b], dtype), b.astype(dtype))


def floats(seed):
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(N) * 10.0 ** rng.integers(-6, 7, N)).astype(np.float32)
    values[:6] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0]
    return rng.permutation(values)


def same(got, want):
    return np.array_equal(got, want, equal_nan=True)


def test_float_arithmetic_rounds_to_nearest_even(rig):
    a, b = floats(12), floats(13)
    with np.errstate(all="ignore"):
        assert same(run(rig, "out[i] = __fadd_rn(a[i], b[i]);", [a, b], np.float32), a + b)
        assert same(run(rig, "out[i] = __fmul_rn(a[i], b[i]);", [a, b], np.float32), a * b)
        fused = (a.astype(np.longdouble) * b + 1).astype(np.float32)
        assert same(run(rig, "out[i] = fmaf(a[i], b[i], 1.0f);", [a, b], np.float32), fused)


@pytest.mark.parametrize("op", ["<", "<=", ">", ">=", "==", "!="])
def test_float_comparisons_with_nan(rig, op):
    a, b = floats(14), floats(15)
    b[::3] = a[::3]
    compare = {"<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal,
               "==": np.equal, "!=": np.not_equal}[op]  # fmt: skip
    want = compare(a, b).astype(np.int32)
    assert np.array_equal(run(rig, f"out[i] = a[i] {op} b[i];", [a, b], np.int32), want)
    got = run(rig, f"if (!(a[i] {op} b[i])) out[i] = 1;", [a, b], np.int32)
    assert np.array_equal(got, 1 - want)


def test_conversions_between_integers_and_floats(rig):
    a = ints(np.int32, 16)
    assert np.array_equal(run(rig, "out[i] = a[i];", [a], np.float32), a.astype(np.float32))
    f = (np.random.default_rng(17).standard_normal(N) * 1e6).astype(np.float32)
    assert np.array_equal(run(rig, "out[i] = (int)a[i];", [f], np.int32), f.astype(np.int32))


@pytest.mark.parametrize("mode", ["xor", "down", "up", "idx"])
def test_shuffles(rig, mode):
    a = ints(np.int32, 18)
    lane, warp = np.arange(N) % 32, np.arange(N) // 32 * 32
    call = {"xor": "xor_sync(~0u, a[i], 5)", "down": "down_sync(~0u, a[i], 3)",
            "up": "up_sync(~0u, a[i], 7)",
            "idx": "sync(~0u, a[i], (i * 11) & 31)"}[mode]  # fmt: skip
    source = {"xor": lane ^ 5, "down": lane + 3, "up": lane - 7, "idx": np.arange(N) * 11 & 31}
    wanted = source[mode]
    wanted = np.where((wanted < 0) | (wanted > 31), lane, wanted)
    got = run(rig, f"out[i] = __shfl_{call};", [a], np.int32)
    assert np.array_equal(got, a[warp + wanted])


def test_loops_and_branches_that_part_and_meet(rig):
    body = """
    int x = a[i] & 63, steps = 0;
    while (x != 0 && steps < 200) {
        if (x & 1) x = x - 1; else { x >>= 1; if (x == 6) { steps += 100; continue; } }
        ++steps;
    }
    out[i] = steps;
    """
    a = ints(np.int32, 19)

    def steps(x):
        count = 0
        while x != 0 and count < 200:
            if x & 1:
                x -= 1
            else:
                x >>= 1
                if x == 6:
                    count += 100
                    continue
            count += 1
        return count

    want = [steps(int(x) & 63) for x in a]
    assert run(rig, body, [a], np.int32).tolist() == want


def test_a_reduction_through_shared_memory(rig):
    a = np.random.default_rng(20).integers(-1000, 1000, N).astype(np.int32)
    body = """
    __shared__ int held[128];
    const int t = threadIdx.x;
    held[t] = a[i];
    if (t < 128 - 96) held[96 + t] = 0;
    __syncthreads();
    for (int d = 64; d > 0; d >>= 1) {
        int other = t < d ? held[t + d] : 0;
        __syncthreads();
        if (t < d) held[t] += other;
        __syncthreads();
    }
    out[i] = held[0];
    """
    got = run(rig, body, [a], np.int32)
    want = np.repeat(a.reshape(2, -1).sum(axis=1), N // 2)
    assert np.array_equal(got, want)


def test_threads_that_return_early_leave_the_rest_alone(rig):
    a = ints(np.int32, 21)
    got = run(
        rig, "if (i >= n) return; out[i] = a[i] ^ n;", [a], np.int32, params=", int n", args=(70,)
    )
    want = np.where(np.arange(N) < 70, a ^ 70, 0)
    assert np.array_equal(got, want)
