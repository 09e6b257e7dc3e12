"""Write a llama checkpoint and PEFT adapters as GGUF files (f16), for the llama.cpp peer.

Needs gguf and numpy only. Row order of q and k (and of the B factor of an adapter on
them): ggml's rope pairs rows (2i, 2i+1) of a head, the checkpoint rows (i, i + head_dim/2).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def read(path: Path) -> dict[str, np.ndarray]:
    """Tensors as float32; bf16, which numpy lacks, is widened by hand."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    out = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        raw = data[8 + size + begin : 8 + size + end]
        if entry["dtype"] == "BF16":
            values = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            kind = {"F32": np.float32, "F16": np.float16}[entry["dtype"]]
            values = np.frombuffer(raw, kind).astype(np.float32)
        out[name] = values.reshape(entry["shape"])
    return out


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    rows, width = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def ggml_rows(weight: np.ndarray, name: str, config: dict[str, Any]) -> np.ndarray:
    if name == "attn_q":
        return permute(weight, config["num_attention_heads"])
    return permute(weight, config["num_key_value_heads"]) if name == "attn_k" else weight


def write_model(model: Path, path: Path) -> None:
    """Write the whole checkpoint, tokenizer included."""
    config = json.loads((model / "config.json").read_text())
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    vocab = tokenizer["model"]["vocab"]
    special = {token["id"] for token in tokenizer["added_tokens"] if token["special"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(sorted(vocab, key=vocab.__getitem__))
    writer.add_token_types([3 if i in special else 1 for i in range(len(vocab))])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
    top = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
    }
    for name, weight in read(model / "model.safetensors").items():
        if name in top:
            target = top[name]
        else:
            layer, part = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name).groups()
            target = f"blk.{layer}.{NAMES[part]}.weight"
            weight = ggml_rows(weight, NAMES[part], config)
        # Norms stay float32, as llama.cpp wants them.
        writer.add_tensor(target, weight if weight.ndim == 1 else weight.astype(np.float16))
    finish(writer)


def write_adapter(adapter: Path, model: Path, path: Path) -> None:
    """Write one PEFT LoRA adapter (plain scale alpha / r)."""
    config = json.loads((model / "config.json").read_text())
    peft = json.loads((adapter / "adapter_config.json").read_text())
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(peft["lora_alpha"]))
    for name, weight in read(adapter / "adapter_model.safetensors").items():
        found = re.fullmatch(
            r"base_model\.model\.model\.layers\.(\d+)\.(.+)\.lora_([AB])\.weight", name
        )
        layer, part, factor = found.groups()
        if factor == "B":
            weight = ggml_rows(weight, NAMES[part], config)
        target = f"blk.{layer}.{NAMES[part]}.weight.lora_{factor.lower()}"
        writer.add_tensor(target, weight.astype(np.float16))
    finish(writer)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
