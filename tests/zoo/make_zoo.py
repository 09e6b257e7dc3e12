"""Makes the zoo: one tiny adapter per kind and per producer, and what PEFT answers with each.

Run with a Python that has torch, transformers 5.24 and peft 0.21.2 (no environment of rota's own):

    python tests/zoo/make_zoo.py [FAMILY ...]

With transformers 4.57.3 in its place, which the folders that end in _v4 need, it makes those.

Kinds are made by PEFT itself and saved by its ``save_pretrained``. Producers are the same deltas in
the names and layouts other trainers write; the PEFT adapter they come from is their oracle. The
base checkpoints are those of ``tests/data/oracle`` (qwen3_next's is written here). Answers are the
logits of the last positions of one prompt, from a float32 and from a bfloat16 model. Seeds are
fixed: a second run writes the same bytes.
"""

from __future__ import annotations

import json
import re
import sys

import torch
import transformers
from peft import IA3Config, LoHaConfig, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from zoo_writer import CONFIG, V4, WEIGHTS, Zoo, base, randomise, write_next

INDEX = WEIGHTS + ".index.json"
PARENTS = {"embed_tokens": "model.", "lm_head": ""}


def sharded(zoo: Zoo, name: str, source: str) -> None:
    folder = zoo.root / name
    folder.mkdir(parents=True)
    tensors = load_file(zoo.root / source / WEIGHTS)
    keys, weight_map = sorted(tensors), {}
    for number, part in enumerate((keys[::2], keys[1::2]), 1):
        file = f"adapter_model-{number:05}-of-00002.safetensors"
        save_file({key: tensors[key] for key in part}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")
    zoo.rewrite(name, source, {})
    zoo.settle(name, same_as=source)


def mlx(zoo: Zoo, name: str, source: str, scale: float) -> None:
    """As mlx-lm saves: factors transposed, the scale itself in the config."""
    folder = zoo.root / name
    folder.mkdir(parents=True)
    config = json.loads((zoo.root / source / CONFIG).read_text())
    made = {}
    for key, value in load_file(zoo.root / source / WEIGHTS).items():
        key = key.removeprefix("base_model.model.")
        if "base_layer" in key:
            continue
        key = re.sub(r"lora_(embedding_)?A(\.weight)?$", "lora_a", key)
        key = re.sub(r"lora_(embedding_)?B(\.weight)?$", "lora_b", key)
        made[key.replace("lora_magnitude_vector", "m")] = value.T.contiguous()
    save_file(made, folder / "adapters.safetensors", {"format": "mlx"})
    parameters = {"rank": config["r"], "scale": scale, "dropout": 0.0}
    parameters["keys"] = [
        PARENTS.get(t, "self_attn." if t[0] in "qkvo" else "mlp.") + t
        for t in config["target_modules"]
    ]
    kind = "dora" if config["use_dora"] else "lora"
    fields = {"fine_tune_type": kind, "num_layers": 2, "lora_parameters": parameters}
    fields |= {"model": f"tiny-{zoo.family}", "iters": 100, "learning_rate": 1e-5, "seed": 0}
    (folder / CONFIG).write_text(json.dumps(fields, indent=1, sort_keys=True) + "\n")
    zoo.entries[name] = {"same_as": source}


def fused(zoo: Zoo, name: str) -> None:
    """qkv_proj and gate_up_proj, as trained on checkpoints that stack them; split for PEFT."""
    groups = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    leaves = [leaf for parts in groups.values() for leaf in parts]
    model = get_peft_model(base(zoo.family), LoraConfig(r=2, lora_alpha=4, target_modules=leaves))
    randomise(model, f"{zoo.family} {name}")
    state = dict(model.named_parameters())
    stacked: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for leaf, parts in groups.items():
            for key, value in sorted(state.items()):
                if f".{parts[0]}.lora_A" not in key:
                    continue
                rows = []
                for part in parts:
                    a = key.replace(parts[0], part)
                    state[a].copy_(value)
                    rows.append(state[a.replace("lora_A", "lora_B")])
                plain = key.replace(parts[0], leaf).replace(".default", "")
                stacked[plain] = value.detach().clone()
                stacked[plain.replace("lora_A", "lora_B")] = torch.cat(rows).detach()
    model.save_pretrained(zoo.root / f"{name}_split")
    split = zoo.settle(f"{name}_split")
    zoo.ask(f"{name}_split", split)
    folder = zoo.root / name
    folder.mkdir(parents=True)
    save_file(stacked, folder / WEIGHTS, {"format": "pt"})
    zoo.rewrite(name, f"{name}_split", {"target_modules": sorted(groups)})
    zoo.settle(name, same_as=f"{name}_split")


def megatron_experts(zoo: Zoo, name: str, source: str) -> None:
    """Factors of all experts as 3-D tensors under the parameter's own name."""
    folder = zoo.root / name
    folder.mkdir(parents=True)
    config = json.loads((zoo.root / source / CONFIG).read_text())
    experts, rank, made = 4, config["r"], {}
    for key, value in load_file(zoo.root / source / WEIGHTS).items():
        if ".experts." in key:
            parameter = "gate_up_proj" if "base_layer" in key else "down_proj"
            key = key.replace("experts.base_layer", "experts").replace(
                "experts.", f"experts.{parameter}."
            )
            if "lora_A" in key:
                value = value.reshape(experts, rank, -1)
            else:
                value = value.reshape(-1, rank, experts).permute(2, 0, 1).contiguous()
        made[key] = value
    save_file(made, folder / WEIGHTS, {"format": "pt"})
    zoo.rewrite(name, source, {})
    zoo.settle(name, same_as=source)


def split_inputs(zoo: Zoo, name: str) -> None:
    """in_proj_q, k and v with factors of their own, and the one pair they are to PEFT."""
    wide = LoraConfig(r=6, lora_alpha=18, target_modules=["in_proj_qkv"])
    model = get_peft_model(base(zoo.family), wide)
    randomise(model, f"{zoo.family} {name}")
    gdn = model.config
    keys = gdn.linear_num_key_heads * gdn.linear_key_head_dim
    heights = {"q": keys, "k": keys, "v": gdn.linear_num_value_heads * gdn.linear_value_head_dim}
    made: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for key, value in sorted(model.named_parameters()):
            if ".lora_" not in key:
                continue
            row = 0
            for index, (part, height) in enumerate(heights.items()):
                columns = slice(2 * index, 2 * index + 2)
                plain = key.replace("in_proj_qkv", f"in_proj_{part}").replace(".default", "")
                if "lora_A" in key:
                    made[plain] = value[columns].clone()
                else:
                    rows = slice(row, row + height)
                    made[plain] = value[rows, columns].clone()
                    value[rows] = 0
                    value[rows, columns] = made[plain]
                row += height
    model.save_pretrained(zoo.root / f"{name}_whole")
    zoo.ask(f"{name}_whole", zoo.settle(f"{name}_whole"))
    folder = zoo.root / name
    folder.mkdir(parents=True)
    save_file(made, folder / WEIGHTS, {"format": "pt"})
    targets = [f"in_proj_{part}" for part in heights]
    zoo.rewrite(name, f"{name}_whole", {"r": 2, "lora_alpha": 6, "target_modules": targets})
    zoo.settle(name, same_as=f"{name}_whole")


def llama() -> None:
    zoo = Zoo("llama")
    few = {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    zoo.kind("plain", LoraConfig(**few))
    zoo.kind("rslora", LoraConfig(**few | {"use_rslora": True, "r": 3}))
    zoo.kind("gaussian", LoraConfig(**few, init_lora_weights="gaussian"))
    zoo.kind("orthogonal", LoraConfig(**few, init_lora_weights="orthogonal"))
    zoo.kind(
        "patterns",
        LoraConfig(
            **few,
            rank_pattern={r"layers\.1\..*q_proj": 4, "down_proj": 1},
            alpha_pattern={r"model\.layers\.0\.self_attn\.v_proj": 1, ".*mlp.*": 3},
        ),
    )
    zoo.kind("layers", LoraConfig(**few, layers_to_transform=[1], layers_pattern="layers"))
    zoo.kind("exclude", LoraConfig(**few, exclude_modules=["model.layers.0.self_attn.q_proj"]))
    zoo.kind("exclude_regex", LoraConfig(**few, exclude_modules=r".*layers\.1\..*(q|v)_proj"))
    zoo.kind("regex", LoraConfig(**few | {"target_modules": r".*\.(q|v|down)_proj"}))
    zoo.kind("all_linear", LoraConfig(r=2, lora_alpha=2, target_modules="all-linear"))
    zoo.kind(
        "dora",
        LoraConfig(**few | {"target_modules": ["k_proj", "o_proj", "up_proj"]}, use_dora=True),
    )
    zoo.kind(
        "dora_rslora", LoraConfig(**few, use_dora=True, use_rslora=True, rank_pattern={"v_proj": 4})
    )
    zoo.kind("lora_bias", LoraConfig(**few, lora_bias=True))
    zoo.kind("bias_all_without_any", LoraConfig(**few, bias="all"))
    zoo.kind("tokens", LoraConfig(**few, trainable_token_indices=[102, 5, 44]))
    zoo.kind("embed_saved", LoraConfig(**few, modules_to_save=["embed_tokens"]))
    zoo.kind("wide_rank", LoraConfig(r=16, lora_alpha=4, target_modules=["k_proj"]))
    # Low-rank token matrices.
    both = few | {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}
    zoo.kind("embed_head", LoraConfig(**both))
    zoo.kind("embed_head_dora", LoraConfig(**both, use_dora=True))
    zoo.kind(
        "embed_rslora",
        LoraConfig(**few | {"target_modules": ["embed_tokens"], "r": 3}, use_rslora=True),
    )
    zoo.kind(
        "head_lora_bias",
        LoraConfig(**few | {"target_modules": ["o_proj", "lm_head"]}, lora_bias=True),
    )
    embed = few | {"target_modules": ["v_proj", "embed_tokens"]}
    zoo.kind("embed_low_head_saved", LoraConfig(**embed, modules_to_save=["lm_head"]))
    zoo.kind("embed_named_and_saved", LoraConfig(**embed, modules_to_save=["embed_tokens"]))
    zoo.converted("pissa", "pissa", **few)
    zoo.converted("olora", "olora", **few)
    # What cannot be served, as PEFT writes it.
    zoo.kind(
        "norm_saved",
        LoraConfig(**few, modules_to_save=["input_layernorm"]),
        refused="modules_to_save",
    )
    zoo.kind(
        "activated",
        LoraConfig(**few, alora_invocation_tokens=[5, 38]),
        refused="alora_invocation_tokens",
    )
    zoo.kind(
        "parameters",
        LoraConfig(
            r=2,
            lora_alpha=6,
            target_modules=["v_proj"],
            target_parameters=["q_proj.weight", "mlp.up_proj.weight", "lm_head.weight"],
            rank_pattern={"up_proj.weight": 4},
        ),
    )
    zoo.kind(
        "ia3",
        IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        refused="peft_type",
    )
    zoo.kind("loha", LoHaConfig(r=2, target_modules=["q_proj"]), refused="peft_type")
    # Other producers, other names.
    text = "base_model.model.model."
    rest = re.compile(r"^base_model\.model\.(model\.)")
    zoo.producer(
        "unsloth_vision",
        "plain",
        lambda k: k.replace(text, text + "language_model.", 1),
        config={
            "target_modules": r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|ffn)"
            r".*?(?:q_proj|v_proj|down_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\."
            r"(?:self_attn|mlp)\.(?:q_proj|v_proj|down_proj))",
            "task_type": "CAUSAL_LM",
            "auto_mapping": {"base_model_class": "Qwen3ForCausalLM", "unsloth_fixed": True},
        },
    )
    zoo.producer(
        "ms_swift_multimodal",
        "plain",
        lambda k: k.replace(text, "base_model.model.language_model.model.", 1),
        config={"target_modules": r"^(language_model(?=\.).*\.(q_proj|v_proj|down_proj))$"},
    )
    zoo.producer(
        "llama_factory",
        "plain",
        config={"task_type": "CAUSAL_LM", "lora_dropout": 0.1, "revision": "main"},
    )
    zoo.producer(
        "axolotl",
        "patterns",
        config={"peft_version": ..., "lora_bias": ..., "task_type": "CAUSAL_LM", "use_qalora": ...},
    )
    zoo.producer(
        "old_peft",
        "plain",
        config={
            key: ...
            for key in (
                "peft_version",
                "use_dora",
                "lora_bias",
                "use_rslora",
                "exclude_modules",
                "trainable_token_indices",
                "target_parameters",
                "alora_invocation_tokens",
                "rank_pattern",
                "alpha_pattern",
                "eva_config",
                "corda_config",
                "arrow_config",
                "megatron_config",
                "megatron_core",
                "layer_replication",
                "ensure_weight_tying",
            )
        },
    )
    zoo.producer("bare", "plain", lambda k: k.removeprefix("base_model.model."))
    zoo.producer(
        "adapter_name_inside",
        "dora",
        lambda k: re.sub(r"(lora_[AB]|lora_magnitude_vector)", r"\1.default", k),
    )
    zoo.producer(
        "torch_compile",
        "plain",
        lambda k: k.replace("base_model.model.", "base_model.model._orig_mod.", 1),
    )
    zoo.producer(
        "fsdp_wrapped",
        "plain",
        lambda k: re.sub(r"(layers\.\d+\.)", r"\1_checkpoint_wrapped_module.", k),
    )
    zoo.producer("doubled_model", "plain", lambda k: rest.sub(r"base_model.model.\1\1", k))
    zoo.producer(
        "megatron_raw",
        "plain",
        lambda k: k.replace("model.layers", "decoder.layers").replace(
            "self_attn.q_proj", "self_attention.linear_qkv"
        ),
        refused="foreign-layer",
    )
    zoo.producer(
        "loftq",
        "plain",
        config={"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}},
        refused="loftq",
    )
    zoo.producer(
        "corda_unconverted", "plain", config={"init_lora_weights": "corda"}, refused="corda"
    )
    zoo.producer(
        "other_family",
        "plain",
        lambda k: k.replace("self_attn.q_proj", "attn.c_attn"),
        refused="unsupported-module",
    )
    zoo.producer("bf16", "plain", dtype=lambda key: torch.bfloat16)
    mixed = (torch.float16, torch.bfloat16, torch.float32)
    zoo.producer("mixed_dtypes", "dora", dtype=lambda key: mixed[len(key) % 3])
    sharded(zoo, "sharded", "plain")
    mlx(zoo, "mlx", "plain", 3.0)
    mlx(zoo, "mlx_dora", "dora", 3.0)
    mlx(zoo, "mlx_embed_head", "embed_head", 3.0)
    fused(zoo, "fused")
    # Resized vocabulary: added tokens come with more rows than the base has.
    folder = zoo.root / "added_tokens"
    folder.mkdir()
    tensors = load_file(zoo.root / "embed_saved" / WEIGHTS)
    for key in [k for k in tensors if "embed_tokens" in k]:
        tensors[key] = torch.cat([tensors[key], tensors[key][:2]])
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    zoo.rewrite("added_tokens", "embed_saved", {})
    zoo.settle("added_tokens", refused="vocab-exceeds-base")
    zoo.finish()


def qwen2() -> None:
    """Biases on q, k and v; a tied head."""
    zoo = Zoo("qwen2")
    few = {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    zoo.kind("dora", LoraConfig(**few, use_dora=True))
    zoo.kind("dora_bias_all", LoraConfig(**few, use_dora=True, bias="all"))
    zoo.kind("bias_all", LoraConfig(**few, bias="all"))
    zoo.kind("bias_lora_only", LoraConfig(**few, bias="lora_only"))
    zoo.kind("lora_bias", LoraConfig(**few, lora_bias=True))
    zoo.kind("lora_bias_bias_all", LoraConfig(**few, lora_bias=True, bias="all"))
    zoo.kind("tokens", LoraConfig(**few, trainable_token_indices={"embed_tokens": [7, 3, 99]}))
    # The base's head is its embedding; the factors are of one of them, or of both alike.
    both = ["q_proj", "embed_tokens", "lm_head"]
    zoo.kind("tied_embed", LoraConfig(**few | {"target_modules": ["q_proj", "embed_tokens"]}))
    zoo.kind("tied_head", LoraConfig(**few | {"target_modules": ["q_proj", "lm_head"]}))
    zoo.kind("tied_both", LoraConfig(**few | {"target_modules": both}))
    zoo.kind("tied_ensured", LoraConfig(**few | {"target_modules": both}, ensure_weight_tying=True))
    zoo.kind(
        "tied_head_and_tokens",
        LoraConfig(**few | {"target_modules": ["lm_head"]}, trainable_token_indices=[3]),
        refused="overlay-conflict",
    )
    # A trainer that loses the trained biases on saving.
    zoo.producer("bias_dropped", "bias_all", refused="bias")
    path = zoo.root / "bias_dropped" / WEIGHTS
    tensors = {k: v for k, v in load_file(path).items() if not k.endswith(".bias")}
    save_file(tensors, path, {"format": "pt"})
    zoo.finish()


def qwen3_next() -> None:
    """Delta nets with fused inputs."""
    write_next()
    zoo = Zoo("qwen3_next")
    few = {"r": 2, "lora_alpha": 6}
    fused = ["in_proj_qkvz", "in_proj_ba", "out_proj"]
    zoo.kind("fused_inputs", LoraConfig(**few, target_modules=fused))
    zoo.kind("fused_inputs_dora", LoraConfig(**few, target_modules=fused, use_dora=True))
    zoo.kind("all_linear", LoraConfig(**few, target_modules="all-linear"))
    zoo.kind(
        "experts",
        LoraConfig(
            **few,
            target_modules=["in_proj_ba"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        ),
    )
    megatron_experts(zoo, "experts_megatron", "experts")
    # What PEFT has of fused experts: plain factors.
    parameters = few | {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    zoo.not_made("dora of fused experts", LoraConfig(**parameters, use_dora=True))
    zoo.not_made("lora_bias of fused experts", LoraConfig(**parameters, lora_bias=True))
    zoo.finish()


def qwen3_next_v4() -> None:
    """Experts one by one, as transformers has them before version 5: PEFT makes DoRA and biases of
    such linears alone."""
    zoo = Zoo("qwen3_next" + V4)
    each = {"r": 2, "lora_alpha": 6, "target_modules": ["gate_proj", "up_proj", "down_proj"]}
    zoo.kind("experts_dora", LoraConfig(**each, use_dora=True))
    some = each | {"target_modules": r".*experts\.\d\.(gate|down)_proj"}
    zoo.kind("experts_some_dora", LoraConfig(**some, use_dora=True, use_rslora=True))
    zoo.kind("experts_lora_bias", LoraConfig(**some, lora_bias=True))
    zoo.finish()


def qwen35() -> None:
    """Delta nets with their inputs apart."""
    zoo = Zoo("qwen35")
    few = {"r": 2, "lora_alpha": 6}
    inputs = [f"in_proj_{part}" for part in ("qkv", "z", "b", "a")]
    zoo.kind("gdn_dora", LoraConfig(**few, target_modules=[*inputs, "out_proj"], use_dora=True))
    zoo.kind("gdn_lora_bias", LoraConfig(**few, target_modules=inputs, lora_bias=True))
    split_inputs(zoo, "split_inputs")
    zoo.finish()


if __name__ == "__main__":
    torch.set_num_threads(1)
    makers = {"llama": llama, "qwen2": qwen2, "qwen3_next": qwen3_next, "qwen35": qwen35}
    if transformers.__version__.startswith("4."):
        makers = {"qwen3_next" + V4: qwen3_next_v4}
    for family in sys.argv[1:] or makers:
        makers[family]()
