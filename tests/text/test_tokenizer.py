"""Tokenizer: loading, limits, end-of-sequence ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rota.errors import ModelError, RequestError
from rota.sched.text import TextLimits, Tokenizer

TEXTS = ["", " ", "the quick fox", "naïve 日本語 😀", "  x\n\ty  ", "12345"]


@pytest.mark.parametrize("text", TEXTS)
def test_encode_then_decode_gives_the_text_back(bytes_tokenizer: Tokenizer, text: str) -> None:
    ids = bytes_tokenizer.encode(text)
    assert bytes_tokenizer.decode(ids) == text
    assert all(0 <= i < bytes_tokenizer.vocab_size for i in ids)


def test_special_tokens_are_parsed_and_skipped_on_request(bytes_tokenizer: Tokenizer) -> None:
    end = bytes_tokenizer.token_id("<|end|>")
    ids = bytes_tokenizer.encode("fox<|end|>")
    assert ids[-1] == end and end in bytes_tokenizer.special_ids
    assert bytes_tokenizer.decode(ids) == "fox"
    assert bytes_tokenizer.decode(ids, skip_special_tokens=False) == "fox<|end|>"


def test_ids_without_a_token_give_no_text(bytes_tokenizer: Tokenizer) -> None:
    ids = bytes_tokenizer.encode("fox")
    beyond = bytes_tokenizer.vocab_size + 5
    assert bytes_tokenizer.decode([beyond, *ids, beyond]) == "fox"
    assert bytes_tokenizer.token(beyond) is None


def test_eos_ids_are_generation_config_and_the_named_token(model_dir: Path) -> None:
    tokenizer = Tokenizer.from_dir(model_dir)
    assert tokenizer.eos_ids == {5, 6, tokenizer.token_id("<|end|>")}


def test_eos_ids_fall_back_to_config_and_to_its_text_part(model_dir: Path) -> None:
    (model_dir / "generation_config.json").unlink()
    (model_dir / "tokenizer_config.json").unlink()
    assert Tokenizer.from_dir(model_dir).eos_ids == {7}
    (model_dir / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": [9]}}))
    assert Tokenizer.from_dir(model_dir).eos_ids == {9}
    (model_dir / "config.json").unlink()
    assert Tokenizer.from_dir(model_dir).eos_ids == frozenset()


@pytest.mark.parametrize("bad", ["2", -1, [1, None], True])
def test_eos_ids_that_are_no_ids_are_refused(model_dir: Path, bad: object) -> None:
    (model_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": bad}))
    with pytest.raises(ModelError) as refusal:
        Tokenizer.from_dir(model_dir)
    assert refusal.value.code == "bad-model-file"


def test_padding_and_truncation_of_the_file_are_ignored(model_dir: Path) -> None:
    path = model_dir / "tokenizer.json"
    content = json.loads(path.read_text())
    content["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    path.write_text(json.dumps(content))
    tokenizer = Tokenizer.from_dir(model_dir)
    text = "the quick brown fox"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as refusal:
        Tokenizer.from_dir(tmp_path)
    assert refusal.value.code == "no-tokenizer"


@pytest.mark.parametrize("text", ["", "{}", "[1]", "not json", '{"model": {"type": "BPE"}}'])
def test_a_tokenizer_file_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ModelError) as refusal:
        Tokenizer.from_dir(tmp_path)
    assert refusal.value.code == "bad-tokenizer"


@pytest.mark.parametrize("data", [b"\xff\xfe", b"[]", b"{", b"[" * 100_000])
def test_a_config_file_that_is_no_json_object_is_refused(model_dir: Path, data: bytes) -> None:
    (model_dir / "generation_config.json").write_bytes(data)
    with pytest.raises(ModelError) as refusal:
        Tokenizer.from_dir(model_dir)
    assert refusal.value.code == "bad-model-file"
    assert refusal.value.subject is not None
    assert refusal.value.subject.endswith("generation_config.json")


def test_prompts_over_the_limits_are_refused(model_dir: Path) -> None:
    tokenizer = Tokenizer.from_dir(model_dir, TextLimits(max_chars=20, max_tokens=5))
    assert len(tokenizer.encode("<|end|>" * 2)) == 2
    for text, expected in (("x" * 21, "20 characters"), ("qzqzqzqz", "5 tokens")):
        with pytest.raises(RequestError) as refusal:
            tokenizer.encode(text)
        assert refusal.value.code == "prompt-too-long"
        assert expected in str(refusal.value)


def test_text_that_is_no_unicode_is_refused(bytes_tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError) as refusal:
        bytes_tokenizer.encode("ok \ud83d")
    assert refusal.value.code == "bad-text"
    assert refusal.value.found == "U+D83D at character 3"
