"""Small models, adapters made byte by byte, and the folders of real ones."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rota.errors import RotaError
from rota.gpu.lora.config import parse_config
from rota.gpu.lora.dims import LoraModule, ModelDims
from rota.gpu.lora.layout import Elem, SlotLayout
from rota.gpu.lora.source import BytesSource
from rota.gpu.lora.stage import StagedAdapter, stage

ROOT = Path(__file__).resolve().parents[2]
Entry = tuple[str, tuple[int, ...], bytes]


class Kit:
    """Builders. A tensor is (dtype, shape, bytes); files are written without the library."""

    root = ROOT
    dims = ModelDims(
        num_layers=2, hidden=8, q_out=12, kv_out=4, attn_in=10, intermediate=6, vocab=16
    )

    def layout(self, max_rank: int = 8, elem: Elem = Elem.BF16, **more: Any) -> SlotLayout:
        return SlotLayout(more.pop("dims", self.dims), max_rank, elem, **more)

    def config(self, **fields: Any) -> bytes:
        """A plain config, r 2 on q_proj; a value of ``...`` removes the field."""
        made: dict[str, Any] = {
            "peft_type": "LORA",
            "r": 2,
            "lora_alpha": 4,
            "use_rslora": False,
            "target_modules": ["q_proj"],
        }
        made.update(fields)
        return json.dumps({k: v for k, v in made.items() if v is not ...}).encode()

    def tensor(self, shape: tuple[int, ...], dtype: str = "F32", seed: int = 0) -> Entry:
        """Values that BF16 holds exactly, none of them zero."""
        rng = np.random.default_rng([seed, *shape])
        values = rng.integers(1, 120, shape).astype(np.float32) / 64
        values *= rng.choice([-1.0, 1.0], shape).astype(np.float32)
        return self.entry(values, dtype)

    def entry(self, values: np.ndarray, dtype: str = "F32") -> Entry:
        wide = np.ascontiguousarray(values, np.float32)
        if dtype == "F32":
            raw = wide.tobytes()
        elif dtype == "F16":
            raw = wide.astype(np.float16).tobytes()
        else:  # exact only for values BF16 holds
            raw = (wide.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        return dtype, tuple(wide.shape), raw

    def key(self, layer: int, leaf: str, half: str, prefix: str = "base_model.model.model.") -> str:
        parent = "self_attn" if leaf[0] in "qkvo" else "mlp"
        return f"{prefix}layers.{layer}.{parent}.{leaf}.lora_{half}.weight"

    def pair(
        self, layer: int = 0, leaf: str = "q_proj", rank: int = 2, dtype: str = "F32"
    ) -> dict[str, Entry]:
        n_out, k_in = self.dims.shape(LoraModule[leaf.upper()])
        return {
            self.key(layer, leaf, "A"): self.tensor((rank, k_in), dtype, 10 * layer),
            self.key(layer, leaf, "B"): self.tensor((n_out, rank), dtype, 10 * layer + 1),
        }

    def file(self, tensors: Mapping[str, Entry], metadata: Any = None) -> bytes:
        header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
        blobs, place = [], 0
        for key, (dtype, shape, raw) in tensors.items():
            header[key] = {
                "dtype": dtype,
                "shape": list(shape),
                "data_offsets": [place, place + len(raw)],
            }
            blobs.append(raw)
            place += len(raw)
        return self.raw_file(json.dumps(header).encode(), b"".join(blobs))

    def raw_file(self, header: bytes, data: bytes = b"") -> bytes:
        return struct.pack("<Q", len(header)) + header + data

    def stage(
        self,
        tensors: Mapping[str, Entry] | bytes,
        config: bytes | None = None,
        layout: SlotLayout | None = None,
        **more: Any,
    ) -> StagedAdapter:
        raw = tensors if isinstance(tensors, bytes) else self.file(tensors)
        source = BytesSource(raw, self.config() if config is None else config)
        return stage(source, self.layout() if layout is None else layout, **more)

    def refusal(self, *args: Any, **more: Any) -> RotaError:
        with pytest.raises(RotaError) as caught:
            self.stage(*args, **more)
        return caught.value

    def write(self, folder: Path, tensors: Mapping[str, Entry] | bytes, config: bytes) -> Path:
        raw = tensors if isinstance(tensors, bytes) else self.file(tensors)
        (folder / "adapter_model.safetensors").write_bytes(raw)
        (folder / "adapter_config.json").write_bytes(config)
        return folder

    def model_dims(self, model: Path) -> ModelDims:
        """Dims of a checkpoint directory, read from its config.json."""
        config = json.loads((model / "config.json").read_bytes())
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        head_dim = config.get("head_dim") or hidden // heads
        return ModelDims(
            num_layers=config["num_hidden_layers"],
            hidden=hidden,
            q_out=heads * head_dim,
            kv_out=config["num_key_value_heads"] * head_dim,
            attn_in=heads * head_dim,
            intermediate=config["intermediate_size"],
            vocab=config["vocab_size"],
            tied=config["tie_word_embeddings"],
        )

    def parsed(self, **fields: Any) -> Any:
        return parse_config(self.config(**fields))


@pytest.fixture(scope="session")
def kit() -> Kit:
    return Kit()
