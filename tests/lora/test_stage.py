"""Staging whole adapters: the corpus, values against an independent reading, bytes, sources."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from rota.errors import InternalError, RejectError, StagingError
from rota.gpu.lora.dims import LoraModule, ModelDims
from rota.gpu.lora.image import SlotImage
from rota.gpu.lora.layout import Elem, SlotLayout
from rota.gpu.lora.report import ModuleReport, delta_norms
from rota.gpu.lora.safefile import FileLimits
from rota.gpu.lora.source import BytesSource, DirectorySource
from rota.gpu.lora.stage import StageLimits, stage

SMOL = ModelDims(30, 576, 576, 192, 576, 1536, 49_152, tied=True)
# The attention and feed-forward shapes of the tiny hybrid, as if every layer had both.
HYBRID = ModelDims(5, 48, 256, 64, 128, 80, 128)


class Base:
    """Base matrices of a checkpoint, read with the library."""

    def __init__(self, folder: Path, tied: bool) -> None:
        self.folder, self.tied = folder, tied

    def _read(self, key: str) -> np.ndarray:
        with safe_open(self.folder / "model.safetensors", "pt") as file:
            return file.get_tensor(key).float().numpy()

    def embed(self) -> np.ndarray:
        return self._read("model.embed_tokens.weight")

    def head(self) -> np.ndarray:
        return self.embed() if self.tied else self._read("lm_head.weight")

    def rows(
        self, layer: int, module: LoraModule, start: int, stop: int, expert: int = 0
    ) -> np.ndarray:
        return self._read(f"model.layers.{layer}.{module.path}" + ".weight")[start:stop]

    def bias(self, layer: int, module: LoraModule) -> np.ndarray | None:
        key = f"model.layers.{layer}.{module.path}" + ".bias"
        with safe_open(self.folder / "model.safetensors", "pt") as file:
            return self._read(key) if key in file.keys() else None


def read_independently(folder: Path) -> dict[str, np.ndarray]:
    """Key -> float32 values by the safetensors library and torch."""
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        return {key: file.get_tensor(key).float().numpy() for key in file.keys()}


def as_float(values: np.ndarray) -> np.ndarray:
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values


def round_bf16(values: np.ndarray) -> np.ndarray:
    import torch

    return torch.from_numpy(values.copy()).to(torch.bfloat16).float().numpy()


def check_image(image: SlotImage, layout: SlotLayout, folder: Path, atol: float = 0.0) -> None:
    """Every pair equals the file's values, every other byte of the pairs is zero."""
    config = json.loads((folder / "adapter_config.json").read_bytes())
    tensors = read_independently(folder)
    rest = image.buffer.copy()
    for index, pair in enumerate(layout.pairs):
        ending = f"layers.{pair.layer}.{pair.module.parent}.{pair.module.leaf}.lora_"
        keys = sorted(k for k in tensors if ending in k and k.endswith(".weight"))
        assert image.present[index] == bool(keys)
        a_view, b_view = layout.pair_views(image.buffer, index, image.annex)
        a_rest, b_rest = layout.pair_views(rest, index, image.annex)
        if not keys:
            assert image.scales[index] == 0 and image.ranks[index] == 0
            continue
        a, b = tensors[keys[0]], tensors[keys[1]]
        if layout.elem is Elem.BF16:
            a, b = round_bf16(a), round_bf16(b)
        rank = a.shape[0]
        assert image.ranks[index] == rank
        np.testing.assert_array_equal(as_float(a_view)[:rank], a)
        np.testing.assert_array_equal(as_float(b_view)[:, :rank], b)
        a_rest[:rank] = 0
        b_rest[:, :rank] = 0
        if not (config["rank_pattern"] or config["alpha_pattern"]):
            root = math.sqrt(rank) if config["use_rslora"] else rank
            assert image.scales[index] == np.float32(config["lora_alpha"] / root)
    assert not rest[: layout.pairs_bytes].any()


@pytest.mark.parametrize("elem", Elem)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_dense_corpus(kit: Any, family: str, elem: Elem) -> None:
    root = kit.root / "tests/data/oracle" / family
    dims = kit.model_dims(root / "base")
    layout = SlotLayout(dims, 24, elem, overlay_rows=dims.vocab, affine=True)
    folders = sorted(path.parent for path in root.glob("adapters/*/adapter_config.json"))
    assert len(folders) >= 3
    for folder in folders:
        base = Base(root / "base", dims.tied)
        staged = stage(DirectorySource(folder), layout, base_rows=base)
        assert staged.report.pairs > 0
        check_image(staged.image, layout, folder)


@pytest.mark.parametrize(
    "name", ["layouts/prefix_adapter_name", "layouts/prefix_bare", "layouts/prefix_vl"]
)
def test_other_spellings_give_the_same_bytes(kit: Any, name: str) -> None:
    layout = SlotLayout(HYBRID, 8)
    folder = kit.root / "tests/data" / name
    staged = stage(DirectorySource(folder), layout)
    check_image(staged.image, layout, folder)
    plain = stage(
        DirectorySource(kit.root / "tests/data/oracle/qwen35/adapters/attn_mlp_r8"), layout
    )
    assert staged.image.buffer.tobytes() == plain.image.buffer.tobytes()
    assert staged.image.present == plain.image.present


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("all_linear", "gdn"),
        ("alora", "alora_invocation_tokens"),
        ("bias_all", "gdn"),
        ("dora", "unsupported-target"),
        ("embed_head_lora", "embedding"),
        ("gdn_out_r4", "unsupported-target"),
        ("lora_bias", "affine-no-room"),
        ("mts_norm", "modules_to_save"),
        ("mts_embed_head", "overlay-no-base"),
        ("tokens", "overlay-exceeds-pool"),
        ("regex", "gdn-target"),
    ],
)
def test_hybrid_corpus_refusals(kit: Any, name: str, code: str) -> None:
    folder = kit.root / "tests/data/oracle/qwen35/adapters" / name
    with pytest.raises(RejectError) as caught:
        stage(DirectorySource(folder), SlotLayout(HYBRID, 64))
    assert caught.value.code == code


@pytest.mark.parametrize("name", ["patterns", "exclude", "r64", "attn_mlp_r8"])
def test_hybrid_corpus_accepted(kit: Any, name: str) -> None:
    layout = SlotLayout(HYBRID, 64)
    folder = kit.root / "tests/data/oracle/qwen35/adapters" / name
    check_image(stage(DirectorySource(folder), layout).image, layout, folder)


def test_patterns_give_each_module_its_scale(kit: Any) -> None:
    layout = SlotLayout(HYBRID, 8)
    folder = kit.root / "tests/data/oracle/qwen35/adapters/patterns"
    image = stage(DirectorySource(folder), layout).image
    found = {
        (layer, module.leaf): (image.ranks[p], float(image.scales[p]))
        for (layer, module), p in layout.pair_index.items()
    }
    assert found[0, "down_proj"] == found[1, "down_proj"] == (3, float(np.float32(5 / 3)))
    assert found[2, "down_proj"] == (4, 4.0)
    assert found[3, "q_proj"] == (2, 6.0)
    assert found[3, "k_proj"] == (4, 4.0)


def test_examples(kit: Any) -> None:
    layout = SlotLayout(SMOL, 8)
    folders = sorted(path.parent for path in kit.root.glob("examples/adapters/*/*.json"))
    assert len(folders) == 6
    for folder in folders:
        staged = stage(DirectorySource(folder), layout)
        check_image(staged.image, layout, folder)
        assert staged.report.notes == () and staged.report.ignored == ()


def test_directory_and_bytes_sources_agree(kit: Any) -> None:
    folder = kit.root / "tests/data/oracle/llama/adapters/attn_mlp_r8"
    layout = SlotLayout(kit.model_dims(folder.parents[1] / "base"), 8)
    from_disk = stage(DirectorySource(folder), layout)
    config = (folder / "adapter_config.json").read_bytes()
    raw = (folder / "adapter_model.safetensors").read_bytes()
    for tensors in (raw, bytearray(raw), memoryview(raw)):
        from_bytes = stage(BytesSource(tensors, config), layout)
        assert from_bytes.digest == from_disk.digest == from_disk.image.digest
        assert from_bytes.image.buffer.tobytes() == from_disk.image.buffer.tobytes()
    assert stage(BytesSource(raw, config + b" "), layout).digest != from_disk.digest


def test_shards_give_the_same_image(kit: Any, tmp_path: Path) -> None:
    tensors = kit.pair(0) | kit.pair(1)
    whole = kit.stage(tensors)
    names = {}
    for number, (key, value) in enumerate(tensors.items()):
        names[key] = f"adapter_model-{number}.safetensors"
        (tmp_path / names[key]).write_bytes(kit.file({key: value}))
    (tmp_path / "adapter_config.json").write_bytes(kit.config())
    index = tmp_path / "adapter_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    sharded = stage(DirectorySource(tmp_path), kit.layout())
    assert sharded.image.buffer.tobytes() == whole.image.buffer.tobytes()
    assert sharded.digest != whole.digest


@pytest.mark.parametrize("elem", Elem)
@pytest.mark.parametrize("max_rank", [2, 8, 12])
def test_file_dtype_does_not_change_the_image(kit: Any, elem: Elem, max_rank: int) -> None:
    layout = kit.layout(max_rank, elem)
    images = [
        kit.stage(kit.pair(dtype=dtype), layout=layout).image for dtype in ("F32", "BF16", "F16")
    ]
    mixed = dict(zip(kit.pair(), (*kit.pair(dtype="F16").values(),), strict=True))
    mixed[kit.key(0, "q_proj", "A")] = kit.pair(dtype="BF16")[kit.key(0, "q_proj", "A")]
    images.append(kit.stage(mixed, layout=layout).image)
    assert len({image.buffer.tobytes() for image in images}) == 1
    assert images[0].buffer.any()


def test_unaligned_tensors(kit: Any) -> None:
    """An odd count of two-byte elements puts float32 values on an odd place."""
    plain, a = kit.pair(), kit.key(0, "q_proj", "A")
    head = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    config = kit.config(r=1, trainable_token_indices=[3])
    dims = ModelDims(1, 7, 12, 4, 10, 6, 16)
    layout = SlotLayout(dims, 8, overlay_rows=1)
    for lead in ("BF16", "F16"):
        tensors = {head: kit.tensor((1, 7), lead)}
        tensors |= {key: kit.tensor((1, 7) if key == a else (12, 1)) for key in plain}
        image = kit.stage(tensors, config, layout).image
        a_view, _ = layout.pair_views(image.buffer, 0)
        values = np.frombuffer(tensors[a][2], np.float32)
        np.testing.assert_array_equal(as_float(a_view)[0], values)


def test_rounding_is_to_nearest_even(kit: Any) -> None:
    key = kit.key(0, "q_proj", "A")
    bits = [0x3F800000, 0x3F808000, 0x3F808001, 0x3F818000, 0x3F817FFF, 0x80000001, 0xBF808000, 1]
    values = np.array([bits, bits], np.uint32).view(np.float32)
    image = kit.stage(kit.pair() | {key: kit.entry(values)}).image
    a_view, _ = kit.layout().pair_views(image.buffer, 0)
    expected = [0x3F80, 0x3F80, 0x3F81, 0x3F82, 0x3F81, 0x8000, 0xBF80, 0]
    assert a_view[0].tolist() == a_view[1].tolist() == expected


def test_reused_buffer_keeps_nothing_of_before(kit: Any) -> None:
    layout = kit.layout(12)
    fresh = kit.stage(kit.pair(), layout=layout).image
    for buffer in (
        np.full(layout.slot_bytes, 0xA5, np.uint8),
        bytearray(b"\xa5" * layout.slot_bytes),
    ):
        again = kit.stage(kit.pair(), layout=layout, buffer=buffer).image
        assert again.buffer.tobytes() == fresh.buffer.tobytes() == bytes(buffer)
    for bad in (bytearray(3), np.zeros(layout.slot_bytes, np.int8), bytes(layout.slot_bytes)):
        with pytest.raises(InternalError) as caught:
            kit.stage(kit.pair(), layout=layout, buffer=bad)
        assert caught.value.code == "bad-buffer"


def test_refused_adapter_leaves_the_buffer_alone(kit: Any) -> None:
    buffer = bytearray(b"\xa5" * kit.layout().slot_bytes)
    assert kit.refusal({}, buffer=buffer).code == "empty-adapter"
    assert set(buffer) == {0xA5}


@pytest.mark.parametrize("polls", range(4))
def test_cancelled_between_phases(kit: Any, polls: int) -> None:
    asked = []

    def cancelled() -> bool:
        asked.append(None)
        return len(asked) > polls

    with pytest.raises(StagingError) as caught:
        kit.stage(kit.pair(), cancelled=cancelled)
    assert caught.value.code == "stage-cancelled"
    assert len(asked) == polls + 1


def test_limits_reach_the_reader(kit: Any) -> None:
    limits = StageLimits(FileLimits(file_bytes=10))
    assert kit.refusal(kit.pair(), limits=limits).code == "file-too-large"


def test_an_annex_larger_than_the_arena_is_refused_with_its_bytes(kit: Any) -> None:
    layout = kit.layout(overlay_rows=4)
    key = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    tensors = kit.pair() | {key: kit.tensor((2, 8))}
    config = kit.config(trainable_token_indices=[3, 5])
    source = BytesSource(kit.file(tensors), config)
    staged = stage(source, layout, StageLimits(annex_bytes=256))
    assert staged.image.annex_bytes == staged.report.annex_bytes == 256
    with pytest.raises(RejectError) as caught:
        stage(source, layout, StageLimits(annex_bytes=255))
    assert (caught.value.code, caught.value.found) == ("annex-exceeds-arena", "255 bytes")
    assert caught.value.expected == "an adapter_arena_bytes of at least 256"
    # What has no annex needs no arena.
    plain = BytesSource(kit.file(kit.pair()), kit.config())
    assert stage(plain, layout, StageLimits(annex_bytes=0)).report.annex_bytes == 0


def test_report(kit: Any) -> None:
    ticks = iter(range(100))
    tensors = kit.pair() | kit.pair(1) | kit.pair(1, "up_proj", dtype="BF16")
    config = kit.config(target_modules=["q_proj", "up_proj"], use_rslora=..., extra_thing=1)
    staged = kit.stage(tensors, config, clock=lambda: float(next(ticks)))
    report = staged.report
    assert (report.tensors, report.pairs) == (6, 3)
    assert report.by_module == {"q_proj": 2, "up_proj": 1}
    assert report.dtypes == {"F32": 4, "BF16": 2}
    assert report.ranks == ((2, 3),) and report.scales == ((2.0, 3),)
    assert report.modules == (
        ModuleReport("q_proj", 2, (2,), (2.0,)),
        ModuleReport("up_proj", 1, (2,), (2.0,)),
    )
    assert report.seconds == {"read": 1.0, "digest": 1.0, "audit": 1.0, "pack": 1.0}
    assert report.slot_bytes == kit.layout().slot_bytes
    assert report.file_bytes == len(kit.file(tensors))
    assert [name for name, _ in report.ignored] == ["extra_thing"]
    assert any("use_rslora" in note for note in report.notes)


def test_delta_norms_are_exact(kit: Any) -> None:
    layout = kit.layout(elem=Elem.F32)
    tensors = kit.pair() | kit.pair(1, "down_proj")
    image = kit.stage(tensors, kit.config(target_modules=["q_proj", "down_proj"]), layout).image
    norms = delta_norms(image, layout)
    for layer, module in ((0, LoraModule.Q_PROJ), (1, LoraModule.DOWN_PROJ)):
        a, b = (
            np.frombuffer(tensors[kit.key(layer, module.leaf, half)][2], np.float32).reshape(
                tensors[kit.key(layer, module.leaf, half)][1]
            )
            for half in "AB"
        )
        expected = 2.0 * np.linalg.norm(b.astype(np.float64) @ a.astype(np.float64))
        assert norms[layout.pair_index[layer, module]] == pytest.approx(expected, rel=1e-12)
    assert np.count_nonzero(norms) == 2


def test_a_source_that_stages_itself_is_asked_for_the_image(kit: Any) -> None:
    layout, limits, flag = kit.layout(), StageLimits(), lambda: False
    ready = kit.stage(kit.pair())
    asked: list[Any] = []

    class Ahead:
        def read(self, limits: FileLimits) -> Any:
            raise AssertionError("the image is ready: nothing to read")

        def stage_for(self, *args: Any, **more: Any) -> Any:
            asked.append((args, more))
            return ready

    assert stage(Ahead(), layout, limits, "rows", clock=int, cancelled=flag) is ready
    expected = {"clock": int, "cancelled": flag, "buffer": None, "held": None}
    assert asked == [((layout, limits, "rows"), expected)]
