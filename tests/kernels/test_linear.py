"""Packed linears: right, row-invariant at every size, and the cut that keeps them so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rota.errors import DeviceError
from rota.gpu.kernels.host import HostKernels
from rota.gpu.kernels.linear import (
    LinearPacker,
    PackedLinear,
    RowPlan,
    cancelling_probe,
    check_row_invariance,
)

Close = Callable[..., None]


def weight(n_out: int, k_in: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n_out)
    return (torch.randn((n_out, k_in), generator=generator) * 0.1).to(dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("n_out", "k_in"), [(80, 48), (48, 80), (12, 20), (960, 576), (576, 1536), (1, 7), (2048, 4096)]
)
def test_right_and_row_invariant(
    plain: HostKernels, assert_close: Close, n_out: int, k_in: int, bias: bool
) -> None:
    w = weight(n_out, k_in, plain.dtype)
    b = weight(n_out, 1, plain.dtype)[:, 0] if bias else None
    linear = plain.linear(w, b)
    x = weight(300, k_in, plain.dtype) * 10
    y = linear(x)
    wanted = x.double() @ w.double().T + (b.double() if b is not None else 0.0)
    assert_close(y, wanted.to(plain.dtype))
    for rows in (1, 2, 3, 15, 16, 17, 40, 64, 130, 257):
        assert torch.equal(linear(x[:rows]), y[:rows])
        assert torch.equal(linear(x[300 - rows :]), y[300 - rows :])
    if n_out * k_in < 10_000:
        # Another order of additions shows in one element of ten thousand.
        many = torch.randn((2000, k_in), generator=torch.Generator().manual_seed(5)).to(w.dtype)
        alone = torch.cat([linear(row[None]) for row in many])
        assert torch.equal(alone, linear(many))
    assert linear(x[:0]).shape == (0, n_out)


def test_the_check_sees_a_row_that_depends_on_its_company(plain: HostKernels) -> None:
    class Leaky:
        k_in = 8
        dtype = plain.dtype

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x + len(x) * 0.5

    class Placed(Leaky):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.arange(len(x))[:, None] * 0.5

    class Honest(Leaky):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    assert not check_row_invariance(Leaky(), [1, 2, 16])
    assert not check_row_invariance(Placed(), [1, 2, 16])

    class Ordered(Leaky):
        """Adds from the other end when there is one row."""

        k_in = 40

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            terms = (x[:, None].float() * probe.float()).unbind(-1)
            total = torch.zeros(())
            for term in terms if len(x) > 1 else reversed(terms):
                total = total + term
            return total.to(x.dtype)

    probe, bias, rows = cancelling_probe(12, 40, 19, plain.dtype, False)
    assert bias is None and not check_row_invariance(Ordered(), [1, 2, 16], rows)
    assert check_row_invariance(Honest(), [1, 2, 16])


@pytest.mark.parametrize(
    "plan", [RowPlan(False, 1, 1), RowPlan(False, 16, 16), RowPlan(True, 2, 5)]
)
def test_any_plan_gives_every_row_once(dtype: torch.dtype, plan: RowPlan) -> None:
    seen: list[int] = []

    def double(x: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return x * 2

    linear = PackedLinear(double, plan, 3, 3, dtype, place=(0, 0))
    x = weight(23, 3, dtype)
    assert torch.equal(linear(x), x * 2)
    assert all(plan.min_rows <= size <= plan.max_rows for size in seen)


def test_a_library_without_packed_weights_is_replaced(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rota.gpu.kernels import linear as module

    def missing(*_: object) -> None:
        raise AttributeError("no such operator")

    monkeypatch.setattr(module, "_packed_operation", missing)
    linear = LinearPacker(dtype).pack(weight(32, 48, dtype))
    assert not linear.plan.packed
    x = weight(40, 48, dtype)
    y = linear(x)
    assert all(torch.equal(linear(x[i : i + 1])[0], y[i]) for i in range(40))


def test_a_weight_of_another_dtype_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(DeviceError) as caught:
        LinearPacker(dtype).pack(torch.zeros((4, 4), dtype=torch.float64))
    assert caught.value.code == "bad-weight"
