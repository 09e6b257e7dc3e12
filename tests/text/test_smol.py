"""The real demo model's text side against the recorded transformers reference."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from rota.sched.text import ChatTemplate, IncrementalDetokenizer, Tokenizer

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def oracle(data_dir: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((data_dir / "smol" / "oracle.json").read_text())
    return content


@pytest.fixture(scope="module")
def tokenizer(smol_dir: Path) -> Tokenizer:
    return Tokenizer.from_dir(smol_dir)


def test_the_weights_are_the_ones_the_reference_ran_on(
    smol_dir: Path, oracle: dict[str, Any]
) -> None:
    with (smol_dir / "model.safetensors").open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == oracle["model_sha256"]


def test_chat_prompts_have_the_token_ids_of_the_reference(
    smol_dir: Path, tokenizer: Tokenizer, oracle: dict[str, Any]
) -> None:
    template = ChatTemplate.from_dir(smol_dir)
    for prompt in oracle["prompts"]:
        text = template.render([{"role": "user", "content": prompt["user"]}])
        assert tokenizer.encode(text, add_special_tokens=False) == prompt["ids"], prompt["user"]


def test_answers_stream_to_the_text_of_the_reference(
    tokenizer: Tokenizer, oracle: dict[str, Any]
) -> None:
    answers = [a for p in oracle["prompts"] for a in p["float32"].values()]
    assert len(answers) == 88
    for answer in answers:
        stream = IncrementalDetokenizer(tokenizer)
        deltas = [*map(stream.push, answer["ids"]), stream.flush()]
        assert "".join(deltas) == answer["text"]
        assert "\ufffd" not in "".join(deltas[:-1])


def test_special_tokens_and_end_of_sequence(tokenizer: Tokenizer, oracle: dict[str, Any]) -> None:
    assert tokenizer.eos_ids == {oracle["settings"]["eos_token_id"]}
    assert tokenizer.vocab_size == 49152
    assert tokenizer.special_ids == set(range(17))
    assert tokenizer.byte_level


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("a  1", ["a", "ĠĠ", "1"]),
        ("12 34", ["1", "2", "Ġ", "3", "4"]),
        ("½Ⅷ", ["Â½", "â", "ħ", "§"]),
    ],
)
def test_digits_are_split_off_before_words(
    tokenizer: Tokenizer, text: str, tokens: list[str]
) -> None:
    ids = tokenizer.encode(text)
    assert [tokenizer.token(i) for i in ids] == tokens
    assert tokenizer.decode(ids) == text


def test_the_checkpoint_holds_the_models_config(smol_dir: Path) -> None:
    config = json.loads((smol_dir / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_hidden_layers"], config["hidden_size"]) == (30, 576)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (9, 3)
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-05, 1e5)
    assert config["tie_word_embeddings"] is True
    assert "Apache License" in (smol_dir / "LICENSE").read_text()
