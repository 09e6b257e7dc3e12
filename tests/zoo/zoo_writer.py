"""Writes adapters of the zoo with PEFT, and remembers PEFT's answers; used by make_zoo.py."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3NextConfig

HERE = Path(__file__).resolve().parent
BASES = HERE.parent / "data" / "oracle"
PROMPT = [44, 54, 99, 14, 50, 102, 37, 66, 5, 38]
LAST = 3
V4 = "_v4"
"""Ends the name of what is made with transformers 4, on the base of the name before it."""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def base(family: str, dtype: torch.dtype = torch.float32) -> Any:
    folder = BASES / family.removesuffix(V4) / "base"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.eval()


def write_next() -> None:
    """A tiny Qwen3-Next: the inputs of its delta nets are fused, in_proj_qkvz and in_proj_ba."""
    folder = BASES / "qwen3_next" / "base"
    shutil.rmtree(folder, ignore_errors=True)
    config = Qwen3NextConfig(
        vocab_size=128,
        hidden_size=48,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=24,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
        eos_token_id=2,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for key, value in sorted(model.named_parameters()):
            seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:6], "big")
            noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(seed))
            if key.endswith("linear_attn.norm.weight"):
                made = 1 + 0.3 * noise
            elif key.endswith("A_log"):
                made = torch.log(0.05 + noise.abs())
            elif value.dim() == 1:
                made = 0.3 * noise
            elif "conv1d" in key:
                made = 0.6 * noise
            elif "embed_tokens" in key:
                made = noise
            elif key.endswith("mlp.gate.weight"):
                made = 6 * noise / value.shape[-1] ** 0.5
            else:
                made = 1.5 * noise / value.shape[-1] ** 0.5
            value.copy_(made.to(torch.bfloat16))
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


@torch.no_grad()
def randomise(model: Any, name: str) -> None:
    """Values for everything an adapter trains, none at its usual start; BF16 holds them exactly."""
    for key, value in sorted(model.named_parameters()):
        if not value.requires_grad:
            continue
        seed = int.from_bytes(hashlib.sha256(f"{name} {key}".encode()).digest()[:6], "big")
        noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(seed))
        if "lora_A" in key or "lora_embedding_A" in key:
            made = noise / value.shape[-1] ** 0.5
        elif "lora_magnitude" in key:
            made = value * (1 + 0.25 * noise)
        elif "lora_B" in key and value.dim() == 1:
            made = 0.5 * noise
        elif "lora_" in key:
            made = noise / 2
        else:
            made = value + 0.3 * noise  # biases, token rows, whole matrices
        value.copy_(made.to(torch.bfloat16))


def answers(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits[0, -LAST:].float()


class Zoo:
    """Writes adapters and remembers what is to be said of each."""

    def __init__(self, family: str) -> None:
        self.family, self.root = family, HERE / family
        shutil.rmtree(self.root, ignore_errors=True)
        self.tensors: dict[str, torch.Tensor] = {}
        self.entries: dict[str, dict[str, Any]] = {}
        self.refusals: dict[str, str] = {}
        for dtype, tag in ((torch.float32, "f32"), (torch.bfloat16, "bf16")):
            self._remember("base", tag, answers(base(family, dtype)))

    def _remember(self, name: str, tag: str, logits: torch.Tensor) -> None:
        self.tensors[f"{name}.{tag}"] = logits if tag == "f32" else logits.to(torch.bfloat16)

    def settle(self, name: str, **facts: Any) -> Path:
        """Plain bytes: no machine's paths, no hash order, no card for readers."""
        folder = self.root / name
        (folder / "README.md").unlink(missing_ok=True)
        config = json.loads((folder / CONFIG).read_text())
        config["base_model_name_or_path"] = f"tiny-{self.family}"
        for key, value in config.items():
            sets = ("target_modules", "exclude_modules", "target_parameters")
            if key in sets and isinstance(value, list):
                config[key] = sorted(value)
        (folder / CONFIG).write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
        self.entries[name] = facts
        return folder

    def kind(self, name: str, config: Any, *, refused: str | None = None) -> None:
        """An adapter PEFT makes: accepted with PEFT's answers, or refused under a code."""
        torch.manual_seed(0)
        model = get_peft_model(base(self.family), config)
        randomise(model, f"{self.family} {name}")
        model.save_pretrained(self.root / name)
        folder = self.settle(name, **({"refused": refused} if refused else {}))
        if refused is None:
            self.ask(name, folder)

    def not_made(self, name: str, config: Any) -> None:
        """What PEFT itself refuses to make, in its words."""
        try:
            get_peft_model(base(self.family), config)
        except ValueError as error:
            self.refusals[name] = str(error)
        else:
            raise AssertionError(f"PEFT makes {name}")

    def ask(self, name: str, folder: Path) -> None:
        for dtype, tag in ((torch.float32, "f32"), (torch.bfloat16, "bf16")):
            model = PeftModel.from_pretrained(base(self.family, dtype), folder).eval()
            self._remember(name, tag, answers(model))

    def converted(self, name: str, init: str, **fields: Any) -> None:
        """An init that changes the base: refused as trained, accepted as PEFT converts it."""
        torch.manual_seed(0)
        model = get_peft_model(base(self.family), LoraConfig(init_lora_weights=init, **fields))
        begin = self.root / "begin"
        model.peft_config["default"].init_lora_weights = True
        model.save_pretrained(begin)
        model.peft_config["default"].init_lora_weights = init
        with torch.no_grad():
            for key, value in sorted(model.named_parameters()):
                if value.requires_grad:
                    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:6], "big")
                    noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(seed))
                    value.add_(noise, alpha=0.1)
        truth = answers(model)
        model.save_pretrained(self.root / f"{name}_unconverted")
        self.settle(f"{name}_unconverted", refused=init)
        model.save_pretrained(self.root / name, path_initial_model_for_weight_conversion=str(begin))
        shutil.rmtree(begin)
        folder = self.settle(name)
        self.ask(name, folder)
        # What is served on the plain base is what was trained on the changed one.
        torch.testing.assert_close(self.tensors[f"{name}.f32"], truth, atol=2e-3, rtol=0)

    def producer(
        self,
        name: str,
        source: str,
        rename: Callable[[str], str] = lambda key: key,
        *,
        config: dict[str, Any] | None = None,
        dtype: Callable[[str], torch.dtype] = lambda key: torch.float32,
        refused: str | None = None,
    ) -> None:
        """The delta of ``source`` as another trainer writes it."""
        folder = self.root / name
        folder.mkdir(parents=True)
        tensors = load_file(self.root / source / WEIGHTS)
        made = {rename(key): value.to(dtype(key)) for key, value in tensors.items()}
        save_file(made, folder / WEIGHTS, {"format": "pt"})
        self.rewrite(name, source, config or {})
        self.settle(name, **({"refused": refused} if refused else {"same_as": source}))

    def rewrite(self, name: str, source: str, fields: dict[str, Any]) -> None:
        made = json.loads((self.root / source / CONFIG).read_text()) | fields
        made = {key: value for key, value in made.items() if value is not ...}
        (self.root / name / CONFIG).write_text(json.dumps(made))

    def finish(self) -> None:
        save_file(self.tensors, self.root / "answers.safetensors")
        facts: dict[str, Any] = {"prompt": PROMPT, "adapters": self.entries}
        if self.refusals:
            facts["peft_refuses"] = self.refusals
        text = json.dumps(facts, indent=1, sort_keys=True)
        (self.root / "zoo.json").write_text(text + "\n")
