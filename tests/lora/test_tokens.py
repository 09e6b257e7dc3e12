"""Low-rank embed_tokens and lm_head: where they lie, what they need, and what PEFT saves beside."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from rota.errors import ModelError, RejectError
from rota.gpu.lora.dims import TOKEN_MODULES, LoraModule
from rota.gpu.lora.layout import Elem, SlotLayout
from rota.gpu.lora.overlay import token_rows
from rota.gpu.lora.stage import StagedAdapter

PATH = "base_model.model."
EMBED, HEAD = PATH + "model.embed_tokens.", PATH + "lm_head."
BOTH = {"target_modules": ["embed_tokens", "lm_head"]}


class Base:
    """Base matrices ``[16, 8]`` that BF16 holds exactly, and what the audit asks of them."""

    def __init__(self, kit: Any) -> None:
        self.matrices = [values(kit.tensor((16, 8), seed=seed)) for seed in (7, 8)]

    def embed(self) -> np.ndarray:
        return self.matrices[0]

    def head(self) -> np.ndarray:
        return self.matrices[1]

    def rows(
        self, layer: int, module: LoraModule, start: int, stop: int, expert: int = 0
    ) -> np.ndarray:
        return token_rows(self, module, start, stop)

    def bias(self, layer: int, module: LoraModule) -> None:
        return None


def values(entry: Any) -> np.ndarray:
    return np.frombuffer(entry[2], np.float32).reshape(entry[1])


def staged_from(
    kit: Any, tensors: Any, layout: SlotLayout, base_rows: Any = None, **config: Any
) -> StagedAdapter:
    return kit.stage(tensors, kit.config(**config), layout, base_rows=base_rows)


def embed_pair(kit: Any, rank: int = 2, vocab: int = 16) -> dict[str, Any]:
    return {
        EMBED + "lora_embedding_A": kit.tensor((rank, vocab), seed=1),
        EMBED + "lora_embedding_B": kit.tensor((8, rank), seed=2),
    }


def head_pair(kit: Any, rank: int = 2, vocab: int = 16) -> dict[str, Any]:
    return {
        HEAD + "lora_A.weight": kit.tensor((rank, 8), seed=3),
        HEAD + "lora_B.weight": kit.tensor((vocab, rank), seed=4),
    }


def layout_of(kit: Any, rank: int = 8, **more: Any) -> SlotLayout:
    dims = dataclasses.replace(kit.dims, tied=more.pop("tied", False))
    return SlotLayout(dims, 8, Elem.F32, overlay_rows=4, affine=True, embedding_rank=rank, **more)


def refusal(kit: Any, layout: SlotLayout, tensors: Any, **config: Any) -> RejectError:
    with pytest.raises(RejectError) as caught:
        staged_from(kit, tensors, layout, base_rows=Base(kit), **(BOTH | config))
    return caught.value


def test_factors_lie_behind_the_layers_with_a_stride_of_their_own(kit: Any) -> None:
    layout = SlotLayout(kit.dims, 24, Elem.F32, embedding_rank=5)
    plain = SlotLayout(kit.dims, 24, Elem.F32)
    embed, head = layout.pairs[-2:]
    assert layout.pairs[:-2] == plain.pairs
    assert (embed.module, head.module) == TOKEN_MODULES and embed.layer == kit.dims.num_layers
    assert (embed.n_out, embed.k_in, embed.stride, embed.max_rank) == (8, 16, 8, 5)
    assert (head.n_out, head.k_in) == (16, 8) and embed.annex and head.annex
    assert layout.slot_bytes == plain.slot_bytes and plain.max_annex_bytes == 0
    assert layout.max_annex_bytes == layout.bytes_for(TOKEN_MODULES, 5) == 2 * (8 + 16) * 8 * 4
    assert SlotLayout(kit.dims, 4, embedding_rank=8).rank_of(LoraModule.LM_HEAD) == 4
    with pytest.raises(ModelError) as caught:
        SlotLayout(kit.dims, 8, embedding_rank=-1)
    assert caught.value.code == "bad-layout" and caught.value.subject == "embedding_rank"


def test_both_are_packed_as_any_pair(kit: Any) -> None:
    layout = layout_of(kit)
    tensors = embed_pair(kit) | head_pair(kit)
    staged = staged_from(kit, tensors, layout, **BOTH)
    assert staged.report.by_module == {"embed_tokens": 1, "lm_head": 1}
    for index, (a, b) in ((-2, tuple(tensors)[:2]), (-1, tuple(tensors)[2:])):
        pair = len(layout.pairs) + index
        found_a, found_b = layout.pair_views(staged.image.buffer, pair, staged.image.annex)
        assert np.array_equal(found_a[:2], values(tensors[a]))
        assert np.array_equal(found_b[:, :2], values(tensors[b]))
        assert staged.image.present[pair] and staged.image.scales[pair] == 2.0
    assert (staged.image.embed_rows, staged.image.head_rows) == (0, 0)


def test_without_room_the_bytes_it_needs_are_named(kit: Any) -> None:
    tensors = embed_pair(kit) | head_pair(kit)
    found = refusal(kit, layout_of(kit, 0), tensors)
    assert found.code == "embedding" and found.subject == "embed_tokens"
    need = layout_of(kit, 2).bytes_for(TOKEN_MODULES, 2)
    assert f"at least 2, which takes up to {need} bytes more of the arena" in str(found.expected)
    # A regex names no module: the tensors tell.
    found = refusal(kit, layout_of(kit, 0), tensors, target_modules=".*(embed_tokens|lm_head)")
    assert found.code == "embedding-lora" and found.found == "max_embedding_rank 0"
    wide = embed_pair(kit, 3)
    one = {"target_modules": ["embed_tokens"], "r": 3}
    found = refusal(kit, layout_of(kit, 2), wide, **one)
    assert found.code == "embedding" and "at least 3" in str(found.expected)
    found = refusal(kit, layout_of(kit, 2), wide, **one, rank_pattern={"q_proj": 2})
    assert found.code == "embedding"
    pattern = {"target_modules": ["embed_tokens"], "rank_pattern": {"embed_tokens": 3}}
    assert refusal(kit, layout_of(kit, 2), wide, **pattern).code == "embedding"
    staged_from(kit, wide, layout_of(kit, 3), **one)


def test_the_rank_is_that_of_the_parameter_a_config_names(kit: Any) -> None:
    named = {"target_modules": None, "target_parameters": ["lm_head.weight"]}
    pattern = {"r": 2, "rank_pattern": {"lm_head.weight": 3}}
    wide = head_pair(kit, 3)
    found = refusal(kit, layout_of(kit, 2), wide, **named, **pattern)
    assert found.code == "embedding-lora" and "at least 3" in str(found.expected)
    staged = staged_from(kit, wide, layout_of(kit, 3), **named, **pattern)
    assert staged.image.ranks[-1] == 3
    narrow = {"r": 8, "rank_pattern": {"lm_head.weight": 2}}
    staged = staged_from(kit, head_pair(kit), layout_of(kit, 2), **named, **narrow)
    assert staged.image.ranks[-1] == 2


def test_a_larger_vocabulary_is_named(kit: Any) -> None:
    for tensors in (embed_pair(kit, vocab=18), head_pair(kit, vocab=18)):
        found = refusal(kit, layout_of(kit), tensors, target_modules=["embed_tokens", "lm_head"])
        assert (found.code, found.found) == ("vocab-exceeds-base", "18")
    found = refusal(kit, layout_of(kit), embed_pair(kit, vocab=14))
    assert found.code == "shape-mismatch"


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_the_copies_peft_saves_beside_factors_are_known_for_what_they_are(
    kit: Any, dtype: str
) -> None:
    base = Base(kit)
    copies = {
        EMBED + "base_layer.weight": kit.entry(base.embed(), dtype),
        HEAD + "base_layer.weight": kit.entry(base.head(), dtype),
    }
    tensors = embed_pair(kit) | head_pair(kit) | copies
    staged = staged_from(kit, tensors, layout_of(kit), base_rows=base, **BOTH)
    assert (staged.image.embed_rows, staged.image.head_rows) == (0, 0)
    # Where the copy is not the base's, the trainer's base was another: its rows are served.
    changed = base.embed().copy()
    changed[5] += 1
    tensors |= {EMBED + "base_layer.weight": kit.entry(changed)}
    staged = staged_from(kit, tensors, layout_of(kit), base_rows=base, **BOTH)
    assert (staged.image.embed_rows, staged.image.head_rows) == (1, 0)
    with pytest.raises(RejectError) as caught:
        staged_from(kit, tensors, layout_of(kit), **BOTH)
    assert caught.value.code == "overlay-no-base"
    lonely = copies | kit.pair()
    with pytest.raises(RejectError) as caught:
        staged_from(kit, lonely, layout_of(kit), base_rows=base)
    assert caught.value.code == "untargeted-tensor"


def test_a_copy_in_a_narrower_dtype_is_no_change(kit: Any) -> None:
    base = Base(kit)
    exact = base.embed() + np.float32(2.0**-12)
    base.matrices[0] = exact
    copy = exact.view(np.uint32) + 0x7FFF + ((exact.view(np.uint32) >> 16) & 1)
    raw = (copy >> 16).astype(np.uint16).tobytes()
    tensors = embed_pair(kit) | {EMBED + "base_layer.weight": ("BF16", (16, 8), raw)}
    targets = {"target_modules": ["embed_tokens"]}
    staged = staged_from(kit, tensors, layout_of(kit), base_rows=base, **targets)
    assert staged.image.embed_rows == 0


def test_rows_and_factors_of_one_matrix_conflict(kit: Any) -> None:
    delta = EMBED + "token_adapter.trainable_tokens_delta"
    tensors = embed_pair(kit) | {delta: kit.tensor((1, 8))}
    one = {"target_modules": ["embed_tokens"], "trainable_token_indices": [3]}
    assert refusal(kit, layout_of(kit), tensors, **one).code == "overlay-conflict"
    saved = embed_pair(kit) | {EMBED + "weight": kit.tensor((16, 8))}
    one = {"target_modules": ["embed_tokens"], "modules_to_save": ["embed_tokens"]}
    assert refusal(kit, layout_of(kit), saved, **one).code == "overlay-conflict"
    # With a tied head the trained rows are the head's too.
    tensors = head_pair(kit) | {delta: kit.tensor((1, 8))}
    one = {"target_modules": ["lm_head"], "trainable_token_indices": [3]}
    found = refusal(kit, layout_of(kit, tied=True), tensors, **one)
    assert (found.code, found.subject) == ("overlay-conflict", "lm_head")
    staged_from(kit, tensors, layout_of(kit), **one)


def test_a_target_that_is_saved_whole_has_no_factors(kit: Any) -> None:
    base = Base(kit)
    matrix = base.embed().copy()
    matrix[2] += 1
    tensors = kit.pair() | {EMBED + "weight": kit.entry(matrix)}
    config = {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["embed_tokens"]}
    staged = staged_from(kit, tensors, layout_of(kit, 0), base_rows=base, **config)
    assert staged.image.embed_rows == 1
    assert any("saved whole" in note for note in staged.report.notes)


def test_a_tied_head_follows_only_where_the_file_says_so(kit: Any) -> None:
    tensors = embed_pair(kit)
    tied = layout_of(kit, tied=True)
    one = {"target_modules": ["model.embed_tokens"]}
    staged = staged_from(kit, tensors, tied, **one)
    assert staged.image.present[-2:] == (True, False)
    ensured = {"ensure_weight_tying": True}
    staged = staged_from(kit, tensors | head_pair(kit), tied, **one, **ensured)
    assert staged.image.present[-2:] == (True, True)
    for layout, config in ((tied, one), (layout_of(kit), one | ensured)):
        found = refusal(kit, layout, tensors | head_pair(kit), **config)
        assert (found.code, found.subject) == ("untargeted-tensor", HEAD + "lora_A.weight")


def test_dora_norms_are_over_the_transposed_embedding(kit: Any) -> None:
    base = Base(kit)
    tensors = embed_pair(kit) | head_pair(kit)
    sizes = {EMBED: 8, HEAD: 16}
    tensors |= {at + "lora_magnitude_vector": kit.tensor((n,), seed=n) for at, n in sizes.items()}
    layout = layout_of(kit)
    staged = staged_from(kit, tensors, layout, base_rows=base, use_dora=True, **BOTH)
    a, b, *_ = (values(entry) for entry in tensors.values())
    merged = base.embed().T + 2.0 * (b @ a)
    magnitude = values(tensors[EMBED + "lora_magnitude_vector"])
    mul, add = layout.affine_views(staged.image.buffer, len(layout.pairs) - 2, staged.image.annex)
    assert np.allclose(mul, magnitude / np.linalg.norm(merged, axis=1), rtol=1e-6)
    assert not add.any() and staged.report.vectors == {"dora": 2}
