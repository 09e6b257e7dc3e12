"""The batched LoRA delta: against its reference, row by row bit-equal, nothing else touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rota.errors import InternalError
from rota.gpu.kernels.bgmv import LoraGroup
from rota.gpu.kernels.host import HostKernels

Close = Callable[..., None]


WAYS = {
    "bf16-dot": (torch.bfloat16, True),
    "bf16-lanes": (torch.bfloat16, False),
    "f32": (torch.float32, False),
}


@pytest.fixture(params=list(WAYS), scope="session")
def fast(request: pytest.FixtureRequest) -> HostKernels:
    """Every numba kernel; the one for pairs of bf16 where the processor has the instruction."""
    dtype, dot = WAYS[request.param]
    kernels = HostKernels(dtype, use_dot=dot)
    if dot and not kernels.uses_dot:
        pytest.skip("needs a processor with AVX512-BF16")
    return kernels


@pytest.fixture(scope="session")
def plain(fast: HostKernels) -> HostKernels:
    return HostKernels(fast.dtype, use_numba=False)


PATTERNS = {
    "distinct": lambda n: [i % 8 for i in range(n)],
    "uniform": lambda n: [(i * 5 + i // 3) % 3 for i in range(n)],
    "identical": lambda n: [4] * n,
    "skewed": lambda n: [0 if i % 4 else 1 + i % 7 for i in range(n)],
    "half-base": lambda n: [-1 if i % 2 else i % 8 for i in range(n)],
    "base": lambda n: [-1] * n,
}


def apply(group: LoraGroup, x: torch.Tensor, out: torch.Tensor, slots: list[int]) -> None:
    cells = torch.tensor(slots, dtype=torch.int32)
    group.apply(
        x.data_ptr(), x.stride(0), out.data_ptr(), out.stride(0), cells.data_ptr(), len(slots)
    )


def inputs(
    tables: Any, rows: int, dtype: torch.dtype, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """x and out as narrow views of wider memory; what lies between rows of x is NaN."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.full((rows + 1, tables.k_in + 11), float("nan"), dtype=dtype)
    wide[:, : tables.k_in] = torch.randn((rows + 1, tables.k_in), generator=generator)
    out = torch.randn((rows + 1, tables.columns + 6), generator=generator).to(dtype)
    return wide[:rows, : tables.k_in], out


def lanes_apart(products: torch.Tensor, k_in: int) -> torch.Tensor:
    """Even and odd products in two sums, what is left after whole 32 in the first."""
    even, odd = torch.zeros(len(products), 16), torch.zeros(len(products), 16)
    for i in range(0, k_in, 32):
        if i + 32 <= k_in:
            even += products[:, i : i + 32 : 2]
            odd += products[:, i + 1 : i + 32 : 2]
        else:
            even += products[:, i : i + 16]
            even += products[:, i + 16 : i + 32]
    return even + odd


def lanes_by_pairs(products: torch.Tensor) -> torch.Tensor:
    """Both products of a pair, the odd one first, into the pair's lane."""
    lanes = torch.zeros(len(products), 16)
    for i in range(0, products.shape[1], 32):
        for j in (1, 0):
            lanes += products[:, i + j : i + 32 : 2]
    return lanes


def in_the_kernels_order(
    pool: Any, x: torch.Tensor, out: torch.Tensor, slots: list[int], *, dot: bool
) -> torch.Tensor:
    """What the kernel must give for bf16, bit by bit, in the order of additions it promises.

    Products of two bf16 numbers are exact in fp32, so a fused multiply-add is a plain addition.
    """
    out, k_in, rank = out.clone(), pool.k_in, pool.rank
    keep = iter(pool.keep)
    for part in pool.slices:
        mine: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        memories = []
        for memory in keep:
            memories.append(memory)
            if memory.dtype == torch.float32:
                break
        *matrices, cells, scales = memories
        at = iter(matrices)
        for slot in range(pool.max_loras):
            if cells[0, slot] == 0:
                mine.append(None)
                continue
            a = next(at)[: rank * k_in].view(rank, k_in).float()
            b = next(at)[: part.n_out * rank].view(part.n_out, rank).float()
            mine.append((a, b))
        for row, slot in enumerate(slots):
            pair = mine[slot] if slot >= 0 else None
            if pair is None:
                continue
            products = torch.zeros(rank, -(-k_in // 32) * 32)
            products[:, :k_in] = pair[0] * x[row].float()
            lanes = lanes_by_pairs(products) if dot else lanes_apart(products, k_in)
            while lanes.shape[1] > 1:
                half = lanes.shape[1] // 2
                lanes = lanes[:, :half] + lanes[:, half:]
            xa = lanes[:, 0].bfloat16().float()
            delta = torch.zeros(part.n_out)
            for r in range(rank):
                at = r ^ 1 if dot else r
                delta += xa[at] * pair[1][:, at]
            place = out[row, part.column : part.column + part.n_out]
            place.copy_(place.float() + scales[slot] * delta.bfloat16().float())
    return out


@pytest.mark.parametrize("rank", [8, 16, 24, 64])
@pytest.mark.parametrize("pattern", list(PATTERNS))
@pytest.mark.parametrize(
    ("k_in", "outs"),
    [(576, (576, 192, 192)), (48, (80,)), (20, (7, 33)), (64, (16, 1)), (95, (40, 40, 8))],
)
def test_equals_reference(
    fast: HostKernels,
    plain: HostKernels,
    tables: Callable[..., Any],
    assert_close: Close,
    rank: int,
    pattern: str,
    k_in: int,
    outs: tuple[int, ...],
) -> None:
    pool = tables(fast.dtype, k_in, rank, outs, 8, missing=frozenset({(0, 2), (len(outs) - 1, 5)}))
    for rows in (1, 2, 3, 7, 16, 33):
        slots = PATTERNS[pattern](rows)
        x, out = inputs(pool, rows, fast.dtype)
        before, wanted = out.clone(), out.clone()
        apply(pool.group(fast), x, out, slots)
        apply(pool.group(plain), x, wanted, slots)
        # A rounding of x A^T that falls the other way moves a sum that cancels by its terms' ulp.
        assert_close(out, wanted, near_zero=1 / 16)
        if fast.dtype == torch.bfloat16:
            assert torch.equal(out, in_the_kernels_order(pool, x, before, slots, dot=fast.uses_dot))
        touched = torch.zeros(out.shape, dtype=torch.bool)
        for j, part in enumerate(pool.slices):
            for row, slot in enumerate(slots):
                if slot >= 0 and (j, slot) not in {(0, 2), (len(outs) - 1, 5)}:
                    touched[row, part.column : part.column + part.n_out] = True
        assert torch.equal(out[~touched], before[~touched])


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    slots=st.lists(st.integers(-1, 5), min_size=1, max_size=40),
    rank=st.sampled_from([8, 16, 40]),
    k_in=st.sampled_from([31, 32, 48, 100]),
    n_out=st.sampled_from([5, 16, 50]),
)
def test_a_row_alone_equals_the_row_in_any_batch(
    fast: HostKernels,
    tables: Callable[..., Any],
    slots: list[int],
    rank: int,
    k_in: int,
    n_out: int,
) -> None:
    pool = tables(fast.dtype, k_in, rank, (n_out, 8), 6, missing=frozenset({(1, 3)}))
    group = pool.group(fast)
    x, out = inputs(pool, len(slots), fast.dtype, seed=len(slots))
    alone = out.clone()
    apply(group, x, out, slots)
    for row, slot in enumerate(slots):
        apply(group, x[row:], alone[row:], [slot])
    assert torch.equal(out, alone)


def test_fp32_delta_is_the_plain_formula(tables: Callable[..., Any]) -> None:
    pool = tables(torch.float32, 48, 8, (20,), 1)
    x, out = inputs(pool, 5, torch.float32)
    a = pool.keep[0][: 8 * 48].view(8, 48).double()
    b = pool.keep[1][: 20 * 8].view(20, 8).double()
    scale = float(pool.keep[3][0])
    column = pool.slices[0].column
    wanted = out[:5, column : column + 20].double() + scale * (x.double() @ a.T) @ b.T
    apply(pool.group(HostKernels(torch.float32)), x, out, [0] * 5)
    torch.testing.assert_close(out[:5, column : column + 20].double(), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("slot", [8, 2**30, -2, -(2**31)])
def test_a_slot_outside_the_tables_is_refused_and_nothing_written(
    fast: HostKernels, plain: HostKernels, tables: Callable[..., Any], slot: int
) -> None:
    pool = tables(fast.dtype, 48, 8, (20,), 8)
    x, out = inputs(pool, 3, fast.dtype)
    for kernels in (fast, plain):
        before = out.clone()
        with pytest.raises(InternalError) as caught:
            apply(pool.group(kernels), x, out, [-1, slot, 2])
        assert caught.value.code == "slot-out-of-range"
        assert caught.value.subject == "row 1"
        assert torch.equal(out, before)


def test_tables_are_read_at_every_call(fast: HostKernels, tables: Callable[..., Any]) -> None:
    pool = tables(fast.dtype, 48, 8, (20,), 2)
    group = pool.group(fast)
    x, out = inputs(pool, 1, fast.dtype)
    before = out.clone()
    cells = pool.keep[4]
    kept = cells.clone()
    cells[:, 1] = 0
    apply(group, x, out, [1])
    assert torch.equal(out, before)
    cells[:, 1] = kept[:, 0]
    apply(group, x, out, [1])
    assert not torch.equal(out, before)


@pytest.mark.parametrize(
    ("slices", "rank", "code"), [(0, 8, "slices"), (4, 8, "slices"), (1, 12, "rank")]
)
def test_a_group_that_cannot_be_is_refused(
    plain: HostKernels, tables: Callable[..., Any], slices: int, rank: int, code: str
) -> None:
    pool = tables(plain.dtype, 48, 8, (20,), 2)
    with pytest.raises(InternalError) as caught:
        plain.lora_group(pool.slices * slices, k_in=48, rank=rank, max_loras=2)
    assert caught.value.code == f"lora-group-{code}"
