"""Ways to attend: what they give, and that the probe takes the right ones and no others."""

from __future__ import annotations

import inspect
import logging
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from rota.errors import DeviceError
from rota.gpu.host import HostDevice
from rota.gpu.model import torch_attention_flashinfer
from rota.gpu.model.batch import RowInput
from rota.gpu.model.torch_attention import AttentionSpec, TorchAttention
from rota.gpu.model.torch_attention_choice import CANDIDATES, Candidate, choose_attention
from rota.gpu.model.torch_attention_flashinfer import FlashInferAttention, Pages
from rota.gpu.model.torch_attention_probe import why_not
from rota.gpu.model.torch_attention_varlen import varlen_as_it_is
from rota.gpu.model.torch_ops import attend_cells, cells_of
from rota.gpu.model.torch_rows import HostRows, MixedRows, StepRows
from rota.gpu.tensors import HostSpace

from .paged_kernels import Flash, flashinfer_module

GEOMETRIES = [
    (4, 2, 16, torch.float32),
    (9, 3, 64, torch.bfloat16),
    (2, 2, 8, torch.bfloat16),
    (16, 2, 32, torch.float32),
]
EDGES = (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 79, 80, 81, 127, 128, 129, 130)


@pytest.fixture
def kernels(monkeypatch):
    """Both kernels where the real ones would be: torch's `Flash`, and the module."""
    monkeypatch.setattr(torch_attention_flashinfer, "WORKSPACE_BYTES", 4096)
    module, flash = flashinfer_module(), Flash()
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", flash, "CPU")
    yield flash, module
    library._destroy()


class Place:
    """Where ways are tried: a device, a space on it and a stream."""

    def __init__(self, device, space):
        self.device, self.space = device, space
        self.stream = device.create_stream(label="attention")

    def spec(self, heads=4, kv_heads=2, head_dim=16, dtype=torch.float32, rows=12, blocks=16):
        return AttentionSpec(
            self.device, self.space, self.stream, heads, kv_heads, head_dim, dtype, rows, blocks
        )

    def close(self):
        self.device.synchronize(self.stream)
        self.device.destroy_stream(self.stream)
        assert self.device.live_labels() == ()
        self.device.close()


@pytest.fixture
def host():
    device = HostDevice(checked=True, allow_foreign=True)
    made = Place(device, HostSpace(device))
    yield made
    made.close()


@pytest.fixture
def on_driver(cuda_machine):
    """The test driver, which captures; leaves nothing behind."""
    if cuda_machine.fake is None:
        pytest.skip("runs torch on the test driver; on a GPU the engine itself tries the ways")
    from rota.gpu.fakecuda.torch_queue import QueueSpace

    driver = cuda_machine.fake.reset()
    device = cuda_machine.open(checked=True)
    space = QueueSpace(device, driver)
    made = Place(device, space)
    yield made
    made.close()
    space.close()
    assert driver.live() == {}, driver.story


@pytest.fixture(params=["torch-varlen", "flashinfer"])
def make(request, kernels):
    """A paged way."""
    return {"torch-varlen": varlen_as_it_is, "flashinfer": FlashInferAttention}[request.param]


# What they give


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


def kept(kind, name, *parameters, **defaults):
    """A recorded signature, as a function of these parameters."""
    listed = [inspect.Parameter(p, inspect.Parameter.POSITIONAL_OR_KEYWORD) for p in parameters]
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    listed += [
        inspect.Parameter(p, kinds[name == "run"], default=default)
        for p, default in defaults.items()
    ]
    return (kind, name), inspect.Signature(listed)


PLANNED = ("num_qo_heads", "num_kv_heads")
KINDS = {"q_data_type": "float16", "kv_data_type": None}
BUFFERS = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
FLASHINFER_0_6_0 = dict(
    [
        kept(
            "BatchDecodeWithPagedKVCacheWrapper",
            "__init__",
            "float_workspace_buffer",
            kv_layout="NHD",
            use_cuda_graph=False,
            use_tensor_cores=False,
            **dict.fromkeys(BUFFERS),
            backend="auto",
            jit_args=None,
        ),
        kept(
            "BatchDecodeWithPagedKVCacheWrapper",
            "plan",
            *("indptr", "indices", "last_page_len", *PLANNED, "head_dim", "page_size"),
            pos_encoding_mode="NONE",
            window_left=-1,
            logits_soft_cap=None,
            **KINDS,
            o_data_type=None,
            data_type=None,
            sm_scale=None,
        ),
        kept("BatchDecodeWithPagedKVCacheWrapper", "run", "q", "paged_kv_cache", out=None),
        kept(
            "BatchPrefillWithPagedKVCacheWrapper",
            "__init__",
            "float_workspace_buffer",
            kv_layout="NHD",
            use_cuda_graph=False,
        ),
        kept(
            "BatchPrefillWithPagedKVCacheWrapper",
            "plan",
            *("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"),
            *(*PLANNED, "head_dim_qk", "page_size"),
            head_dim_vo=None,
            custom_mask=None,
            packed_custom_mask=None,
            causal=False,
            pos_encoding_mode="NONE",
            use_fp16_qk_reduction=False,
            sm_scale=None,
            window_left=-1,
            logits_soft_cap=None,
            rope_scale=None,
            rope_theta=None,
            **KINDS,
        ),
        kept("BatchPrefillWithPagedKVCacheWrapper", "run", "q", "paged_kv_cache", out=None),
    ]
)
"""Recorded from ``flashinfer/decode.py`` and ``prefill.py`` of 0.6.0, up to what is used; the
stand-in's own signatures are those of 0.7.4."""


def test_every_call_binds_to_the_oldest_flashinfer_too(host, kernels, monkeypatch):
    module, called = kernels[1], {}
    for kind in ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"):
        for name in ("__init__", "plan", "run"):
            real = getattr(getattr(module, kind), name)

            def spy(self, *args, _real=real, _at=(kind, name), **more):
                called[_at] = (args, more)
                return _real(self, *args, **more)

            monkeypatch.setattr(getattr(module, kind), name, spy)
    assert why_not(FlashInferAttention, host.spec(), graphs=False) is None
    assert called.keys() == FLASHINFER_0_6_0.keys()
    for at, (args, more) in called.items():
        FLASHINFER_0_6_0[at].bind(*args, **more)


# What the probe takes and what it does not


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("way", ["torch", "torch-varlen", "flashinfer"])
def test_right_ways_are_taken(host, kernels, way, geometry):
    makes = {
        "torch": TorchAttention,
        "torch-varlen": varlen_as_it_is,
        "flashinfer": FlashInferAttention,
    }
    assert why_not(makes[way], host.spec(*geometry), graphs=False) is None


@pytest.mark.parametrize("way", [varlen_as_it_is, FlashInferAttention, TorchAttention])
def test_right_ways_are_taken_in_graphs(on_driver, kernels, way):
    before = on_driver.space.recorded
    assert why_not(way, on_driver.spec(), graphs=True) is None
    assert on_driver.space.recorded > before


class Wrong(TorchAttention):
    """Torch's operations with something changed. ``made`` was asked for, ``closed`` is counted."""

    closed = 0

    def __init__(self, spec):
        super().__init__(spec)
        self.spec = spec

    def close(self):
        type(self).closed += 1


class WrongDecode(Wrong):
    """Only decode steps are wrong."""

    def mixed(self, rows, zero):
        return TorchAttention(self.spec).mixed(rows, zero)


class Transposed(Wrong):
    """Reads pages as [kv_heads, 16]."""

    def decode(self, tables, lens, zero):
        attend = super().decode(tables, lens, zero)

        def turned(cache):
            pages = cache.view(-1, cache.shape[1], 16, cache.shape[2])
            return pages.transpose(1, 2).reshape(cache.shape)

        return lambda q, keys, values: attend(q, turned(keys), turned(values))


class OneShort(Wrong):
    def decode(self, tables, lens, zero):
        return super().decode(tables, (lens - 1).clamp(min=1), zero)


class OneLong(Wrong):
    """Sees a cell that the row may not: here NaN."""

    def decode(self, tables, lens, zero):
        return super().decode(tables, (lens + 1).clamp(max=256), zero)


class Touches(Wrong):
    """Gives unseen cells the weight 0, and multiplies them."""

    def decode(self, tables, lens, zero):
        cells = cells_of(tables)
        mask = (torch.arange(cells.shape[1], device=cells.device) < lens[:, None])[:, None, None]
        scale = self.spec.scale
        return lambda q, keys, values: attend_cells(q, keys, values, cells, mask, scale)


class InOrder(Wrong):
    """Takes blocks to lie in order."""

    def decode(self, tables, lens, zero):
        first = tables[:, :1] + torch.arange(tables.shape[1], device=tables.device)
        return super().decode(first % (tables.max() + 1), lens, zero)


class Interleaved(Wrong):
    """Gives query head h the key head h % kv_heads."""

    def decode(self, tables, lens, zero):
        attend, spec = super().decode(tables, lens, zero), self.spec
        heads = torch.arange(spec.heads).view(-1, spec.kv_heads).t().flatten()

        def other(q, keys, values):
            out = attend(q[:, heads], keys, values).view(q.shape)
            return out[:, heads.argsort()].flatten(1)

        return other


class NoScale(Wrong):
    def __init__(self, spec):
        super().__init__(spec)
        self._scale = 1.0


class Nan(Wrong):
    def decode(self, tables, lens, zero):
        attend = super().decode(tables, lens, zero)
        return lambda q, keys, values: attend(q, keys, values) * torch.nan


class Unshaped(WrongDecode):
    def decode(self, tables, lens, zero):
        attend = super().decode(tables, lens, zero)
        return lambda q, keys, values: attend(q, keys, values)[None]


class NoPrefix(Wrong):
    """A chunk sees nothing before itself."""

    def mixed(self, rows, zero):
        kinds = rows.kinds
        sure = super().mixed(rows, zero)

        def attend(q, keys, values):
            out = sure(q, keys, values)
            for chunk in kinds.chunks:
                blocks = rows.tables[chunk.row : chunk.row + 1]
                count = chunk.end - chunk.begin
                cells = cells_of(blocks)[0, chunk.start : chunk.start + count]
                k, v = (cache[cells].transpose(0, 1)[None] for cache in (keys, values))
                mine = torch.nn.functional.scaled_dot_product_attention(
                    q[chunk.begin : chunk.end].transpose(0, 1)[None],
                    k,
                    v,
                    is_causal=True,
                    enable_gqa=True,
                )
                out[chunk.begin : chunk.end] = mine[0].transpose(0, 1).flatten(1)
            return out

        return attend


class Foresees(Wrong):
    """A chunk's tokens see each other, later ones too."""

    def mixed(self, rows, zero):
        sure, spans = super().mixed(rows, zero), rows.kinds

        def attend(q, keys, values):
            out = sure(q, keys, values)
            for chunk in spans.chunks:
                count = chunk.end - chunk.begin
                tables = rows.tables[chunk.row : chunk.row + 1].expand(count, -1)
                lens = rows.lens[chunk.row].expand(count)
                mine = self.decode(tables, lens, zero)(q[chunk.begin : chunk.end], keys, values)
                out[chunk.begin : chunk.end] = mine
            return out

        return attend


class Raises(Wrong):
    def decode(self, tables, lens, zero):
        raise RuntimeError("page size 16 is not supported\nby this kernel")


WRONG = {
    Transposed: "decode: a row of ",
    OneShort: "decode: a row of ",
    OneLong: "decode: a row of 1 keys is not finite",
    Touches: "decode: a row of 1 keys is not finite",
    InOrder: "decode: a row of ",
    Interleaved: "decode: a row of ",
    NoScale: "decode: a row of ",
    Nan: "decode: a row of 1 keys is not finite",
    Unshaped: "decode: shape (1, 12, 64) where (12, 64) is expected",
    NoPrefix: "mixed: a row of ",
    Foresees: "mixed: a row of ",
    Raises: "RuntimeError: page size 16 is not supported by this kernel",
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_ways_are_passed_over_by_name(host, wrong, dtype):
    before = wrong.closed
    fault = why_not(wrong, host.spec(dtype=dtype), graphs=False)
    assert fault is not None and fault.made
    assert fault.reason.startswith(WRONG[wrong]), fault.reason
    assert wrong.closed == before + 1


class Uncapturable(WrongDecode):
    """Reads a length on the host."""

    def decode(self, tables, lens, zero):
        return super().decode(tables, lens.clamp(max=int(lens.max())), zero)


class Bakes(WrongDecode):
    """What it planned ends up in the graph."""

    def plan(self, host):
        self.lens = torch.from_numpy(host.lens.copy())

    def decode(self, tables, lens, zero):
        return super().decode(tables, self.lens, zero)


class BakesTables(WrongDecode):
    def plan(self, host):
        self.tables = torch.from_numpy(host.tables.copy())

    def decode(self, tables, lens, zero):
        return super().decode(self.tables, lens, zero)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (Uncapturable, "DeviceError: [capture-violation]"),
        (Bakes, "decode, replayed with other lengths: a row of "),
        (BakesTables, "decode, replayed with other lengths: a row of "),
    ],
)
def test_ways_that_fail_only_in_graphs_are_passed_over(on_driver, wrong, reason):
    fault = why_not(wrong, on_driver.spec(), graphs=True)
    assert fault is not None and fault.reason.startswith(reason), fault
    assert why_not(wrong, on_driver.spec(), graphs=False) is None


# The choice


def test_auto_takes_the_first_that_agrees_and_says_why_not_the_others(host, kernels, caplog):
    caplog.set_level(logging.INFO, "rota.gpu.model.torch_attention")
    undone = []
    candidates = (
        Candidate("torch-varlen", "wrong", OneShort, lambda: undone.append("wrong")),
        *CANDIDATES[1:],
    )
    choice = choose_attention("auto", host.spec(), graphs=False, candidates=candidates)
    assert choice.name == "flashinfer" and choice.make is FlashInferAttention
    assert undone == ["wrong"]
    assert [reason.partition(":")[0] for reason in choice.passed_over] == [
        "torch-varlen (wrong)",
        "torch-varlen (FA3)",
        "torch-varlen (FA4)",
    ]
    said = [(r.levelname, r.getMessage()) for r in caplog.records]
    assert [level for level, _ in said] == ["WARNING", "INFO", "INFO", "INFO"]
    assert re.search(
        r"torch-varlen \(wrong\) is not used: decode: a row of \d+ keys is [\d.]+ off", said[0][1]
    )
    assert "flashinfer agrees" in said[3][1]


def test_torchs_own_kernel_comes_first(host, kernels):
    flash, module = kernels
    choice = choose_attention("auto", host.spec(), graphs=False)
    assert (choice.name, choice.passed_over) == ("torch-varlen", ())
    assert flash.calls == 2 and module.BatchDecodeWithPagedKVCacheWrapper.made == 0


def test_without_kernels_torch_serves(host, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    choice = choose_attention("auto", host.spec(), graphs=False)
    assert choice.name == "torch" and choice.make is TorchAttention
    assert [reason.partition(":")[0] for reason in choice.passed_over] == [
        str(candidate) for candidate in CANDIDATES
    ]
    assert "no flash attention on CPU" in choice.passed_over[0]
    assert "flashinfer" in choice.passed_over[3]


def test_torch_by_name_tries_nothing(host, kernels):
    choice = choose_attention("torch", host.spec(), graphs=False)
    assert (choice.name, choice.passed_over) == ("torch", ())
    assert kernels[0].calls == 0


def test_a_way_by_name_is_used_or_refused(host, kernels, monkeypatch):
    assert choose_attention("flashinfer", host.spec(), graphs=False).passed_over == ()
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(DeviceError) as caught:
        choose_attention("flashinfer", host.spec(), graphs=False)
    assert (caught.value.code, caught.value.subject) == ("attention-unavailable", "flashinfer")
    assert "ModuleNotFoundError" in str(caught.value.found)


def test_a_device_that_a_way_breaks_ends_the_load(host, caplog):
    class Breaks(Wrong):
        def decode(self, tables, lens, zero):
            raise DeviceError("an illegal address", code="device-dead")

    tried = (Candidate("flashinfer", "", Breaks), Candidate("torch-varlen", "", TorchAttention))
    with pytest.raises(DeviceError) as caught:
        choose_attention("auto", host.spec(), graphs=False, candidates=tried)
    assert caught.value.code == "device-dead"
    assert "the device was lost while flashinfer was tried" in caplog.text


def test_a_longer_spec_is_tried_with_the_same_small_problem(host, kernels):
    """The probe's size does not follow from the model's limits."""
    spec = replace(host.spec(), rows=128, blocks=8192)
    assert why_not(FlashInferAttention, spec, graphs=False) is None
