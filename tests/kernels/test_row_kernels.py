"""Norm, activation and rope: against their references, and every row alone as in a batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rota.gpu.kernels.host import HostKernels

Close = Callable[..., None]


def random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("hidden", [1, 15, 16, 48, 80, 576])
@pytest.mark.parametrize("one_plus", [False, True])
def test_norm_equals_reference(
    fast: HostKernels, plain: HostKernels, assert_close: Close, hidden: int, one_plus: bool
) -> None:
    wide = random(33, hidden + 3, dtype=fast.dtype, seed=1)
    x, w = wide[:, :hidden], random(hidden, dtype=fast.dtype, seed=2)
    found, wanted = torch.empty(33, hidden, dtype=fast.dtype), torch.empty_like(x)
    fast.rms_norm(x, w, 1e-5, found, one_plus=one_plus)
    plain.rms_norm(x, w, 1e-5, wanted, one_plus=one_plus)
    assert_close(found, wanted)

    residual = random(33, hidden, dtype=fast.dtype, seed=3)
    other = residual.clone()
    fast.add_rms_norm(x, residual, w, 1e-5, found, one_plus=one_plus)
    plain.add_rms_norm(x, other, w, 1e-5, wanted, one_plus=one_plus)
    assert torch.equal(residual, other)
    assert_close(found, wanted)


def test_norm_may_overwrite_its_input_and_touches_nothing_else(fast: HostKernels) -> None:
    wide = random(5, 60, dtype=fast.dtype, seed=4)
    before = wide.clone()
    w = random(50, dtype=fast.dtype, seed=5)
    apart = torch.empty(5, 50, dtype=fast.dtype)
    fast.rms_norm(wide[:, :50], w, 1e-5, apart)
    assert torch.equal(wide, before)
    fast.rms_norm(wide[:, :50], w, 1e-5, wide[:, :50])
    assert torch.equal(wide[:, :50], apart)
    assert torch.equal(wide[:, 50:], before[:, 50:])


@pytest.mark.parametrize("inter", [1, 16, 23, 96, 1536])
def test_silu_mul_equals_reference(
    fast: HostKernels, plain: HostKernels, assert_close: Close, inter: int
) -> None:
    gate_up = random(17, 2 * inter, dtype=fast.dtype, seed=6) * 4
    found, wanted = (torch.empty(17, inter, dtype=fast.dtype) for _ in range(2))
    fast.silu_mul(gate_up, found)
    plain.silu_mul(gate_up, wanted)
    assert_close(found, wanted)


def test_silu_mul_at_the_ends_of_the_range(fast: HostKernels, plain: HostKernels) -> None:
    gates = [-1e30, -200.0, -100.0, -88.0, -1e-30, 0.0, 1e-30, 88.0, 200.0, 1e30]
    gates += [float("inf"), float("nan")]
    gate_up = torch.tensor([gates + [1.0] * len(gates)], dtype=fast.dtype)
    found, wanted = (torch.empty(1, len(gates), dtype=fast.dtype) for _ in range(2))
    fast.silu_mul(gate_up, found)
    plain.silu_mul(gate_up, wanted)
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("rows", [1, 2, 3, 16, 33])
def test_rows_alone_equal_rows_in_a_batch(fast: HostKernels, rows: int) -> None:
    x = random(33, 80, dtype=fast.dtype, seed=7)
    w = random(80, dtype=fast.dtype, seed=8)
    whole, part = torch.empty_like(x), torch.empty(rows, 80, dtype=fast.dtype)
    fast.rms_norm(x, w, 1e-5, whole)
    fast.rms_norm(x[:rows], w, 1e-5, part)
    assert torch.equal(part, whole[:rows])
    gated, gated_part = torch.empty(33, 40, dtype=fast.dtype), part[:, :40]
    fast.silu_mul(x, gated)
    fast.silu_mul(x[:rows], gated_part)
    assert torch.equal(gated_part, gated[:rows])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary"),
    [(9, 3, 64, 64), (4, 2, 8, 8), (6, 2, 16, 16), (4, 1, 32, 8), (2, 2, 24, 24), (8, 8, 128, 128)],
)
@pytest.mark.parametrize("head_norm", ["none", "w", "one-plus"])
def test_rope_equals_reference(
    fast: HostKernels,
    plain: HostKernels,
    assert_close: Close,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotary: int,
    head_norm: str,
) -> None:
    rows, blocks = 19, 6
    columns = (heads + 2 * kv_heads) * head_dim
    qkv = random(rows, columns + 7, dtype=fast.dtype, seed=9)
    pair = [qkv.clone()[:, :columns] for _ in range(2)]
    angles = torch.rand((50, rotary // 2), generator=torch.Generator().manual_seed(10)) * 6
    generator = torch.Generator().manual_seed(11)
    positions = torch.randint(0, 50, (rows,), generator=generator, dtype=torch.int32)
    slots = torch.randperm(blocks * 16, generator=generator)[:rows]
    weights = (None, None)
    if head_norm != "none":
        weights = (
            random(head_dim, dtype=fast.dtype, seed=12),
            random(head_dim, dtype=fast.dtype, seed=13),
        )
    caches = [torch.full((2, blocks, kv_heads, 16, head_dim), 7.0).to(fast.dtype) for _ in pair]
    for kernels, x, cache in zip((fast, plain), pair, caches, strict=True):
        kernels.rope_and_cache(
            x,
            heads,
            kv_heads,
            positions,
            angles.cos(),
            angles.sin(),
            cache[0],
            cache[1],
            slots,
            *weights,
            1e-6,
            one_plus=head_norm == "one-plus",
        )
    q_columns = heads * head_dim
    if head_norm == "none":
        assert torch.equal(pair[0][:, :q_columns], pair[1][:, :q_columns])
        assert torch.equal(caches[0], caches[1])
    else:
        assert_close(pair[0][:, :q_columns], pair[1][:, :q_columns], ulps=4)
        assert_close(caches[0], caches[1], ulps=4)
    untouched = torch.ones(blocks * 16, dtype=torch.bool)
    untouched[slots] = False
    spare = caches[0][0].transpose(1, 2).reshape(blocks * 16, -1)[untouched]
    assert (spare == 7.0).all()


def test_one_token_with_head_norm_equals_that_token_among_others(plain: HostKernels) -> None:
    heads, kv_heads, head_dim = 2, 1, 8
    qkv = random(3, (heads + 2 * kv_heads) * head_dim, dtype=plain.dtype, seed=15)
    w = random(head_dim, dtype=plain.dtype, seed=16)
    angles = torch.tensor([[0.5, 0.25, 0.125, 0.0625]])
    positions, slots = torch.zeros(3, dtype=torch.int32), torch.arange(3)
    turned, caches = [], []
    for rows in (3, 1):
        x = qkv[:rows].clone()
        cache = torch.zeros(2, 1, kv_heads, 16, head_dim, dtype=plain.dtype)
        plain.rope_and_cache(
            x,
            heads,
            kv_heads,
            positions[:rows],
            angles.cos(),
            angles.sin(),
            cache[0],
            cache[1],
            slots[:rows],
            w,
            w,
        )
        turned.append(x[0])
        caches.append(cache[:, 0, 0, 0])
    q = heads * head_dim
    assert torch.equal(turned[1][:q], turned[0][:q])
    assert torch.equal(caches[1], caches[0])
    assert not torch.equal(turned[0][:q], qkv[0, :q])


def test_the_reference_rope_is_the_textbook_one() -> None:
    kernels = HostKernels(torch.float32, use_numba=False)
    qkv = random(1, 3 * 8, dtype=torch.float32, seed=14)
    q = torch.view_as_complex(qkv[0, :8].view(2, 4).T.contiguous())
    angles = torch.tensor([[0.5, 0.25, 0.125, 0.0625]])
    cache = torch.zeros(2, 1, 1, 16, 8)
    one = torch.zeros(1, dtype=torch.int64)
    kernels.rope_and_cache(
        qkv, 1, 1, one.int(), angles.cos(), angles.sin(), cache[0], cache[1], one
    )
    turned = torch.view_as_real(q * torch.polar(torch.ones(4), angles[0])).T.reshape(8)
    torch.testing.assert_close(qkv[0, :8], turned)
    assert torch.equal(cache[0, 0, 0, 0], qkv[0, 8:16])
    assert torch.equal(cache[1, 0, 0, 0], qkv[0, 16:])
