"""Paged attention: against its reference, any chunking, any company, no stray reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rota.gpu.kernels.host import HostKernels

Close = Callable[..., None]
NAN = float("nan")
SHAPES = [(9, 3, 64), (4, 2, 8), (6, 2, 16), (4, 4, 24), (8, 1, 32), (2, 1, 128), (3, 1, 80)]


class World:
    """Sequences with keys and values in scattered blocks; all that no row may see is NaN."""

    def __init__(
        self, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, lens: list[int]
    ) -> None:
        generator = torch.Generator().manual_seed(sum(lens) + head_dim)
        per = [-(-length // 16) for length in lens]
        blocks = sum(per) + 3
        order = torch.randperm(blocks, generator=generator).int()
        self.k = torch.full((blocks, kv_heads, 16, head_dim), NAN, dtype=dtype)
        self.v = torch.full_like(self.k, NAN)
        # Entries past a sequence's blocks name no block at all.
        self.tables = torch.full((len(lens), max(per) + 2), 2**30, dtype=torch.int32)
        self.q, self.plain_k, self.plain_v = [], [], []
        used = 0
        for seq, length in enumerate(lens):
            mine = order[used : used + per[seq]]
            used += per[seq]
            self.tables[seq, : per[seq]] = mine
            k, v = (
                torch.randn((length, kv_heads, head_dim), generator=generator).to(dtype)
                for _ in range(2)
            )
            for token in range(length):
                self.k[mine[token // 16], :, token % 16] = k[token]
                self.v[mine[token // 16], :, token % 16] = v[token]
            self.plain_k.append(k)
            self.plain_v.append(v)
            self.q.append(torch.randn((length, heads, head_dim), generator=generator).to(dtype))

    def run(self, kernels: HostKernels, rows: list[tuple[int, int]]) -> torch.Tensor:
        """Attention of (sequence, position) rows."""
        heads, head_dim = self.q[0].shape[1:]
        wide = torch.full((len(rows), heads * head_dim + 9), NAN, dtype=self.k.dtype)
        q = wide[:, : heads * head_dim].view(len(rows), heads, head_dim)
        for i, (seq, position) in enumerate(rows):
            q[i] = self.q[seq][position]
        out = torch.full((len(rows), heads * head_dim + 5), NAN, dtype=self.k.dtype)
        kernels.paged_attention(
            q,
            self.k,
            self.v,
            self.tables,
            torch.tensor([seq for seq, _ in rows], dtype=torch.int32),
            torch.tensor([position + 1 for _, position in rows], dtype=torch.int32),
            head_dim**-0.5,
            out[:, : heads * head_dim],
        )
        assert out[:, heads * head_dim :].isnan().all()
        return out[:, : heads * head_dim].clone()


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_equals_reference(
    fast: HostKernels,
    plain: HostKernels,
    assert_close: Close,
    heads: int,
    kv_heads: int,
    head_dim: int,
) -> None:
    lens = [1, 15, 16, 17, 40, 77]
    world = World(fast.dtype, heads, kv_heads, head_dim, lens)
    rows = [(seq, p) for seq, length in enumerate(lens) for p in range(length)]
    assert_close(world.run(fast, rows), world.run(plain, rows))


def test_the_reference_is_causal_attention(plain: HostKernels, assert_close: Close) -> None:
    world = World(plain.dtype, 6, 2, 16, [37])
    found = world.run(plain, [(0, p) for p in range(37)])
    q, k, v = (x.float().transpose(0, 1) for x in (world.q[0], world.plain_k[0], world.plain_v[0]))
    k, v = (x.repeat_interleave(3, dim=0) for x in (k, v))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert_close(found, wanted.transpose(0, 1).reshape(37, -1).to(plain.dtype))


@pytest.mark.parametrize("chunk", [1, 2, 7, 16, 17, 31, 64])
def test_chunks_do_not_matter(fast: HostKernels, chunk: int) -> None:
    world = World(fast.dtype, 9, 3, 64, [70])
    whole = world.run(fast, [(0, p) for p in range(70)])
    for start in range(0, 70, chunk):
        rows = [(0, p) for p in range(start, min(start + chunk, 70))]
        assert torch.equal(world.run(fast, rows), whole[start : start + chunk])


@pytest.mark.parametrize("seed", range(6))
def test_company_does_not_matter(fast: HostKernels, seed: int) -> None:
    lens = [5, 16, 33, 50]
    world = World(fast.dtype, 6, 2, 16, lens)
    every = [(seq, p) for seq, length in enumerate(lens) for p in range(length)]
    alone = {row: world.run(fast, [row])[0] for row in every}
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(seed)).tolist()
    rows = [every[i] for i in order[: 1 + seed * 17]]
    for row, found in zip(rows, world.run(fast, rows), strict=True):
        assert torch.equal(found, alone[row])


def test_no_rows(fast: HostKernels) -> None:
    assert World(fast.dtype, 6, 2, 16, [3]).run(fast, []).shape == (0, 96)


def test_large_scores_neither_overflow_nor_vanish(fast: HostKernels, plain: HostKernels) -> None:
    world = World(fast.dtype, 4, 2, 8, [40])
    world.q[0] *= 1000.0
    rows = [(0, p) for p in range(40)]
    found, wanted = world.run(fast, rows), world.run(plain, rows)
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
