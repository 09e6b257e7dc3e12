"""Slot layout: published sizes, exact tiling, alignment, what the fingerprint sees, and annexes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.errors import InternalError, ModelError
from rota.gpu.lora.annex import arena_bytes
from rota.gpu.lora.dims import LoraModule, ModelDims
from rota.gpu.lora.image import SlotImage
from rota.gpu.lora.layout import Elem, SlotLayout, affine_step
from rota.gpu.lora.stage import laid_out
from rota.gpu.lora.tables import PoolTables

# 12 full-attention layers of a 48-layer hybrid: heads 16/2 of 256, gated q, inter 5120.
FACTORY = ModelDims(12, 2048, 8192, 512, 4096, 5120, 151_936)
# The 6 full-attention layers of a 0.8B hybrid: heads 8/2 of 256, gated q, inter 3584.
SMALL = ModelDims(6, 1024, 4096, 512, 2048, 3584, 248_320)
SMOL = ModelDims(30, 576, 576, 192, 576, 1536, 49_152, tied=True)


def bytes_of(layout: SlotLayout, *without: LoraModule) -> int:
    return sum(
        layout.stride * (p.k_in + p.n_out) * layout.elem.size
        for p in layout.pairs
        if p.module not in without
    )


def test_golden_sizes() -> None:
    factory = SlotLayout(FACTORY, 16)
    assert factory.slot_bytes == bytes_of(factory) == 16_515_072
    assert bytes_of(factory, LoraModule.Q_PROJ) == 12_582_912
    small = SlotLayout(SMALL, 64)
    assert bytes_of(small, LoraModule.Q_PROJ) == 14.625 * 2**20
    assert 8 * bytes_of(small, LoraModule.Q_PROJ) == 117 * 2**20
    assert SMALL.shape(LoraModule.K_PROJ) == (512, 1024)
    assert SMALL.shape(LoraModule.O_PROJ) == (1024, 2048)
    assert SMALL.shape(LoraModule.GATE_PROJ) == (3584, 1024)
    assert SMALL.shape(LoraModule.DOWN_PROJ) == (1024, 3584)
    assert SlotLayout(SMOL, 16).slot_bytes == 9_768_960
    assert SlotLayout(SMOL, 16, Elem.F32).slot_bytes == 2 * 9_768_960


def test_walk_order() -> None:
    layout = SlotLayout(SMOL, 8)
    assert [p.module.leaf for p in layout.pairs[:7]] == [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    ]
    assert [p.layer for p in layout.pairs] == [n // 7 for n in range(210)]
    assert layout.pair_index[29, LoraModule.DOWN_PROJ] == 209


@pytest.mark.parametrize(("rank", "stride"), [(1, 8), (7, 8), (8, 8), (9, 16), (12, 16), (64, 64)])
def test_rank_is_rounded_up_to_eight(rank: int, stride: int) -> None:
    assert SlotLayout(SMOL, rank).stride == stride


widths = st.integers(1, 70)


@settings(max_examples=60, deadline=None)
@given(
    dims=st.builds(
        ModelDims,
        num_layers=st.integers(1, 3),
        hidden=widths,
        q_out=widths,
        kv_out=widths,
        attn_in=widths,
        intermediate=widths,
        vocab=st.integers(20, 90),
    ),
    rank=st.integers(1, 40),
    elem=st.sampled_from(Elem),
    overlay=st.integers(0, 20),
    affine=st.booleans(),
)
def test_regions_tile_the_slot_and_are_aligned(
    dims: ModelDims, rank: int, elem: Elem, overlay: int, affine: bool
) -> None:
    layout = SlotLayout(dims, rank, elem, overlay, affine)
    place = 0
    for pair in layout.pairs:
        assert pair.a_off == place
        assert pair.a_off % 16 == pair.b_off % 16 == 0
        assert layout.stride * elem.size % 16 == 0  # every row of B
        place = pair.b_off + pair.n_out * layout.stride * elem.size
        assert pair.b_off - pair.a_off == layout.stride * pair.k_in * elem.size
    assert place == layout.pairs_bytes
    assert len(layout.affine_offsets) == (len(layout.pairs) if affine else 0)
    for start, pair in zip(layout.affine_offsets, layout.pairs, strict=False):
        assert start == place and start % 16 == 0
        assert 0 <= affine_step(pair.n_out) - 4 * pair.n_out < 16
        place += 2 * affine_step(pair.n_out)
    assert layout.slot_bytes == place and place % 16 == 0


MOE = ModelDims(
    num_layers=2,
    hidden=24,
    q_out=8,
    kv_out=8,
    attn_in=8,
    intermediate=0,
    vocab=40,
    experts=3,
    expert_inner=5,
    shared_inner=6,
    expert_adapters=True,
)


@settings(max_examples=80, deadline=None)
@given(
    data=st.data(),
    rank=st.integers(1, 20),
    elem=st.sampled_from(Elem),
    affine=st.booleans(),
    rows=st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
def test_an_annex_has_what_is_there_side_by_side_and_nothing_else(
    data: st.DataObject, rank: int, elem: Elem, affine: bool, rows: tuple[int, int]
) -> None:
    layout = SlotLayout(MOE, rank, elem, 9, affine, expert_rank=4, embedding_rank=9)
    count = len(layout.pairs)
    flags = st.lists(st.booleans(), min_size=count, max_size=count)
    present = data.draw(flags)
    vectors = data.draw(flags) if affine else []
    annex = layout.annex_for(present, vectors, *rows)
    place = layout.slot_bytes
    parts = [(p, 0) for p in range(count) if present[p]]
    parts += [(p, 1) for p in range(count) if vectors and vectors[p]]
    for pair, kind in parts:
        if not layout.pairs[pair].annex:
            continue
        assert annex is not None and place % 16 == 0
        assert (annex.vectors if kind else annex.pairs)[pair] == place
        sizes = layout.pairs[pair]
        if kind:
            place += 2 * affine_step(sizes.n_out)
        else:
            place += sizes.stride * (sizes.k_in + sizes.n_out) * elem.size
    if any(rows):
        assert annex is not None and annex.overlay is not None
        starts = dataclasses.astuple(annex.overlay)
        for start, n, width in zip(
            starts, (rows[0],) * 2 + (rows[1],) * 2, (4, 0) * 2, strict=True
        ):
            assert start == place and start % 16 == 0
            size = n * (width or MOE.hidden * elem.size)
            place += -(-size // 16) * 16
    if annex is None:
        assert place == layout.slot_bytes
        return
    assert annex.begin == layout.slot_bytes and annex.nbytes % 256 == 0
    assert 0 <= annex.begin + annex.nbytes - place < 256
    assert annex.nbytes <= layout.max_annex_bytes
    absent = [p for p in range(count) if not (present[p] and layout.pairs[p].annex)]
    assert (annex.pairs[absent] == -1).all()


def test_the_largest_annex_has_everything() -> None:
    layout = SlotLayout(MOE, 8, Elem.BF16, 9, True, expert_rank=4, embedding_rank=8)
    everything = [True] * len(layout.pairs)
    annex = layout.annex_for(everything, everything, 9, 9)
    assert annex is not None and annex.nbytes == layout.max_annex_bytes
    with pytest.raises(InternalError) as caught:
        layout.pair_views(np.zeros(layout.slot_bytes, np.uint8), len(everything) - 1)
    assert caught.value.code == "no-pair"


def test_the_arena_of_an_option() -> None:
    assert arena_bytes(None, 512, 8) == 4096 and arena_bytes(None, 0, 8) == 0
    assert arena_bytes(None, 1 << 29, 8) == 1 << 30 and arena_bytes(None, 3 << 30, 8) == 3 << 30
    assert arena_bytes(1000, 512, 8) == 768 and arena_bytes(0, 512, 8) == 0


def test_fingerprint_sees_everything_the_bytes_depend_on() -> None:
    base = SlotLayout(SMOL, 16)
    assert base.fingerprint() == SlotLayout(dataclasses.replace(SMOL), 16).fingerprint()
    assert len(bytes.fromhex(base.fingerprint())) == 32
    others = [
        SlotLayout(SMOL, 15),
        SlotLayout(SMOL, 24),
        SlotLayout(SMOL, 16, Elem.F32),
        SlotLayout(SMOL, 16, overlay_rows=1),
        SlotLayout(SMOL, 16, affine=True),
        SlotLayout(SMOL, 16, embedding_rank=8),
        SlotLayout(SMOL, 16, embedding_rank=7),
        SlotLayout(dataclasses.replace(SMOL, num_layers=29), 16),
        SlotLayout(dataclasses.replace(SMOL, kv_out=576, q_out=192), 16),
    ]
    seen = {base.fingerprint()} | {other.fingerprint() for other in others}
    assert len(seen) == 1 + len(others)


@pytest.mark.parametrize("rank", [0, -1, 4097, True, 8.0])
def test_bad_rank(rank: int) -> None:
    with pytest.raises(ModelError) as caught:
        SlotLayout(SMOL, rank)
    assert caught.value.code == "bad-layout"


def test_bad_overlay_rows() -> None:
    with pytest.raises(ModelError) as caught:
        SlotLayout(SMOL, 8, overlay_rows=SMOL.vocab + 1)
    assert (caught.value.code, caught.value.subject) == ("bad-layout", "overlay_rows")


@pytest.mark.parametrize("name", ["num_layers", "hidden", "vocab"])
def test_bad_dims(name: str) -> None:
    with pytest.raises(ModelError) as caught:
        dataclasses.replace(SMOL, **{name: 0})
    assert (caught.value.code, caught.value.subject) == ("bad-dims", name)


def test_predicate_bounds() -> None:
    assert SMOL.applies_to_layer(29, LoraModule.Q_PROJ)
    assert not SMOL.applies_to_layer(30, LoraModule.Q_PROJ)
    assert not SMOL.applies_to_layer(-1, LoraModule.Q_PROJ)


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    affine=st.booleans(),
    ranks=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    bounds=st.tuples(st.sampled_from([0, 4, 16]), st.sampled_from([0, 9])),
    rows=st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
def test_a_pools_tables_tell_the_annex_in_another_layout(
    data: st.DataObject,
    affine: bool,
    ranks: tuple[int, int],
    bounds: tuple[int, int],
    rows: tuple[int, int],
) -> None:
    old = SlotLayout(
        MOE,
        ranks[0],
        overlay_rows=9,
        affine=affine,
        expert_rank=bounds[0],
        embedding_rank=bounds[1],
    )
    new = dataclasses.replace(old, max_rank=ranks[1])
    count = len(old.pairs)
    flags = st.lists(st.booleans(), min_size=count, max_size=count)
    held = tuple(int(flag) for flag in data.draw(flags))
    vectors = tuple(data.draw(flags)) if affine else ()
    scales = np.ones(count, np.float32)

    def image(layout: SlotLayout) -> SlotImage:
        embed, head = rows
        return laid_out(layout, scales, held, embed_rows=embed, head_rows=head, affine=vectors)

    tables = PoolTables(old, 3)
    made = image(old)
    tables.fill(1, made, 1 << 20, 1 << 24)
    assert tables.annex_bytes(1, old) == made.annex_bytes
    assert tables.annex_bytes(1, new) == image(new).annex_bytes
    assert tables.annex_bytes(0, new) == 0
    tables.clear(1)
    assert tables.annex_bytes(1, new) == 0
