"""A row's logits depend on nothing but the row: equal to the last bit, however it is computed."""

from __future__ import annotations

import pytest
import torch

FAMILIES = ["llama", "qwen2", "qwen3", "qwen35", "qwen35_moe"]
FIRST = {"qwen35": "rslora_r16_bf16", "qwen35_moe": "all_linear"}
SECOND = {
    "llama": "mts_embed_head",
    "qwen2": "attn_mlp_r8",
    "qwen3": "tokens_tied",
    "qwen35": "gdn_all_r4",
    "qwen35_moe": "experts_router_attn",
}
DTYPES = ["float32", "bfloat16"]
PROMPT = [44, 54, 99, 14, 50, 102, 37, 66, 50, 6, 5, 38, 7, 34, 85, 23, 4, 30, 20, 22, 62, 49]
OTHERS = [[8, 36, 28, 108], [57, 33, 33, 103, 27, 70, 52, 72, 104, 9, 9, 1], [98] * 17]


def fed_in_chunks(bench, slot, sizes, before=None):
    """Logits of the last position of PROMPT, fed in chunks of ``sizes``."""
    at = 0
    for size in sizes:
        last = at + size == len(PROMPT)
        logits = bench.step((0, slot, at, PROMPT[at : at + size]), sample=last)
        at += size
    assert at == len(PROMPT)
    return logits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_does_not_depend_on_how_it_is_cut(open_bench, family, dtype):
    bench = open_bench(family, dtype)
    bench.commit(0, bench.image(FIRST.get(family, "attn_mlp_r8")))
    for slot in (-1, 0):
        whole = fed_in_chunks(bench, slot, [len(PROMPT)])
        for sizes in ([1] * len(PROMPT), [7, 15], [16, 6], [5, 1, 1, 15]):
            assert torch.equal(fed_in_chunks(bench, slot, sizes), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_do_not_influence_each_other(open_bench, family, dtype):
    bench = open_bench(family, dtype)
    bench.commit(0, bench.image(FIRST.get(family, "attn_mlp_r8")))
    bench.commit(2, bench.image(SECOND[family]))
    slots = (-1, 0, 2)
    alone = {slot: bench.step((0, slot, 0, PROMPT)) for slot in slots}
    assert not torch.equal(alone[-1], alone[0])
    for slot in slots:
        for others in ((2, 0, -1), (-1, -1, -1), (0, 0, 2)):
            rows = [(1 + i, s, 0, OTHERS[i]) for i, s in enumerate(others)]
            logits = bench.step(rows[0], (0, slot, 0, PROMPT), *rows[1:])
            assert torch.equal(logits[1], alone[slot][0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_rows_beside_prefill_chunks(open_bench, dtype):
    bench = open_bench("llama", dtype)
    bench.commit(0, bench.image("attn_mlp_r8"))
    bench.step((0, 0, 0, PROMPT))
    alone = bench.step((0, 0, len(PROMPT), [3]))
    bench.step((0, 0, 0, PROMPT))
    beside = bench.step((1, -1, 0, OTHERS[0]), (0, 0, len(PROMPT), [3]), (2, 0, 0, OTHERS[2]))
    assert torch.equal(beside[1], alone[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_base_rows_are_the_same_with_lora_off(open_bench, family, dtype):
    on, off = open_bench(family, dtype), open_bench(family, dtype, max_loras=0)
    on.runner.commit(0, on.image(FIRST.get(family, "attn_mlp_r8")))
    alone = off.step((0, -1, 0, PROMPT))
    mixed = on.step((0, -1, 0, PROMPT), (1, 0, 0, OTHERS[1]))
    assert torch.equal(mixed[0], alone[0])
    assert torch.equal(on.step((0, -1, 0, PROMPT)), alone)


def test_blocks_may_lie_anywhere(open_bench):
    bench = open_bench("llama")
    first = bench.step((0, -1, 0, PROMPT))
    row = bench.rows([(1, -1, 0, PROMPT)])[0]
    scattered = type(row)(1, -1, 0, row.tokens, (23, 4, 11), True)
    bench.seen.clear()
    bench.runner.step([scattered])
    assert torch.equal(bench.seen[0], first)
