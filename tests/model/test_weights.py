"""Loading weights: dtypes, shards, and a named refusal for every broken checkpoint."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from rota.errors import ModelError
from rota.gpu.model.config import load_config
from rota.gpu.model.weights import load_hybrid_weights, load_weights

INDEX = "model.safetensors.index.json"


@pytest.fixture
def broken(data_dir, tmp_path):
    """``broken(family, edit)``: a copy of a tiny checkpoint whose tensors ``edit`` changed."""

    def make(family="llama", edit=None, *, source=None):
        folder = tmp_path / ("model" if source is None else family)
        shutil.copytree(data_dir / "oracle" / (source or family) / "base", folder)
        if edit is not None:
            tensors = load_file(folder / "model.safetensors")
            edit(tensors)
            save_file(tensors, folder / "model.safetensors")
        return folder

    return make


def load(folder, dtype="auto"):
    config = load_config(folder)
    read = load_hybrid_weights if config.gated else load_weights
    return read(folder, config, dtype, use_numba=False)[0]


def refusal(folder, dtype="auto"):
    with pytest.raises(ModelError) as caught:
        load(folder, dtype)
    return caught.value


def shard(folder, parts=2):
    """Split model.safetensors as transformers does, with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for part in range(parts):
        file = f"model-{part + 1:05}-of-{parts:05}.safetensors"
        mine = {name: tensors[name] for name in names[part::parts]}
        save_file(mine, folder / file)
        weight_map |= dict.fromkeys(mine, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("auto", torch.bfloat16), ("bfloat16", torch.bfloat16), ("float32", torch.float32)],
)
def test_dtypes(broken, dtype, expected):
    weights = load(broken(), dtype)
    assert weights.embed.dtype is expected
    assert weights.layers[0].qkv.dtype is expected and weights.final_norm.dtype is expected


def test_fused_rows_are_those_of_the_file(broken):
    folder = broken("qwen2")
    tensors = load_file(folder / "model.safetensors")
    layer = load(folder, "float32").layers[1]
    x = torch.randn((3, 48), generator=torch.Generator().manual_seed(0))
    at = "model.layers.1.self_attn."
    expected = torch.cat(
        [
            x @ tensors[f"{at}{n}_proj.weight"].float().T + tensors[f"{at}{n}_proj.bias"].float()
            for n in "qkv"
        ],
        dim=1,
    )
    assert torch.allclose(layer.qkv(x), expected, atol=1e-5)
    gate_up = torch.cat(
        [x @ tensors[f"model.layers.1.mlp.{n}_proj.weight"].float().T for n in ("gate", "up")], 1
    )
    assert torch.allclose(layer.gate_up(x), gate_up, atol=1e-5)


def test_bytes_count_a_tied_matrix_once(broken):
    folder = broken("qwen3")
    size = sum(t.nbytes for t in load_file(folder / "model.safetensors").values())
    weights = load(folder)
    assert weights.nbytes == size and weights.head_rows is weights.embed


def test_shards_load_the_same(broken):
    folder = broken()
    whole = load(folder)
    shard(folder)
    parts = load(folder)
    assert torch.equal(parts.embed, whole.embed)
    x = torch.ones((1, 48), dtype=torch.bfloat16)
    assert torch.equal(parts.head(x), whole.head(x))
    assert parts.nbytes == whole.nbytes


def test_weights_do_not_need_the_file_afterwards(broken):
    folder = broken()
    weights = load(folder)
    kept = weights.embed.clone()
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(b"\xff" * 200_000)
    assert torch.equal(weights.embed, kept)


@pytest.mark.parametrize(
    ("edit", "code", "subject"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            "missing-tensor",
            "model.layers.1.mlp.up_proj.weight",
        ),
        (lambda t: t.pop("lm_head.weight"), "missing-tensor", "lm_head.weight"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(47)}),
            "wrong-shape",
            "model.norm.weight",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int32)}),
            "wrong-dtype",
            "model.norm.weight",
        ),
        (
            lambda t: t.update({"model.layers.2.input_layernorm.weight": torch.ones(48)}),
            "unexpected-tensor",
            "model.layers.2.input_layernorm.weight",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(48)}),
            "unexpected-tensor",
            "model.layers.0.self_attn.q_proj.bias",
        ),
    ],
)
def test_a_tensor_at_fault_is_named(broken, edit, code, subject):
    found = refusal(broken(edit=edit))
    assert (found.code, found.subject) == (code, subject)


def test_tensors_that_follow_from_the_config_are_ignored_by_name(broken):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    weights = load(broken(edit=lambda t: t.update({name: torch.ones(4)})))
    assert list(weights.ignored) == [name]


def test_a_tied_head_in_the_file_must_be_the_embedding(broken):
    def copy(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def differ(tensors):
        copy(tensors)
        tensors["lm_head.weight"][5, 5] += 1

    folder = broken("qwen3", copy)
    assert list(load(folder).ignored) == ["lm_head.weight"]
    shutil.rmtree(folder)
    assert refusal(broken("qwen3", differ)).code == "tied-head-differs"


def test_files_that_are_not_weights(broken):
    folder = broken()
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for content in (whole[:-100], whole[:50], b"", b"\xff" * 64):
        path.write_bytes(content)
        found = refusal(folder)
        assert (found.code, found.subject) == ("unreadable-weights", "model.safetensors")
    path.unlink()
    assert refusal(folder).code == "no-weights"


def test_a_truncated_or_missing_shard(broken):
    folder = broken()
    weight_map = shard(folder)
    path = folder / sorted(set(weight_map.values()))[1]
    path.write_bytes(path.read_bytes()[:-10])
    found = refusal(folder)
    assert (found.code, found.subject) == ("unreadable-weights", path.name)
    path.unlink()
    assert refusal(folder).code == "unreadable-weights"


def test_an_index_that_lies(broken):
    folder = broken()
    weight_map = shard(folder)
    files = sorted(set(weight_map.values()))
    for change in (
        {"model.norm.weight": "../model/" + files[0]},
        {"model.norm.weight": "/etc/hostname.safetensors"},
        {"model.norm.weight": "pytorch_model.bin"},
        {"model.norm.weight": 3},
        {"model.norm.weight": next(f for f in files if f != weight_map["model.norm.weight"])},
    ):
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map | change}))
        assert refusal(folder).code == "bad-weight-index"
    for content in ("[]", "{}", '{"weight_map": []}', "{"):
        (folder / INDEX).write_text(content)
        assert refusal(folder).code == "bad-weight-index"


def test_unknown_dtype(broken):
    assert refusal(broken(), "float16").code == "unknown-dtype"


def test_what_lies_beside_the_text_model_is_left_aside_by_name(broken):
    def more(tensors):
        tensors["mtp.fc.weight"] = torch.ones(4)

    folder = broken("qwen35_vl", more)
    names = load_file(folder / "model.safetensors")
    weights = load(folder)
    aside = {name for name in names if ".visual." in name} | {"mtp.fc.weight"}
    assert aside == set(weights.ignored) and len(aside) > 20
    assert set(weights.ignored.values()) == {
        "vision tower: text is served",
        "multi-token prediction is not used",
    }
    assert weights.nbytes == 2 * sum(t.numel() for n, t in names.items() if n not in aside) + sum(
        2 * t.numel() for n, t in names.items() if n.endswith(("A_log", "dt_bias"))
    )


@pytest.mark.parametrize(
    "root", ["language_model.model.", "model.language_model.model.", "model.language_model."]
)
def test_every_spelling_of_the_text_model_loads_the_same(broken, root):
    def respell(tensors):
        for name in list(tensors):
            to = "language_model." if name.startswith("lm_head") else root
            tensors[to + name.removeprefix("model.")] = tensors.pop(name)

    expected = load(broken("qwen35"), "float32")
    found = load(broken("qwen35_respelled", respell, source="qwen35"), "float32")
    assert torch.equal(found.embed, expected.embed)
    assert torch.equal(found.layers[0].mixer.inner.conv, expected.layers[0].mixer.inner.conv)
    assert found.nbytes == expected.nbytes and not found.ignored


def test_two_names_for_one_tensor_are_refused(broken):
    def twice(tensors):
        tensors["model.language_model.norm.weight"] = tensors["model.norm.weight"].clone()

    found = refusal(broken("qwen35", twice))
    assert (found.code, found.subject) == ("two-names", "model.norm.weight")


def fuse(tensors):
    """Experts as released checkpoints have them: 3-D, gate rows before up rows."""
    at = "model.layers.{}.mlp.experts."
    for layer in range(4):
        name = at.format(layer)
        read = [
            {kind: tensors.pop(f"{name}{e}.{kind}_proj.weight") for kind in ("gate", "up", "down")}
            for e in range(8)
        ]
        tensors[name + "gate_up_proj"] = torch.stack(
            [torch.cat([e["gate"], e["up"]]) for e in read]
        )
        tensors[name + "down_proj"] = torch.stack([e["down"] for e in read])


def test_fused_experts_load_the_same(broken):
    apart = load(broken("qwen35_moe"), "float32")
    fused = load(broken("qwen35_moe_fused", fuse, source="qwen35_moe"), "float32")
    x = torch.randn((2, 48), generator=torch.Generator().manual_seed(0))
    one, other = apart.layers[2].mlp, fused.layers[2].mlp
    assert len(one.gate_up) == len(one.down) == 8
    for first, second in zip(one.gate_up, other.gate_up, strict=True):
        assert torch.equal(first(x), second(x))
    for first, second in zip(one.down, other.down, strict=True):
        assert torch.equal(first(x[:, :16].contiguous()), second(x[:, :16].contiguous()))
    assert apart.nbytes == fused.nbytes


@pytest.mark.parametrize(
    ("edit", "code", "subject"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.experts.7.up_proj.weight"),
            "missing-tensor",
            "model.layers.1.mlp.experts.7.up_proj.weight",
        ),
        (
            lambda t: t.update({"model.layers.1.mlp.experts.8.up_proj.weight": torch.ones(1)}),
            "unexpected-tensor",
            "model.layers.1.mlp.experts.8.up_proj.weight",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.experts.down_proj": torch.ones(1)}),
            "unexpected-tensor",
            "model.layers.0.mlp.experts.down_proj",
        ),
        (
            # mlx keeps the convolution transposed, and with it norms of another convention.
            lambda t: t.update(
                {
                    "model.layers.0.linear_attn.conv1d.weight": t[
                        "model.layers.0.linear_attn.conv1d.weight"
                    ]
                    .mT.contiguous()
                    .float()
                }
            ),
            "wrong-shape",
            "model.layers.0.linear_attn.conv1d.weight",
        ),
    ],
)
def test_a_hybrid_tensor_at_fault_is_named(broken, edit, code, subject):
    found = refusal(broken("qwen35_moe", edit))
    assert (found.code, found.subject) == (code, subject)
