"""A tiny checkpoint with a tokenizer, for whole programs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from rota.sched.text.detokenizer import byte_alphabet

ORACLE = Path(__file__).resolve().parents[1] / "data" / "oracle" / "llama"
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The oracle's llama (128 token ids), with ASCII characters as tokens."""
    folder = tmp_path_factory.mktemp("model")
    for file in (ORACLE / "base").iterdir():
        shutil.copy(file, folder)
    vocab = {char: byte for char, byte in byte_alphabet().items() if byte < 128}
    raw = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return str(folder)
