"""``rota inspect`` over the zoo: exit codes, the exact code, and what a terminal shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from rota.sched.cli import main
from rota.sched.inspect_view import bar, spark

ROOT = Path(__file__).resolve().parents[1]
ZOO, ORACLE = ROOT / "zoo", ROOT / "data" / "oracle"
#: Only the base itself tells that these do not fit.
NEED_BASE = {"vocab-exceeds-base", "bias", "overlay-conflict"}


def animals() -> list[tuple[str, str, str | None]]:
    found = []
    for manifest in sorted(ZOO.glob("*/zoo.json")):
        for name, facts in json.loads(manifest.read_text())["adapters"].items():
            found.append((manifest.parent.name, name, facts.get("refused")))
    return found


def report_of(capsys: Any, *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["inspect", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("family", "name", "refused"), animals())
def test_every_animal_with_and_without_a_model(
    capsys: Any, family: str, name: str, refused: str | None
) -> None:
    folder = ZOO / family / name
    family = family.removesuffix("_v4")  # the same base
    model = ORACLE / ("llama" if family == "hostile" else family) / "base"
    code, report = report_of(capsys, str(folder), "--model", str(model), "--overlay-rows", "128")
    alone, guessed = report_of(capsys, str(folder))
    if refused is None:
        assert code == 0 and report["accepted"] and report["keys"]["refused"] == 0
        # How wide q, k and v are, and all of a hybrid, only the base tells.
        if name == "fused" or family in ("qwen3_next", "qwen35"):
            assert (alone, guessed["code"]) == (2, "needs-model")
            return
        assert alone == 0 and guessed["accepted"]
        assert guessed["digest"] == report["digest"]
        assert guessed["modules"] == report["modules"]
    else:
        assert (code, report["code"]) == (1, f"REJECT[{refused}]")
        assert refused in NEED_BASE or (alone, guessed["code"]) == (1, f"REJECT[{refused}]")


def test_rank_scale_and_norm_of_each_module(capsys: Any) -> None:
    folder = ZOO / "llama" / "patterns"
    _, report = report_of(capsys, str(folder))
    rows = {row["module"]: row for row in report["modules"]}
    assert list(rows) == ["q_proj", "v_proj", "down_proj"]
    assert rows["q_proj"]["ranks"] == [2, 4] and rows["q_proj"]["scales"] == [1.5, 3.0]
    assert rows["v_proj"]["scales"] == [0.5, 3.0] and rows["down_proj"]["ranks"] == [1]
    tensors = load_file(folder / "adapter_model.safetensors")
    stem = "base_model.model.model.layers.{}.mlp.down_proj.lora_{}.weight"
    deltas = [3 * tensors[stem.format(n, "B")] @ tensors[stem.format(n, "A")] for n in (0, 1)]
    assert rows["down_proj"]["norm"] == pytest.approx(np.linalg.norm(deltas), rel=1e-2)
    whole = sum(row["norm"] ** 2 for row in rows.values())
    layers = report["delta_norm_per_layer"].values()
    assert sum(norm**2 for norm in layers) == pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize(
    ("folder", "needs"),
    [
        ("llama/plain", {"max_lora_rank": 2}),
        ("llama/patterns", {"max_lora_rank": 4}),
        ("llama/tokens", {"max_lora_rank": 2, "overlay_rows": 3}),
        ("llama/embed_head_dora", {"max_lora_rank": 2, "max_embedding_rank": 2, "affine": True}),
        (
            "qwen3_next/experts",
            {"max_lora_rank": 2, "expert_adapters": True, "max_expert_rank": 2},
        ),
    ],
)
def test_the_options_an_engine_needs(capsys: Any, folder: str, needs: dict[str, Any]) -> None:
    family = folder.partition("/")[0]
    words = [str(ZOO / folder), "--model", str(ORACLE / family / "base"), "--overlay-rows", "128"]
    assert report_of(capsys, *words)[1]["needs"] == needs
    main(["inspect", *words])
    assert f"max_lora_rank={needs['max_lora_rank']}" in capsys.readouterr().out


def test_a_file_is_read_with_the_config_beside_it(capsys: Any, tmp_path: Path) -> None:
    folder = ZOO / "llama" / "plain"
    code, report = report_of(capsys, str(folder / "adapter_model.safetensors"))
    assert code == 0 and report["keys"]["matched"] == {"q_proj": 4, "v_proj": 4, "down_proj": 4}
    lonely = tmp_path / "some.safetensors"
    lonely.write_bytes((folder / "adapter_model.safetensors").read_bytes())
    code, report = report_of(capsys, str(lonely))
    assert (code, report["code"]) == (1, "REJECT[missing-config]")


def test_hybrid_adapters_ask_for_their_model(capsys: Any) -> None:
    code, report = report_of(capsys, str(ORACLE / "qwen35" / "adapters" / "gdn_all_r4"))
    assert (code, report["code"]) == (2, "needs-model") and "linear_attn" in report["subject"]


def test_slot_bytes_of_the_model_and_of_the_modules_alone(capsys: Any) -> None:
    folder, model = str(ZOO / "llama" / "plain"), str(ORACLE / "llama" / "base")
    _, with_model = report_of(capsys, folder, "--model", model, "--max-lora-rank", "8")
    _, alone = report_of(capsys, folder)
    # q 48x48, v 16x48, down 48x80 in two layers, at a rank of 8, two bytes each.
    assert alone["slot_bytes"] == 2 * 8 * 2 * (48 + 48 + 16 + 48 + 48 + 80)
    assert with_model["slot_bytes"] > alone["slot_bytes"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            (ZOO / "llama" / "plain", "--plot"),
            ["accepted", "any base", "delta norm", "█", "q_proj"],
        ),
        ((ZOO / "llama" / "dora",), ["DoRA", "dora on 6 modules", "shapes are guessed"]),
        ((ZOO / "llama" / "mlx",), ["mlx-lm"]),
        ((ZOO / "llama" / "megatron_raw",), ["refused tensors: 12", "foreign-layer", "and 6 more"]),
        ((ZOO / "hostile" / "nan",), ["REJECT[non-finite]", "found: NaN or infinity"]),
        ((ZOO / "nowhere",), ["unreadable", "adapter-unreadable"]),
    ],
)
def test_what_a_terminal_shows(capsys: Any, words: tuple[Any, ...], expected: list[str]) -> None:
    main(["inspect", *map(str, words)])
    shown = capsys.readouterr().out
    assert [text for text in expected if text not in shown] == []


def test_bars() -> None:
    assert bar(1.0, 4) == "████" and bar(0.5, 4) == "██" and bar(0.0, 4) == ""
    assert bar(1 / 32, 4) == "▏" and bar(9 / 32, 4) == "█▏"
    assert spark([0.0, 1.0]) == " █  0 .. 1" and spark([]) == "  0 .. 1"
