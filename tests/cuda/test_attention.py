"""Ways to attend: what they give, and what they call their kernels with."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rota.gpu.model.rows import RowInput
from rota.gpu.model.torch_attention import TorchAttention
from rota.gpu.model.torch_attention_flashinfer import FlashInferAttention, Pages
from rota.gpu.model.torch_attention_probe import why_not
from rota.gpu.model.torch_attention_varlen import varlen_as_it_is
from rota.gpu.model.torch_rows import HostRows, MixedRows, StepRows

from .flashinfer_calls import NEWEST, OLDEST
from .paged_kernels import GEOMETRIES

EDGES = (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 79, 80, 81, 127, 128, 129, 130)


@pytest.fixture(params=["torch-varlen", "flashinfer"])
def make(request, kernels):
    """A paged way."""
    return {"torch-varlen": varlen_as_it_is, "flashinfer": FlashInferAttention}[request.param]


def memory(spec, spans, seed):
    """Tables, lengths and caches of rows over shuffled blocks; what none sees is NaN."""
    rng = np.random.default_rng(seed)
    used = [-(-(start + count) // 16) for start, count in spans]
    total = sum(used) + 1
    order = rng.permutation(total - 1).astype(np.int32)
    tables = rng.integers(0, total, (len(spans), spec.blocks)).astype(np.int32)
    seen = np.zeros(total * 16, bool)
    at = 0
    for row, (start, count) in enumerate(spans):
        tables[row, : used[row]] = order[at : at + used[row]]
        at += used[row]
        where = np.arange(start + count)
        seen[tables[row, where // 16] * 16 + where % 16] = True
    lens = np.array([start + count for start, count in spans], np.int32)
    drawn = torch.Generator().manual_seed(seed)
    shape = (2, total * 16, spec.kv_heads, spec.head_dim)
    caches = torch.randn(shape, generator=drawn).to(spec.dtype)
    caches[:, torch.from_numpy(~seen)] = torch.nan
    caches[:, -1] = 0
    tokens = sum(count for _, count in spans)
    q = torch.randn(tokens, spec.heads, spec.head_dim, generator=drawn).to(spec.dtype)
    return HostRows(tables, lens), q, caches[0], caches[1], total * 16 - 1


def near(found, expected, dtype):
    bound = 0.02 if dtype is torch.bfloat16 else 1e-5
    return bool(((found - expected).abs() <= bound * (1 + expected.abs())).all())


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 17, 64, 130])
def test_decode_over_ragged_rows_is_what_torch_gives(host, make, rows):
    spec = host.spec(rows=rows, blocks=12)
    way, sure = make(spec), TorchAttention(spec)
    for turn in range(2):
        rng = np.random.default_rng(rows + turn)
        spans = [(int(length) - 1, 1) for length in rng.choice(EDGES, rows)]
        rowed, q, keys, values, zero = memory(spec, spans, rows + turn)
        tables, lens = torch.from_numpy(rowed.tables), torch.from_numpy(rowed.lens)
        way.plan(rowed)
        found = way.decode(tables, lens, zero)(q, keys, values)
        assert near(found, sure.decode(tables, lens, zero)(q, keys, values), spec.dtype)
    way.close()


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_mixed_rows_are_what_torch_gives(host, make, geometry, seed):
    spec = host.spec(*geometry)
    way, sure = make(spec), TorchAttention(spec)
    rng = np.random.default_rng(seed)
    spans = [
        (int(start), int(count))
        for start, count in zip(
            rng.choice((0, 0, *EDGES), 9), rng.choice((1, 1, 2, 15, 16, 17, 33), 9), strict=True
        )
    ]
    rowed, q, keys, values, zero = memory(spec, spans, seed)
    rows = [RowInput(i, -1, at, (0,) * count, (), False) for i, (at, count) in enumerate(spans)]
    mixed = MixedRows(
        StepRows.of(rows), torch.from_numpy(rowed.tables), torch.from_numpy(rowed.lens), rowed
    )
    found = way.mixed(mixed, zero)(q, keys, values)
    assert near(found, sure.mixed(mixed, zero)(q, keys, values), spec.dtype)
    way.close()


def test_pages_of_rows_at_block_edges():
    tables = np.array([[7, 3, 9], [4, 5, 9], [2, 8, 6]], np.int32)
    pages = Pages.of(HostRows(tables, np.array([16, 17, 48], np.int32)))
    assert pages.indptr.tolist() == [0, 1, 3, 6]
    assert pages.indices.tolist() == [7, 4, 5, 2, 8, 6]
    assert pages.last.tolist() == [16, 1, 16]


def test_a_plan_waits_until_the_one_before_has_left_its_memory(on_driver, kernels):
    """Two decode steps in flight: the second plan must not change what the first one's copy
    sends."""
    spec = on_driver.spec(rows=2)
    problems = [memory(spec, spans, 5) for spans in ([(40, 1), (3, 1)], [(0, 1), (29, 1)])]
    found = []
    with torch.inference_mode():
        with on_driver.space.computing(on_driver.stream):
            way, up = FlashInferAttention(spec), on_driver.space.upload
            for rowed, q, keys, values, zero in problems:
                tables, lens = up(torch.from_numpy(rowed.tables)), up(torch.from_numpy(rowed.lens))
                way.plan(rowed)
                found.append(way.decode(tables, lens, zero)(up(q), up(keys), up(values)))
        on_driver.device.synchronize(on_driver.stream)
    for (rowed, q, keys, values, zero), mine in zip(problems, found, strict=True):
        sure = TorchAttention(spec).decode(
            torch.from_numpy(rowed.tables), torch.from_numpy(rowed.lens), zero
        )
        assert near(mine, sure(q, keys, values), spec.dtype)
    way.close()


def test_every_call_binds_to_the_oldest_flashinfer_too(host, kernels, monkeypatch):
    module, called = kernels[1], {}
    for kind, name in OLDEST:
        real = getattr(getattr(module, kind), name)

        def spy(self, *args, _real=real, _at=(kind, name), **more):
            called[_at] = (args, more)
            return _real(self, *args, **more)

        monkeypatch.setattr(getattr(module, kind), name, spy)
    assert why_not(FlashInferAttention, host.spec(), graphs=False) is None
    assert called.keys() == OLDEST.keys() == NEWEST.keys()
    for at, (args, more) in called.items():
        OLDEST[at].bind(*args, **more)
