"""Gated delta net, gates and routing: against references, and every row alone as in a batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rota.gpu.kernels.gdn import GdnShape, GdnWeights, StateRows
from rota.gpu.kernels.host import HostKernels

Close = Callable[..., None]
SHAPES = [GdnShape(2, 4, 16, 24, 4), GdnShape(1, 3, 7, 5, 2), GdnShape(2, 2, 32, 48, 5)]
SLOTS = 3


def random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weights(shape: GdnShape, dtype: torch.dtype) -> GdnWeights:
    return GdnWeights(
        conv=random(shape.conv, shape.channels, dtype=dtype, seed=1) * 0.6,
        decay=-torch.rand(shape.value_heads, generator=torch.Generator().manual_seed(2)) - 0.1,
        dt_bias=random(shape.value_heads, dtype=torch.float32, seed=3),
        norm=random(shape.value_dim, dtype=dtype, seed=4),
        eps=1e-6,
    )


class States:
    """Both state arrays, and one call."""

    def __init__(self, shape: GdnShape, dtype: torch.dtype) -> None:
        self.shape, self.weights = shape, weights(shape, dtype)
        self.conv = torch.zeros((SLOTS, shape.conv - 1, shape.channels), dtype=dtype)
        self.memory = torch.zeros((SLOTS, shape.value_heads, shape.key_dim, shape.value_dim))

    def run(
        self, kernels: HostKernels, projected: torch.Tensor, rows: list[tuple[int, int, int]]
    ) -> torch.Tensor:
        """``rows``: (first, count, slot)."""
        columns = torch.tensor(rows, dtype=torch.int32).T.contiguous()
        out = torch.full((len(projected), self.shape.value_width + 3), 9.0).to(projected.dtype)
        kernels.delta_net(
            self.shape,
            self.weights,
            projected.clone(),
            self.conv,
            self.memory,
            StateRows(columns[0], columns[1], columns[2], len(rows)),
            out[:, : self.shape.value_width],
        )
        assert bool((out[:, self.shape.value_width :] == 9.0).all())
        return out[:, : self.shape.value_width].clone()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_delta_net_equals_reference(
    fast: HostKernels, plain: HostKernels, assert_close: Close, shape: GdnShape
) -> None:
    x = random(14, shape.projected, dtype=fast.dtype, seed=5) * 2
    x[3, -1] = 40.0  # softplus is linear there
    found, wanted = States(shape, fast.dtype), States(shape, fast.dtype)
    for rows in ([(0, 9, 2), (9, 5, 0)], [(0, 1, 0), (3, 6, 2)]):
        used = torch.cat([torch.arange(f, f + n) for f, n, _ in rows])
        a, b = found.run(fast, x, rows), wanted.run(plain, x, rows)
        # A rounding that falls the other way in the state moves later tokens by some units.
        assert_close(a[used], b[used], ulps=8, near_zero=1 / 16)
        assert torch.equal(found.conv, wanted.conv)
        assert_close(found.memory, wanted.memory)
    assert not found.memory[1].any() and not found.conv[1].any()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_sequence_is_the_same_in_any_batch_and_chunking(
    fast: HostKernels, shape: GdnShape
) -> None:
    x = random(11, shape.projected, dtype=fast.dtype, seed=6)
    whole = States(shape, fast.dtype)
    expected = whole.run(fast, x, [(0, 11, 1)])
    for sizes in ([1] * 11, [4, 7], [1, 9, 1]):
        parts, at = States(shape, fast.dtype), 0
        for size in sizes:
            # Beside another sequence, and at another place of the step.
            other = random(5, shape.projected, dtype=fast.dtype, seed=at)
            step = torch.cat([other[:3], x[at : at + size], other[3:]])
            found = parts.run(fast, step, [(0, 3, 0), (3, size, 1), (3 + size, 2, 2)])
            assert torch.equal(found[3 : 3 + size], expected[at : at + size])
            at += size
        assert torch.equal(parts.memory[1], whole.memory[1])
        assert torch.equal(parts.conv[1], whole.conv[1])


@pytest.mark.parametrize("width", [1, 24, 32, 50])
@pytest.mark.parametrize("single", [False, True])
def test_sigmoid_mul_equals_reference(
    fast: HostKernels, plain: HostKernels, assert_close: Close, width: int, single: bool
) -> None:
    wide = random(7, 3, 2 * width, dtype=fast.dtype, seed=7) * 4
    gates = wide[..., width : width + 1] if single else wide[..., width:]
    found = random(7, 3 * width + 2, dtype=fast.dtype, seed=8)
    wanted = found.clone()
    fast.sigmoid_mul(found[:, : 3 * width].unflatten(1, (3, width)), gates)
    plain.sigmoid_mul(wanted[:, : 3 * width].unflatten(1, (3, width)), gates)
    assert_close(found, wanted)
    assert torch.equal(found[:, 3 * width :], wanted[:, 3 * width :])


@pytest.mark.parametrize("width", [1, 5, 24])
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("rows", [2, 7, 16, 17, 33])
def test_gates_and_routes_of_rows_alone_equal_those_in_a_batch(
    fast: HostKernels, plain: HostKernels, rows: int, single: bool, width: int
) -> None:
    """To the last bit, by reference and kernel alike, however many values there are in all."""
    gates = random(rows, 1, 1 if single else width, dtype=fast.dtype, seed=10) * 3
    x = random(rows, 1, width, dtype=fast.dtype, seed=11)
    logits = random(rows, width, dtype=fast.dtype, seed=12)
    for kernels in (fast, plain):
        batch = x.clone()
        kernels.sigmoid_mul(batch, gates)
        shares, ids = torch.empty_like(logits), torch.empty((rows, width), dtype=torch.int32)
        kernels.route(logits, shares, ids)
        for row in range(rows):
            own = slice(row, row + 1)
            alone = x[own].clone()
            kernels.sigmoid_mul(alone, gates[own])
            assert torch.equal(alone, batch[own])
            share, chosen = torch.empty_like(shares[own]), torch.empty_like(ids[own])
            kernels.route(logits[own], share, chosen)
            assert torch.equal(share, shares[own]) and torch.equal(chosen, ids[own])


@pytest.mark.parametrize(("experts", "k"), [(8, 2), (1, 1), (40, 5), (256, 8), (17, 17)])
def test_route_equals_reference(
    fast: HostKernels, plain: HostKernels, assert_close: Close, experts: int, k: int
) -> None:
    wide = random(9, experts + 2, dtype=fast.dtype, seed=9) * 3
    logits = wide[:, :experts]
    logits[4] = 1.5  # ties: the lowest ids
    made = [(torch.empty((9, k), dtype=fast.dtype), torch.empty((9, k), dtype=torch.int32))] * 1
    made.append((torch.empty_like(made[0][0]), torch.empty_like(made[0][1])))
    for kernels, (weights, ids) in zip((fast, plain), made, strict=True):
        kernels.route(logits, weights, ids)
    assert torch.equal(made[0][1], made[1][1])
    assert made[0][1][4].tolist() == list(range(k))
    assert_close(made[0][0], made[1][0])
    alone = torch.empty((1, k), dtype=fast.dtype), torch.empty((1, k), dtype=torch.int32)
    fast.route(logits[6:7], *alone)
    assert torch.equal(alone[0][0], made[0][0][6]) and torch.equal(alone[1][0], made[0][1][6])


def test_route_of_nan_still_names_experts(fast: HostKernels) -> None:
    logits = torch.full((1, 8), float("nan"), dtype=fast.dtype)
    weights, ids = torch.empty((1, 3), dtype=fast.dtype), torch.empty((1, 3), dtype=torch.int32)
    fast.route(logits, weights, ids)
    assert len(set(ids[0].tolist())) == 3 and int(ids.min()) >= 0 and int(ids.max()) < 8
