"""Small tokenizers made on the spot, and the directory of the real demo model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from rota.sched.demo.model import is_complete
from rota.sched.text import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "def f(x):\n    return x + 1\n",
    "naïve café, straße, Ελληνικά, русский",
    "日本語のテキスト 中文 😀😀 👩‍👧",
    "  spaces   and\ttabs 1234 5678",
] * 4
SPECIALS = ["<|end|>", "<|user|>"]


def byte_level() -> tokenizers.Tokenizer:
    raw = tokenizers.Tokenizer(BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(CORPUS, trainer)
    # Added tokens with characters outside the byte alphabet: plain text in a byte-level stream.
    raw.add_tokens([AddedToken("東京 Tower", normalized=False)])
    return raw


def word_start() -> tokenizers.Tokenizer:
    """Marks word starts and drops the first space when decoding, as sentencepiece models do."""
    raw = tokenizers.Tokenizer(BPE(unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    trainer = BpeTrainer(vocab_size=300, special_tokens=["<unk>", *SPECIALS], show_progress=False)
    raw.train_from_iterator(CORPUS, trainer)
    return raw


def byte_fallback() -> tokenizers.Tokenizer:
    """Word starts as in Llama 2: unknown characters become byte tokens."""
    vocab = {"<unk>": 0, "<|end|>": 1}
    vocab |= {f"<0x{byte:02X}>": byte + 2 for byte in range(256)}
    for token in ["▁", "a", "b", "c", "h", "i", "▁h", "hi", "▁hi"]:
        vocab[token] = len(vocab)
    merges = [("▁", "h"), ("h", "i"), ("▁h", "i")]
    raw = tokenizers.Tokenizer(
        BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    raw.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    return raw


@pytest.fixture(scope="session")
def bytes_tokenizer() -> Tokenizer:
    return Tokenizer(byte_level())


@pytest.fixture(scope="session")
def words_tokenizer() -> Tokenizer:
    return Tokenizer(word_start())


@pytest.fixture(scope="session")
def fallback_tokenizer() -> Tokenizer:
    return Tokenizer(byte_fallback())


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A model directory as far as text goes."""
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    config = {
        "eos_token": {"content": "<|end|>", "special": True},
        "bos_token": "<|user|>",
        "chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.fixture(scope="session")
def smol_dir() -> Path:
    """The converted demo model; a missing one is a failure, not a skip."""
    path = ROOT / ".cache" / "SmolLM2-135M-Instruct"
    if not is_complete(path):
        pytest.fail(f"{path} is absent or incomplete: run `make model` first", pytrace=False)
    return path
