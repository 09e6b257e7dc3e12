"""Logits and greedy tokens against transformers and PEFT (see tests/data/oracle)."""

from __future__ import annotations

import pytest
import torch

CASES = [
    ("llama", "base"),
    ("llama", "attn_mlp_r8"),
    ("llama", "rslora_r16_bf16"),
    ("llama", "mts_embed_head"),
    ("qwen2", "base"),
    ("qwen2", "attn_mlp_r8"),
    ("qwen2", "bias_all"),
    ("qwen2", "bias_lora_only"),
    ("qwen3", "base"),
    ("qwen3", "attn_mlp_r8"),
    ("qwen3", "dora"),
    ("qwen3", "tokens_tied"),
    ("qwen3", "mts_embed_tied"),
    ("qwen3", "mts_embed_tied_ensure"),
    ("qwen35", "base"),
    ("qwen35", "attn_mlp_r8"),
    ("qwen35", "rslora_r16_bf16"),
    ("qwen35", "gdn_out_r4"),
    ("qwen35", "gdn_all_r4"),
    ("qwen35", "layers_subset"),
    ("qwen35", "tokens"),
    ("qwen35", "mts_embed_head"),
    ("qwen35", "patterns"),
    ("qwen35", "exclude"),
    ("qwen35", "dora"),
    ("qwen35", "lora_bias"),
    ("qwen35", "bias_all"),
    ("qwen35", "all_linear"),
    ("qwen35", "regex"),
    ("qwen35", "r64"),
    ("qwen35", "embed_head_lora"),
    ("qwen35_vl", "base"),
    ("qwen35_vl", "attn_mlp_r4"),
    ("qwen35_vl", "tokens_tied"),
    ("qwen35_moe", "base"),
    ("qwen35_moe", "attn_shared_r4"),
    ("qwen35_moe", "attn_gdn_r4"),
    ("qwen35_moe", "all_linear"),
    ("qwen35_moe", "experts"),
    ("qwen35_moe", "experts_down_only"),
    ("qwen35_moe", "router"),
    ("qwen35_moe", "experts_router_attn"),
]
FP32_RELATIVE = 1e-4
BF16_RMS = 0.07
HYBRID = ("qwen35", "qwen35_vl", "qwen35_moe")
# Of transformers' own bf16 error against fp32; ours rounds adapters to bf16, PEFT does not.
HYBRID_RMS = 3.0
# A norm of something near zero makes one position of gdn_out_r4 err by this much.
HYBRID_GAP = 1.0


def logits_of(bench, slot, ids):
    """Logits of every position, fed one token a step."""
    bench.runner.close_sequence(0)
    parts = [bench.step((0, slot, at, [token])) for at, token in enumerate(ids)]
    return torch.cat(parts).float()


def place(bench, case):
    if case == "base":
        return -1
    bench.commit(1, bench.image(case))
    return 1


@pytest.mark.parametrize(("family", "case"), CASES)
def test_fp32_agrees_with_transformers_and_peft(open_bench, reference, family, case):
    rank = 64 if case == "r64" else 16
    bench, ref = open_bench(family, max_lora_rank=rank), reference(family)
    slot, facts = place(bench, case), ref["cases"][case]
    expected = ref["tensors"][f"{case}.logits.f32"]
    found = logits_of(bench, slot, facts["ids"])[-len(expected) :]
    bound = FP32_RELATIVE * float(expected.abs().max())
    assert float((found - expected).abs().max()) < bound
    tokens = bench.greedy([(slot, facts["ids"])], len(facts["greedy_f32"]))
    assert tokens == [facts["greedy_f32"]]


def test_experts_of_less_rank_than_the_pool(open_bench, reference):
    bench = open_bench("qwen35_moe", max_lora_rank=16, max_expert_rank=8)
    facts = reference("qwen35_moe")["cases"]["experts_router_attn"]
    bench.commit(1, bench.image("experts_router_attn"))
    tokens = bench.greedy([(1, facts["ids"])], len(facts["greedy_f32"]))
    assert tokens == [facts["greedy_f32"]]


@pytest.mark.parametrize(("family", "case"), [c for c in CASES if c[0] in HYBRID])
def test_hybrid_bf16_errs_as_transformers_does(open_bench, reference, family, case):
    """Bf16 routing and states drift: the error stays of the size transformers' bf16 has, and on
    its greedy path its token is the best one here too but for two near ties."""
    rank = 64 if case == "r64" else 16
    bench, ref = open_bench(family, "bfloat16", max_lora_rank=rank), reference(family)
    slot, facts = place(bench, case), ref["cases"][case]
    exact = ref["tensors"][f"{case}.logits.f32"]
    path = facts["greedy_bf16"]
    logits = logits_of(bench, slot, facts["ids"] + path[:-1])
    found = logits[: len(facts["ids"])][-len(exact) :]
    error = (found - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt()
    assert float(error) < HYBRID_RMS * facts["bf16_vs_f32_relrms"]
    ends = logits[-len(path) :]
    gaps = ends.amax(-1) - ends[torch.arange(len(path)), torch.tensor(path)]
    assert float(gaps.max()) < HYBRID_GAP
    assert int((gaps == 0).sum()) >= len(path) - 2


@pytest.mark.parametrize(("family", "case"), [c for c in CASES if c[0] not in HYBRID])
def test_bf16_agrees_with_transformers_and_peft(open_bench, reference, family, case):
    bench, ref = open_bench(family, "bfloat16"), reference(family)
    slot, facts = place(bench, case), ref["cases"][case]
    expected = ref["tensors"][f"{case}.logits.bf16"].float()
    found = logits_of(bench, slot, facts["ids"])[-len(expected) :]
    error = (found - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
    assert float(error) < BF16_RMS
    tokens = bench.greedy([(slot, facts["ids"])], len(facts["greedy_bf16"]))
    assert tokens == [facts["greedy_bf16"]]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen35", "qwen35_moe"])
def test_a_mixed_batch_agrees_with_each_row_alone_in_peft(open_bench, reference, family):
    bench, ref = open_bench(family), reference(family)
    mixed = ref["mixed"]
    names = sorted({name for name in mixed["adapters"] if name != "__base__"})
    for slot, name in enumerate(names):
        bench.commit(slot, bench.image(name))
    slots = [-1 if name == "__base__" else names.index(name) for name in mixed["adapters"]]
    logits = bench.step(
        *((seq, slots[seq], 0, ids) for seq, ids in enumerate(mixed["rows"]))
    ).float()
    for row in range(len(slots)):
        expected = ref["tensors"][f"mixed.{row}.last_logits.f32"]
        bound = FP32_RELATIVE * float(expected.abs().max())
        assert float((logits[row] - expected).abs().max()) < bound
    tokens = bench.greedy(list(zip(slots, mixed["rows"], strict=True)), 12)
    assert tokens == mixed["greedy_alone_f32"]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_torch_references_give_the_same_tokens(open_bench, reference, family):
    bench, ref = open_bench(family, use_numba=False), reference(family)
    slot, facts = place(bench, "attn_mlp_r8"), ref["cases"]["attn_mlp_r8"]
    tokens = bench.greedy([(slot, facts["ids"])], len(facts["greedy_f32"]))
    assert tokens == [facts["greedy_f32"]]
