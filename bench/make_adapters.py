"""Write seeded random PEFT LoRA adapters for a model directory, for benchmarks.

    python bench/make_adapters.py MODEL_DIR OUT_DIR --count 8 --rank 16

Owns nothing else: no PEFT, no training. Each adapter touches all seven projections of every layer,
in bf16; A has the usual deviation 1/sqrt(in), B a small non-zero one, so that every adapter changes
every logit a little and no engine can skip it. The same seed gives the same files.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
B_STD = 0.01


def module_shapes(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Path below a layer -> (in, out) of each projection of a llama style layer."""
    hidden, inter = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    q, kv = heads * head_dim, config["num_key_value_heads"] * head_dim
    return {
        "self_attn.q_proj": (hidden, q),
        "self_attn.k_proj": (hidden, kv),
        "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (q, hidden),
        "mlp.gate_proj": (hidden, inter),
        "mlp.up_proj": (hidden, inter),
        "mlp.down_proj": (inter, hidden),
    }


def make_adapter(config: dict[str, Any], directory: Path, rank: int, seed: int) -> None:
    """Write one adapter directory: ``adapter_config.json``, ``adapter_model.safetensors``."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(config["num_hidden_layers"]):
        for path, (k_in, n_out) in module_shapes(config).items():
            key = f"base_model.model.model.layers.{layer}.{path}"
            a = torch.randn(rank, k_in, generator=generator) / math.sqrt(k_in)
            b = torch.randn(n_out, rank, generator=generator) * B_STD
            tensors[f"{key}.lora_A.weight"] = a.to(torch.bfloat16)
            tensors[f"{key}.lora_B.weight"] = b.to(torch.bfloat16)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(directory / "adapter_model.safetensors"), metadata={"format": "pt"})
    adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
        "target_modules": list(MODULES),
    }
    text = json.dumps(adapter, indent=2) + "\n"
    (directory / "adapter_config.json").write_text(text, encoding="utf-8")


def make_adapters(
    model_dir: Path, out: Path, count: int = 8, rank: int = 16, seed: int = 0
) -> list[Path]:
    """Write ``count`` adapters ``out/r<rank>-<i>``; returns their directories, in order."""
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    paths = [out / f"r{rank}-{i}" for i in range(count)]
    for i, path in enumerate(paths):
        make_adapter(config, path, rank, seed + i)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for path in make_adapters(
        options.model, options.out, options.count, options.rank, options.seed
    ):
        print(path)


if __name__ == "__main__":
    main()
