"""Recipes: an adapter of a known kind is staged as if nothing were known, only sooner."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rota.errors import RejectError, RotaError, StagingError
from rota.gpu.lora import directory, intake, recipe
from rota.gpu.lora import stage as staging
from rota.gpu.lora.layout import Elem
from rota.gpu.lora.recipe import Recipes
from rota.gpu.lora.safefile import FileLimits
from rota.gpu.lora.source import BytesSource, DirectorySource
from rota.gpu.lora.stage import StagedAdapter, StageLimits, stage

LEAVES = ("q_proj", "k_proj", "gate_proj", "up_proj", "down_proj")


def tensors_of(kit: Any, dtype: str = "BF16", rank: int = 2) -> dict[str, Any]:
    """Pairs of two layers, in the order of their names, as files have them."""
    made: dict[str, Any] = {}
    for layer in range(2):
        for leaf in LEAVES:
            made |= kit.pair(layer, leaf, rank, dtype)
    return dict(sorted(made.items()))


def again(tensors: dict[str, Any], seed: int = 1) -> dict[str, Any]:
    """Other values in the same places, all finite in BF16 too."""
    rng = np.random.default_rng(seed)
    made = {}
    for key, (dtype, shape, raw) in tensors.items():
        kind = np.uint32 if dtype == "F32" else np.uint16
        values = rng.permutation(np.frombuffer(raw, kind))
        made[key] = (dtype, shape, values.tobytes())
    return made


def same(one: StagedAdapter, other: StagedAdapter) -> None:
    """Equal to the last bit, times apart."""
    a, b = one.image, other.image
    assert a.buffer.tobytes() == b.buffer.tobytes() and one.digest == other.digest == a.digest
    assert a.scales.tobytes() == b.scales.tobytes() and not b.scales.flags.writeable
    for name in ("present", "ranks", "digest", "fingerprint", "embed_rows", "head_rows", "affine"):
        assert getattr(a, name) == getattr(b, name), name
    assert a.lent is b.lent
    assert one.report.seconds.keys() == other.report.seconds.keys()
    plain = [dataclasses.replace(s.report, seconds={}) for s in (one, other)]
    assert plain[0] == plain[1]


class Audits:
    """Counts whole audits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, real = 0, staging.audit

        def counted(*args: Any) -> Any:
            self.count += 1
            return real(*args)

        monkeypatch.setattr(staging, "audit", counted)


@pytest.fixture
def audits(monkeypatch: pytest.MonkeyPatch) -> Audits:
    return Audits(monkeypatch)


@pytest.fixture
def config(kit: Any) -> bytes:
    made: bytes = kit.config(target_modules=list(LEAVES), extra_thing=1)
    return made


@pytest.mark.parametrize("piece", [3, 64, 1 << 19])
@pytest.mark.parametrize("elem", Elem)
@pytest.mark.parametrize(("max_rank", "rank"), [(2, 2), (8, 8), (20, 3)])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_a_known_kind_gives_the_same(
    kit: Any,
    audits: Audits,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    dtype: str,
    max_rank: int,
    rank: int,
    elem: Elem,
    piece: int,
) -> None:
    if piece < 1 << 19:
        monkeypatch.setattr(intake, "PIECE", piece)
        for module in (intake, recipe):
            monkeypatch.setattr(module, "MOVE_BYTES", 96)
    config = kit.config(target_modules=list(LEAVES), r=rank)
    layout = kit.layout(max_rank, elem, affine=True, overlay_rows=2)
    recipes, first = Recipes(), tensors_of(kit, dtype, rank)
    kit.stage(first, config, layout, recipes=recipes)
    assert len(recipes) == 1 and audits.count == 1
    for seed in range(3):
        other = again(first, seed)
        known = kit.stage(other, config, layout, recipes=recipes)
        folder = kit.write(tmp_path, other, config)
        on_disk = stage(DirectorySource(folder), layout, recipes=recipes)
        assert audits.count == 1 + seed
        afresh = kit.stage(other, config, layout)
        same(known, afresh)
        same(on_disk, afresh)


def outcome(kit: Any, raw: bytes, config: bytes, recipes: Recipes | None) -> Any:
    """What staging comes to: an adapter, or the whole refusal."""
    try:
        return stage(BytesSource(raw, config), kit.layout(), recipes=recipes)
    except RejectError as error:
        return error.code, error.subject, error.expected, error.found


def test_any_other_byte_of_config_or_header_is_another_kind(
    kit: Any, config: bytes, audits: Audits
) -> None:
    recipes, raw = Recipes(), kit.file(kit.pair(dtype="BF16"), {"format": "pt"})
    config = kit.config()
    outcome(kit, raw, config, recipes)
    header = 8 + int.from_bytes(raw[:8], "little")
    changed = [(raw, config + b" "), (raw + b"\0\0", config), (raw[:-2], config)]
    for at in range(header):
        changed.append((raw[:at] + bytes((raw[at] ^ 1,)) + raw[at + 1 :], config))
    for at in range(len(config)):
        changed.append((raw, config[:at] + bytes((config[at] ^ 1,)) + config[at + 1 :]))
    refused = 0
    for file, beside in changed:
        before = audits.count
        found = outcome(kit, file, beside, recipes)
        fresh = audits.count - before
        expected = outcome(kit, file, beside, None)
        if isinstance(expected, StagedAdapter):
            assert fresh == 1
            same(found, expected)
        else:
            refused += 1
            assert found == expected
    assert refused > 100
    before = audits.count
    assert isinstance(outcome(kit, raw, config, recipes), StagedAdapter)
    assert audits.count == before


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_values_are_refused_as_ever(kit: Any, config: bytes, audits: Audits, dtype: str) -> None:
    recipes, good = Recipes(), tensors_of(kit, dtype)
    kit.stage(good, config, recipes=recipes)
    kind: Any = np.float32 if dtype == "F32" else np.float16 if dtype == "F16" else np.uint16
    bits = {"BF16": (0x7F80, 0xFF80, 0x7FC1), "F16": (0x7C00, 0xFE00)}.get(
        dtype, (0x7F800000, 0xFFC00000, 0x7F7FFFFF)
    )
    for key in list(good)[:3] + list(good)[-1:]:
        for bad in bits:
            _, shape, raw = good[key]
            words = np.frombuffer(raw, f"u{kind().itemsize}").copy()
            words[-1] = bad
            raw_file = kit.file(good | {key: (dtype, shape, words.tobytes())})
            found = outcome(kit, raw_file, config, recipes)
            assert found == outcome(kit, raw_file, config, None)
            assert found[:2] == ("non-finite", key)
    zero = {
        key: (dtype, shape, b"\0\x80" * (len(raw) // 2) if dtype != "F32" else b"\0" * len(raw))
        for key, (_, shape, raw) in good.items()
    }
    for half in "AB":
        nothing = {key: zero[key] if f"lora_{half}" in key else good[key] for key in good}
        found = outcome(kit, kit.file(nothing), config, recipes)
        assert found == outcome(kit, kit.file(nothing), config, None)
        assert found[0] == "no-effect"
    last = list(good)[-2:]
    little = zero | {key: good[key] for key in last}
    before = audits.count
    known = kit.stage(little, config, recipes=recipes)
    assert len(recipes) == 1 and audits.count == before
    same(known, kit.stage(little, config))


def test_refused_adapters_teach_nothing(kit: Any, config: bytes) -> None:
    recipes, good = Recipes(), tensors_of(kit)
    key = next(iter(good))
    infinite = b"\x80\x7f" * (len(good[key][2]) // 2)
    bad = kit.file(good | {key: ("BF16", good[key][1], infinite)})
    assert outcome(kit, bad, config, recipes)[0] == "non-finite"
    assert len(recipes) == 0 and recipes.nbytes == 0


def test_a_value_that_vanishes_in_bf16_still_counts(kit: Any) -> None:
    """Float32 has smaller values than BF16; the audit looks at the file's."""
    recipes = Recipes()
    kit.stage(kit.pair(), recipes=recipes)
    tiny = {
        key: ("F32", shape, np.full(shape, 1, np.uint32).tobytes())
        for key, (_, shape, _) in kit.pair().items()
    }
    same(kit.stage(tiny, recipes=recipes), kit.stage(tiny))


def test_other_terms_are_audited(kit: Any, config: bytes, audits: Audits) -> None:
    recipes, tensors, base = Recipes(), tensors_of(kit), object()
    kit.stage(tensors, config, recipes=recipes, base_rows=base)
    for number, more in enumerate(
        (
            {"base_rows": object()},
            {"base_rows": base, "limits": StageLimits(FileLimits(tensors=99))},
            {"base_rows": base, "layout": kit.layout(7)},
        )
    ):
        kit.stage(tensors, config, recipes=recipes, **more)
        assert audits.count == 2 + number
    buffer = bytearray(kit.layout().slot_bytes)
    lent = kit.stage(tensors, config, recipes=recipes, buffer=buffer)
    assert lent.image.lent and bytes(buffer) == lent.image.buffer.tobytes()


def test_only_plain_adapters_of_one_file_get_a_recipe(kit: Any, tmp_path: Path) -> None:
    recipes = Recipes()
    tokens = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    kit.stage(
        kit.pair(dtype="BF16") | {tokens: kit.tensor((1, 8), "BF16")},
        kit.config(trainable_token_indices=[3]),
        kit.layout(overlay_rows=1),
        recipes=recipes,
    )
    mixed = kit.pair(dtype="BF16") | kit.pair(1, dtype="F32")
    kit.stage(mixed, recipes=recipes)
    names = {}
    for number, (key, value) in enumerate(kit.pair().items()):
        names[key] = f"part-{number}.safetensors"
        (tmp_path / names[key]).write_bytes(kit.file({key: value}))
    (tmp_path / "adapter_config.json").write_bytes(kit.config())
    index = str({"weight_map": names}).replace("'", '"')
    (tmp_path / "adapter_model.safetensors.index.json").write_text(index)
    stage(DirectorySource(tmp_path), kit.layout(), recipes=recipes)
    assert len(recipes) == 0


def test_recipes_are_bounded_and_the_least_used_goes(kit: Any, audits: Audits) -> None:
    recipes = Recipes(entries=2)
    kinds = [kit.config(lora_alpha=alpha) for alpha in (1, 2, 3)]
    for number in (0, 1, 0, 2):  # 1 is the least recently used
        kit.stage(kit.pair(), kinds[number], recipes=recipes)
    assert len(recipes) == 2 and audits.count == 3
    kit.stage(kit.pair(), kinds[0], recipes=recipes)
    assert audits.count == 3
    kit.stage(kit.pair(), kinds[1], recipes=recipes)
    assert audits.count == 4 and len(recipes) == 2
    one = recipes.nbytes // 2
    assert one > len(kinds[0]) + len(kit.file({}))
    few = Recipes(nbytes=one + one // 2)
    for config in kinds:
        kit.stage(kit.pair(), config, recipes=few)
        assert len(few) == 1 and 0 < few.nbytes <= one + one // 2
    none = Recipes(nbytes=10)
    kit.stage(kit.pair(), recipes=none)
    assert len(none) == 0 and none.nbytes == 0


@pytest.mark.parametrize("how", ["written", "cut"])
def test_a_file_that_changes_while_it_is_taken_is_refused(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(intake, "PIECE", 64)
    recipes, tensors = Recipes(), tensors_of(kit)
    config = kit.config(target_modules=list(LEAVES))
    kit.stage(tensors, config, recipes=recipes)
    file = kit.write(tmp_path, tensors, config) / "adapter_model.safetensors"
    monkeypatch.setattr(directory, "HEAD_BYTES", file.stat().st_size - 200)
    real = intake.Intake.filled

    def filled(self: intake.Intake, count: int) -> None:
        real(self, count)
        if self.missing < 150 and how == "cut":
            os.truncate(file, file.stat().st_size - 150)
        elif self.missing < 150:
            os.utime(file, ns=(5, 5))

    monkeypatch.setattr(intake.Intake, "filled", filled)
    with pytest.raises(StagingError) as caught:
        stage(DirectorySource(tmp_path), kit.layout(), recipes=recipes)
    assert caught.value.code == "adapter-changing"


def test_a_cancelled_stage_of_a_known_kind_ends(kit: Any) -> None:
    recipes = Recipes()
    kit.stage(kit.pair(), recipes=recipes)
    with pytest.raises(RotaError) as caught:
        kit.stage(kit.pair(), recipes=recipes, cancelled=lambda: True)
    assert caught.value.code == "stage-cancelled"


@pytest.mark.parametrize("size", [0, -1], ids=["while it is read", "by another thread"])
def test_a_new_kind_is_hashed(
    kit: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: int
) -> None:
    """Files up to a size by the thread that reads them, larger ones beside audit and packing."""
    config, tensors = kit.config(target_modules=list(LEAVES)), tensors_of(kit)
    folder = kit.write(tmp_path, tensors, config)
    whole = (folder / "adapter_model.safetensors").stat().st_size
    others, real = [], staging.ThreadPoolExecutor

    def beside(*args: Any, **more: Any) -> Any:
        others.append(args)
        return real(*args, **more)

    monkeypatch.setattr(intake, "HASHED_BYTES", whole + size)
    monkeypatch.setattr(directory, "PIECE_BYTES", 100)
    monkeypatch.setattr(directory, "HEAD_BYTES", 50)
    monkeypatch.setattr(staging, "ThreadPoolExecutor", beside)
    clock = iter(range(10_000)).__next__
    made = stage(DirectorySource(folder), kit.layout(), recipes=Recipes(), clock=clock)
    assert len(others) == -size
    assert made.digest == hashlib.sha256(config + kit.file(tensors)).hexdigest()
    assert (made.report.seconds["digest"] > 1) is (size == 0)
    same(made, kit.stage(tensors, config))
