"""Adapters of routed experts: each expert's pair is applied, and nobody else's answer changes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from rota.gpu.lora.dims import EXPERT_MODULES

FAMILY = "qwen35_moe"
PROMPT = [(11 * n) % 120 + 3 for n in range(40)]
CASES = ["experts", "experts_down_only", "experts_router_attn"]


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_of_all_experts_changes_the_greedy_answer(open_bench, case):
    bench = open_bench(FAMILY)
    image = bench.image(case)
    places = [
        (pair, there)
        for pair, there in zip(bench.runner.layout.pairs, image.present, strict=True)
        if pair.module in EXPERT_MODULES and (case != "experts_down_only" or pair.k_in == 16)
    ]
    assert all(there for _, there in places)  # every expert of every layer
    bench.commit(1, image)
    base, adapted = bench.greedy([(-1, PROMPT), (1, PROMPT)], 6)
    assert base != adapted


def test_every_expert_alone_changes_the_answer(open_bench):
    """With the pairs of one expert only; the prompt is long enough to reach them all."""
    bench = open_bench(FAMILY)
    image, pairs = bench.image("experts"), bench.runner.layout.pairs
    base = bench.step((0, -1, 0, PROMPT))
    whole = np.array(image.present)
    seen = []
    for expert in range(bench.runner.layout.dims.experts):
        mine = whole & np.array([pair.expert == expert for pair in pairs])
        present = tuple(bool(there) for there in mine)
        scales = np.where(mine, image.scales, np.float32(0))
        bench.commit(1, dataclasses.replace(image, present=present, scales=scales))
        found = bench.step((0, 1, 0, PROMPT))
        assert not torch.equal(found, base), expert
        seen.append(found)
    assert len({one.numpy().tobytes() for one in seen}) == len(seen)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_base_rows_are_the_same_to_the_bit_with_experts_adapted_or_not(open_bench, dtype):
    without = open_bench(FAMILY, dtype, max_loras=0, expert_adapters=False, overlay_rows=0)
    alone = without.step((0, -1, 0, PROMPT))
    bench = open_bench(FAMILY, dtype)
    assert torch.equal(bench.step((0, -1, 0, PROMPT)), alone)
    bench.commit(1, bench.image("experts_router_attn"))
    both = bench.step((0, -1, 0, PROMPT), (1, 1, 0, PROMPT))
    assert torch.equal(both[0], alone[0]) and not torch.equal(both[1], alone[0])
