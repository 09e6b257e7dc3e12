"""GGUF file (llama architecture) -> a Hugging Face style checkpoint directory in bf16.

Owns the tensor names, the row order and the config keys of the translation. Invariants: every
tensor of the file lands in exactly one tensor of the checkpoint or the file is refused; values are
dequantised to float32 and rounded once, to nearest even, to bf16.

Sources: the GGUF specification (ggml repository, docs/gguf.md) for names and metadata keys; the
row order of q and k follows from ggml's rope, which pairs rows (2i, 2i+1) of a head where the
checkpoint pairs rows (i, i + head_dim/2).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

from ...errors import ModelError
from .tokenizer import write_tokenizer

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.([a-z_]+)\.weight")


def hf_name(gguf_name: str) -> str:
    """The checkpoint's name of a GGUF llama tensor.

    Raises:
        ModelError: ``demo-bad-gguf`` for a name outside the llama set.
    """
    if gguf_name in _TOP:
        return _TOP[gguf_name]
    match = _LAYER_NAME.fullmatch(gguf_name)
    if match is None or match[2] not in _LAYER:
        raise ModelError(
            "the GGUF file has a tensor that no llama checkpoint has",
            code="demo-bad-gguf",
            subject=gguf_name,
        )
    return f"model.layers.{match[1]}.{_LAYER[match[2]]}.weight"


def unpermute_rows(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of a q or k projection, from ggml's rope order to the checkpoint's, head by head.

    Args:
        weight: ``[heads * head_dim, in]`` float32; row ``2i + j`` of a head holds pair i, part j.
        heads: number of heads of this projection.

    Returns:
        ``[heads * head_dim, in]`` float32; row ``i + j * head_dim / 2`` holds pair i, part j.
    """
    rows, width = weight.shape
    half = rows // heads // 2
    return weight.reshape(heads, half, 2, width).swapaxes(1, 2).reshape(rows, width)


def _shortest(value: float) -> float:
    """The decimal a float32 was written as (1e-05), not its exact value (9.99999974e-06)."""
    return float(str(np.float32(value)))


def model_config(meta: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    """The ``config.json`` content of a llama checkpoint from GGUF metadata.

    Raises:
        ModelError: ``demo-bad-gguf`` when a key is absent or the architecture is another.
    """
    try:
        architecture = meta["general.architecture"]
        if architecture != "llama":
            raise ModelError(
                "the GGUF file is of another architecture",
                code="demo-bad-gguf",
                subject="general.architecture",
                expected="llama",
                found=architecture,
            )
        hidden = int(meta["llama.embedding_length"])
        heads = int(meta["llama.attention.head_count"])
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": int(meta["llama.vocab_size"]),
            "hidden_size": hidden,
            "intermediate_size": int(meta["llama.feed_forward_length"]),
            "num_hidden_layers": int(meta["llama.block_count"]),
            "num_attention_heads": heads,
            "num_key_value_heads": int(meta["llama.attention.head_count_kv"]),
            "head_dim": int(meta.get("llama.rope.dimension_count", hidden // heads)),
            "hidden_act": "silu",
            "max_position_embeddings": int(meta["llama.context_length"]),
            "rms_norm_eps": _shortest(meta["llama.attention.layer_norm_rms_epsilon"]),
            "rope_theta": _shortest(meta["llama.rope.freq_base"]),
            "rope_parameters": {
                "rope_theta": _shortest(meta["llama.rope.freq_base"]),
                "rope_type": "default",
            },
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": tied,
            "bos_token_id": int(meta["tokenizer.ggml.bos_token_id"]),
            "eos_token_id": int(meta["tokenizer.ggml.eos_token_id"]),
            "pad_token_id": int(meta["tokenizer.ggml.padding_token_id"]),
            "dtype": "bfloat16",
        }
    except KeyError as error:
        raise ModelError(
            "the GGUF file has no such metadata key",
            code="demo-bad-gguf",
            subject=str(error.args[0]),
            expected="present",
            found="absent",
        ) from None


def _load_gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ModelError(
            "the `gguf` package is needed to convert the demo model: pip install 'rota[demo]'",
            code="demo-package-missing",
            subject="gguf",
        ) from error
    return gguf


def convert_gguf(
    source: Path, directory: Path, progress: Callable[[int, int, str], None] | None = None
) -> None:
    """Write the checkpoint of a GGUF llama file into an existing directory.

    Args:
        source: the GGUF file.
        directory: where ``config.json``, ``generation_config.json``, ``model.safetensors``,
            ``tokenizer.json`` and ``tokenizer_config.json`` go.
        progress: called with (tensors done, tensors in all, text).

    Raises:
        ModelError: ``demo-bad-gguf``, ``demo-package-missing``. OSError: cannot write.
    """
    gguf = _load_gguf()
    reader = gguf.GGUFReader(str(source))
    meta = {name: field.contents() for name, field in reader.fields.items()}
    total = len(reader.tensors)
    config = model_config(meta, tied=all(t.name != "output.weight" for t in reader.tensors))
    # ggml reorders rows of q and k only; the count of heads is each projection's own.
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors: dict[str, torch.Tensor] = {}
    for done, tensor in enumerate(reader.tensors, start=1):
        name = hf_name(tensor.name)
        values = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        part = tensor.name.split(".")[-2]
        if part in heads:
            values = unpermute_rows(values, heads[part])
        tensors[name] = torch.from_numpy(np.array(values)).to(torch.bfloat16)
        if progress is not None:
            progress(done, total, f"converted {name}")
    expected = 2 + 9 * config["num_hidden_layers"] + (not config["tie_word_embeddings"])
    if len(tensors) != expected or len(tensors) != total:
        raise ModelError(
            "the GGUF file has too few or doubled tensors",
            code="demo-bad-gguf",
            subject=source.name,
            expected=expected,
            found=f"{len(tensors)} names, {total} tensors",
        )
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    write_tokenizer(meta, directory)
