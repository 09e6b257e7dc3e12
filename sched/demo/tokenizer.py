"""GGUF tokenizer metadata -> ``tokenizer.json`` and ``tokenizer_config.json``.

Owns the translation of one GGUF tokenizer kind (``gpt2`` model, ``smollm`` pre-tokenizer) into the
format of the ``tokenizers`` library. Invariant: token ids equal positions in
``tokenizer.ggml.tokens``; a kind it does not know is refused, never approximated.

Sources: the GGUF specification (ggml repository, docs/gguf.md) for the keys and token types;
llama.cpp's ``smollm`` pre-tokenizer, which splits every numeric character off before the GPT-2
split, for the order of the two pre-tokenizers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from ...errors import ModelError

# Token types of the GGUF specification.
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4


def _want(meta: Mapping[str, Any], key: str) -> Any:
    try:
        return meta[key]
    except KeyError:
        raise ModelError(
            "the GGUF file has no such metadata key",
            code="demo-bad-gguf",
            subject=key,
            expected="present",
            found="absent",
        ) from None


def _same(meta: Mapping[str, Any], key: str, value: str) -> None:
    found = _want(meta, key)
    if found != value:
        raise ModelError(
            "the GGUF file has a tokenizer kind that is not converted here",
            code="demo-bad-gguf",
            subject=key,
            expected=value,
            found=found,
        )


def build_tokenizer(meta: Mapping[str, Any]) -> Tokenizer:
    """Build the ``tokenizers`` object that GGUF metadata describes.

    Args:
        meta: GGUF key to value; needs ``tokenizer.ggml.{model,pre,tokens,token_type,merges}``.

    Raises:
        ModelError: ``demo-bad-gguf`` when a key is absent or of another kind.
    """
    _same(meta, "tokenizer.ggml.model", "gpt2")
    _same(meta, "tokenizer.ggml.pre", "smollm")
    tokens: list[str] = _want(meta, "tokenizer.ggml.tokens")
    types: list[int] = _want(meta, "tokenizer.ggml.token_type")
    merges: list[str] = _want(meta, "tokenizer.ggml.merges")
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens) or len(types) != len(tokens):
        raise ModelError(
            "the GGUF vocabulary is inconsistent",
            code="demo-bad-gguf",
            subject="tokenizer.ggml.tokens",
            expected=f"{len(tokens)} distinct tokens, as many types",
            found=f"{len(vocab)} distinct, {len(types)} types",
        )
    pairs: list[tuple[str, str]] = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        pairs.append((left, right))
    # No unknown token: the few bytes that never occur in UTF-8 text have no entry, and are dropped.
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special, plain = [], []
    for token, kind in zip(tokens, types, strict=True):
        if kind == _CONTROL:
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == _USER_DEFINED:
            plain.append(AddedToken(token, special=False, normalized=False))
        elif kind != _NORMAL:
            raise ModelError(
                "the GGUF vocabulary has a token type that is not converted here",
                code="demo-bad-gguf",
                subject=token,
                expected="1, 3 or 4",
                found=kind,
            )
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)
    return tokenizer


def tokenizer_config(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The ``tokenizer_config.json`` content: special tokens, context length, chat template.

    Raises:
        ModelError: ``demo-bad-gguf`` when a key is absent.
    """
    tokens: list[str] = _want(meta, "tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(meta.get("tokenizer.ggml.add_bos_token", False)),
        "add_prefix_space": bool(meta.get("tokenizer.ggml.add_space_prefix", False)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(_want(meta, "llama.context_length")),
        "chat_template": _want(meta, "tokenizer.chat_template"),
    }
    for name, key in (
        ("bos_token", "bos_token_id"),
        ("eos_token", "eos_token_id"),
        ("unk_token", "unknown_token_id"),
        ("pad_token", "padding_token_id"),
    ):
        config[name] = tokens[int(_want(meta, f"tokenizer.ggml.{key}"))]
    return config


def write_tokenizer(meta: Mapping[str, Any], directory: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` into ``directory``.

    Raises:
        ModelError: as :func:`build_tokenizer`. OSError: the directory cannot be written.
    """
    tokenizer_json = build_tokenizer(meta).to_str()
    (directory / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    text = json.dumps(tokenizer_config(meta), indent=2, ensure_ascii=False) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
