"""Reference greedy answers of the demo model, its adapters and base, from transformers and PEFT.

Run by hand in a venv with transformers and peft; no test imports it:

    python tools/make_smol_oracle.py .cache/SmolLM2-135M-Instruct examples/adapters \
        tests/data/smol/oracle.json

Writes, for 20 chat prompts and each of base, pirate, json, sentiment (and pirate-small on the first
8), the greedy token ids in float32 and in bfloat16 (eager attention, batch of one, KV cache, one
thread), each with the smallest difference between the best and the second best logit along the
path. PEFT keeps LoRA factors in float32 beside a bfloat16 base (its default), so the bfloat16
answers have float32 deltas.

A prompt is taken only when every float32 margin is at least MARGIN: an engine that sums in another
order must still find the same tokens.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
import peft
import tokenizers
import torch
import transformers
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

ADAPTERS = ("pirate", "json", "sentiment")
REPLACE = "pirate-small"
MARGIN = 0.02
PROMPTS = 20
REPLACE_PROMPTS = 8
NEW_TOKENS = 24
CANDIDATES = [
    "What is the capital of France?",
    "The soup was delicious and warm.",
    "The bus was late and crowded.",
    "Who painted the Mona Lisa?",
    "What do cats eat?",
    "How many wheels does a bicycle have?",
    "What is the opposite of cold?",
    "The teacher was patient and helpful.",
    "Tell me about the sun.",
    "Where do polar bears live?",
    "What is 2 + 2?",
    "The film was dull and far too long.",
    "What is a rainbow?",
    "Name three colors.",
    "How do I make tea?",
    "What is the capital of Germany?",
    "My new laptop broke after two days.",
    "What do horses eat?",
    "Which planet is known as the red planet?",
    "I had a lovely walk in the park.",
    "How many hours are in a day?",
    "What is a bridge?",
    "Why is the sky blue?",
    "The staff ignored us all evening.",
    "What is the largest ocean?",
    "Give me advice about money.",
    "What is the capital of Canada?",
    "These headphones sound great.",
    "What is wood made of?",
    "How do birds build nests?",
    "Write a short greeting.",
    "What is the smallest country?",
    "The room smelled of smoke.",
    "What is a dictionary?",
    "Who discovered penicillin?",
    "Say hello in Spanish.",
    "What is glass made from?",
    "How do fish swim?",
]


def greedy(model: Any, ids: list[int], eos: int) -> dict[str, Any]:
    """Greedy continuation of ``ids``: token ids (the end token included) and the margin."""
    cache = DynamicCache()
    feed = torch.tensor([ids])
    out: list[int] = []
    margin = float("inf")
    with torch.inference_mode():
        while len(out) < NEW_TOKENS:
            result = model(input_ids=feed, past_key_values=cache, use_cache=True)
            logits = result.logits[0, -1].float()
            best = torch.topk(logits, 2)
            margin = min(margin, float(best.values[0] - best.values[1]))
            out.append(int(best.indices[0]))
            if out[-1] == eos:
                break
            feed = torch.tensor([[out[-1]]])
    return {"ids": out, "margin": round(margin, 5)}


def load(model_dir: Path, adapters: Path, dtype: torch.dtype) -> Any:
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, attn_implementation="eager")
    model = PeftModel.from_pretrained(base.eval(), adapters / ADAPTERS[0], ADAPTERS[0])
    for name in (*ADAPTERS[1:], REPLACE):
        model.load_adapter(adapters / name, name)
    return model.eval()


def answer(model: Any, target: str, ids: list[int], eos: int) -> dict[str, Any]:
    if target == "base":
        with model.disable_adapter():
            return greedy(model, ids, eos)
    model.set_adapter(target)
    return greedy(model, ids, eos)


def choose(model: Any, tokenizer: Any, eos: int) -> list[dict[str, Any]]:
    """The first prompts whose float32 margins are all wide enough, with their answers."""
    chosen: list[dict[str, Any]] = []
    for user in CANDIDATES:
        chat = [{"role": "user", "content": user}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False).input_ids
        targets = ["base", *ADAPTERS] + [REPLACE] * (len(chosen) < REPLACE_PROMPTS)
        answers: dict[str, Any] = {}
        for target in targets:
            answers[target] = answer(model, target, ids, eos)
            if answers[target]["margin"] < MARGIN:
                print(f"passed over {user!r}: {target} margin {answers[target]['margin']}")
                break
        else:
            for target in targets:
                text = tokenizer.decode(answers[target]["ids"], skip_special_tokens=True)
                answers[target]["text"] = text
            chosen.append({"user": user, "ids": ids, "float32": answers})
            print(len(chosen), user, {t: a["margin"] for t, a in answers.items()}, flush=True)
        if len(chosen) == PROMPTS:
            break
    return chosen


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    model_dir, adapters, out = (Path(argument) for argument in sys.argv[1:4])
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    eos = tokenizer.eos_token_id
    model = load(model_dir, adapters, torch.float32)
    prompts = choose(model, tokenizer, eos)
    if len(prompts) < PROMPTS:
        raise SystemExit(f"only {len(prompts)} prompts have margins of {MARGIN}")
    del model
    model = load(model_dir, adapters, torch.bfloat16)
    same = cases = 0
    for prompt in prompts:
        prompt["bfloat16"] = {}
        for target, reference in prompt["float32"].items():
            case = answer(model, target, prompt["ids"], eos)
            case["same_as_float32"] = case["ids"] == reference["ids"]
            same, cases = same + case["same_as_float32"], cases + 1
            prompt["bfloat16"][target] = case
    names = (*ADAPTERS, REPLACE)
    document = {
        "made_by": "tools/make_smol_oracle.py",
        "versions": {
            "transformers": transformers.__version__,
            "peft": peft.__version__,
            "torch": torch.__version__,
            "tokenizers": tokenizers.__version__,
            "python": platform.python_version(),
        },
        "settings": {
            "attention": "eager",
            "threads": 1,
            "batch": 1,
            "new_tokens": NEW_TOKENS,
            "margin_floor_float32": MARGIN,
            "eos_token_id": eos,
        },
        "model_sha256": digest(model_dir / "model.safetensors"),
        "adapter_sha256": {n: digest(adapters / n / "adapter_model.safetensors") for n in names},
        "prompts": prompts,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    # One prompt a line: small, and a diff shows which prompt changed.
    head = {key: value for key, value in document.items() if key != "prompts"}
    lines = ",\n".join(json.dumps(prompt, ensure_ascii=False) for prompt in prompts)
    text = json.dumps(head, indent=1)[:-2] + ',\n "prompts": [\n' + lines + "\n]}\n"
    json.loads(text)
    out.write_text(text, encoding="utf-8")
    margins = [a["margin"] for p in prompts for a in p["float32"].values()]
    print(f"{len(prompts)} prompts, smallest float32 margin {min(margins)}")
    print(f"bfloat16 path equals float32 path in {same} of {cases} cases; {len(text)} bytes")


if __name__ == "__main__":
    main()
