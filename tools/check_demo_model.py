"""Compare the converted demo model with transformers' own reading of the same GGUF file.

Run by hand in a venv that has transformers, gguf and torch; no test imports it:

    python tools/check_demo_model.py CHECKPOINT_DIR GGUF_FILE

Checks: every tensor bit for bit in bf16; the config; token ids and round trips of varied texts;
the chat template's output. transformers builds no digit splitter from this GGUF file, where the
model was trained with one, so it is added to the reference before comparing ids; the texts on
which that changes anything are counted and printed. Exit 0 when all agree.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
import torch
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

TEXTS = [
    "",
    " ",
    "What is the capital of France?",
    "  two leading spaces and two trailing  ",
    "tabs\tand\nnew\r\nlines\n\n\n  mixed \t \n",
    "1 12 123 1234567890 3.14159 0x1F 1e-5 2026-11-29",
    "spaces  before   1 and  22 digits\n\n3",
    "x1y22z333 ²³ ½ Ⅷ ٣٤٥ १२३",
    "def f(x: int = 3) -> str:\n    return f'{x!r}' if x >= 10 else \"no\"\n",
    '{"a": [1, 2, {"b": null}], \'c\': "\\u00e9"}',
    "naïve café, Ångström, straße, Ελληνικά, русский, עברית, العربية",
    "日本語のテキスト。中文文本，한국어 텍스트",  # noqa: RUF001  # text in other scripts is the point
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈 and e\u0301 combining",
    "it's we're I'll don't THEY'VE 'quoted'",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><repo_name>x<file_sep>",
    "<|im_start |> almost special <|im_end",
    "!@#$%^&*()_+-=[]{};:'\",.<>/?\\|`~ ... --- ===",
    "\u00a0nbsp\u2003em\u3000wide\u200bzero\ufeffbom",
    "\x00\x01\x7f control",
    "a" * 300,
    " " * 77 + "x",
    "https://example.org/a?b=c&d=1#e, me@example.org",
]


def main() -> int:
    checkpoint, gguf = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    bad = 0

    reference = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32
    )
    want = {k: v.to(torch.bfloat16) for k, v in reference.state_dict().items()}
    want.pop("lm_head.weight")
    have = load_file(checkpoint / "model.safetensors")
    if set(want) != set(have):
        bad += 1
        print("names differ:", sorted(set(want) ^ set(have)))
    unlike = [
        k for k in want if not torch.equal(want[k].view(torch.int16), have[k].view(torch.int16))
    ]
    bad += len(unlike)
    print(f"tensors: {len(want)} compared bit for bit, {len(unlike)} differ {unlike[:5]}")

    ours = AutoConfig.from_pretrained(checkpoint)
    for key in (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads head_dim "
        "num_key_value_heads max_position_embeddings rope_parameters tie_word_embeddings "
        "bos_token_id eos_token_id pad_token_id hidden_act attention_bias mlp_bias"
    ).split():
        if getattr(ours, key) != getattr(reference.config, key):
            bad += 1
            print("config differs:", key, getattr(ours, key), getattr(reference.config, key))
    eps = (torch.tensor(ours.rms_norm_eps), torch.tensor(reference.config.rms_norm_eps))
    if not torch.equal(*eps):
        bad += 1
        print("rms_norm_eps differs", eps)

    tok = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    mine = AutoTokenizer.from_pretrained(checkpoint)
    rng = random.Random(0)
    alphabet = [c for text in TEXTS for c in text]
    texts = TEXTS + ["".join(rng.choices(alphabet, k=rng.randrange(1, 60))) for _ in range(3000)]
    plain = [tok(t, add_special_tokens=False).input_ids for t in texts]
    tok.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    by_digits = 0
    for text, without in zip(texts, plain, strict=True):
        reference_ids = tok(text, add_special_tokens=False).input_ids
        my_ids = mine(text, add_special_tokens=False).input_ids
        by_digits += reference_ids != without
        if my_ids != reference_ids or tok.decode(my_ids) != mine.decode(my_ids):
            bad += 1
            print("tokens differ:", repr(text), my_ids, reference_ids)
    print(f"texts: {len(texts)} compared, {by_digits} of them depend on the digit splitter")

    chats = [
        [{"role": "user", "content": "hi"}],
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi\n{{x}}"}],
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ],
    ]
    for chat in chats:
        for generation in (False, True):
            pair = [
                t.apply_chat_template(chat, tokenize=False, add_generation_prompt=generation)
                for t in (tok, mine)
            ]
            bad += pair[0] != pair[1]
    specials = [(t.bos_token, t.eos_token, t.unk_token, t.pad_token) for t in (tok, mine)]
    bad += specials[0] != specials[1]
    print("special tokens:", *specials)
    print("all agree" if bad == 0 else f"{bad} differences")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
