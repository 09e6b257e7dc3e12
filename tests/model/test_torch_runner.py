"""The runner accelerators use, with torch on the CPU: against the oracle and the host's runner."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from rota.errors import DeviceError, InternalError, RequestError
from rota.gpu.decorators import Fault, FaultyDevice, TracingDevice
from rota.gpu.host import HostDevice
from rota.gpu.lora.image import SlotImage
from rota.gpu.lora.source import DirectorySource
from rota.gpu.lora.stage import stage
from rota.gpu.model.options import RunnerOptions
from rota.gpu.model.rows import RowInput
from rota.gpu.model.sampling import Sampler, SamplingParams
from rota.gpu.model.torch_deltas import GEMM_TOKENS, Chunk, between, split_rows
from rota.gpu.model.torch_runner import TorchRunner
from rota.gpu.model.torch_sampling import draw, facts_of
from rota.gpu.model.torch_step import rows_of_buckets, span_of

from .judging import PROMPT, close, placed

CASES = [
    ("llama", "base"),
    ("llama", "attn_mlp_r8"),
    ("llama", "rslora_r16_bf16"),
    ("llama", "mts_embed_head"),
    ("qwen2", "base"),
    ("qwen2", "attn_mlp_r8"),
    ("qwen2", "bias_all"),
    ("qwen3", "base"),
    ("qwen3", "dora"),
    ("qwen3", "attn_mlp_r8"),
    ("qwen3", "tokens_tied"),
    ("qwen3", "mts_embed_tied"),
]
HYBRID_CASES = [
    ("qwen35", "base"),
    ("qwen35", "gdn_all_r4"),
    ("qwen35", "layers_subset"),
    ("qwen35", "tokens"),
    ("qwen35", "mts_embed_head"),
    ("qwen35", "patterns"),
    ("qwen35", "dora"),
    ("qwen35", "lora_bias"),
    ("qwen35", "all_linear"),
    ("qwen35", "r64"),
    ("qwen35", "embed_head_lora"),
    ("qwen35_moe", "base"),
    ("qwen35_moe", "all_linear"),
    ("qwen35_moe", "experts_down_only"),
    ("qwen35_moe", "router"),
    ("qwen35_moe", "experts_router_attn"),
    ("qwen35_vl", "tokens_tied"),
]
CUT_CASES = {
    "llama": ("attn_mlp_r8", "rslora_r16_bf16"),
    "qwen35": ("gdn_all_r4", "rslora_r16_bf16"),
    "qwen35_moe": ("experts_router_attn", "all_linear"),
}
CUTS = [
    *[("llama", cuts) for cuts in ([22], [1] * 22, [16, 6], [17, 1, 4], [3, 18, 1])],
    *[("qwen35", cuts) for cuts in ([22], [16, 6], [17, 1, 4])],
    *[("qwen35_moe", cuts) for cuts in ([22], [3, 18, 1])],
]
BF16_RMS = 0.07


@pytest.mark.parametrize(("family", "case"), CASES + HYBRID_CASES)
def test_fp32_agrees_with_transformers_and_peft(open_bench, reference, family, case):
    room = {"max_lora_rank": 64} if case == "r64" else {}
    bench, ref = open_bench(family, math="torch", **room), reference(family)
    slot, facts = placed(bench, case), ref["cases"][case]
    expected = ref["tensors"][f"{case}.logits.f32"]
    ids = facts["ids"]
    one_by_one = [bench.step((0, slot, at, [token])) for at, token in enumerate(ids)]
    assert close(torch.cat(one_by_one)[-len(expected) :], expected)
    assert close(bench.step((0, slot, 0, ids)), expected[-1:])
    tokens = bench.greedy([(slot, ids)], len(facts["greedy_f32"]))
    assert tokens == [facts["greedy_f32"]]


@pytest.mark.parametrize(("family", "case"), CASES)
def test_bf16_agrees_with_transformers_and_peft(open_bench, reference, family, case):
    bench, ref = open_bench(family, "bfloat16", math="torch"), reference(family)
    slot, facts = placed(bench, case), ref["cases"][case]
    expected = ref["tensors"][f"{case}.logits.bf16"].float()
    parts = [bench.step((0, slot, at, [token])) for at, token in enumerate(facts["ids"])]
    found = torch.cat(parts).float()[-len(expected) :]
    error = (found - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
    assert float(error) < BF16_RMS


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen35", "qwen35_moe"])
def test_mixed_batches_agree_with_each_row_alone_in_peft(open_bench, reference, family):
    bench, ref = open_bench(family, math="torch"), reference(family)
    mixed = ref["mixed"]
    names = sorted({name for name in mixed["adapters"] if name != "__base__"})
    for slot, name in enumerate(names):
        bench.commit(slot, bench.image(name))
    slots = [-1 if name == "__base__" else names.index(name) for name in mixed["adapters"]]
    logits = bench.step(*((seq, slots[seq], 0, ids) for seq, ids in enumerate(mixed["rows"])))
    for row in range(len(slots)):
        assert close(logits[row], ref["tensors"][f"mixed.{row}.last_logits.f32"])
    tokens = bench.greedy(list(zip(slots, mixed["rows"], strict=True)), 12)
    assert tokens == mixed["greedy_alone_f32"]


@pytest.mark.parametrize(("family", "cuts"), CUTS)
def test_any_cut_of_a_prompt_beside_anything_agrees_with_the_host(open_bench, family, cuts):
    """Chunks of GEMM size, of kernel size, and single tokens, with decode rows beside them."""
    benches = [open_bench(family), open_bench(family, math="torch")]
    found = []
    for bench in benches:
        for slot, case in zip((0, 2), CUT_CASES[family], strict=True):
            placed(bench, case, slot)
        at, logits = 0, None
        for step, size in enumerate(cuts):
            others = [(1, 2, step, [5 + step]), (2, -1, step, [9 + step])]
            logits = bench.step(others[0], (0, 0, at, PROMPT[at : at + size]), others[1])
            at += size
        found.append(logits)
    assert close(found[1], found[0])


def test_blocks_another_row_filled_with_nan_are_not_seen(open_bench):
    bench = open_bench("llama", math="torch")
    layout, pairs = bench.runner.layout, len(bench.runner.layout.pairs)
    expected = bench.step((0, -1, 0, PROMPT[:3]))
    buffer = np.zeros(layout.slot_bytes, np.uint8)
    for part in layout.pair_views(buffer, 0):
        part[:] = np.nan
    present = tuple(at == 0 for at in range(pairs))
    scales = np.array([1.0] + [0.0] * (pairs - 1), np.float32)
    image = SlotImage(
        buffer, present, scales, (16,) + (0,) * (pairs - 1), "x", layout.fingerprint()
    )
    bench.commit(3, image)
    bench.runner.open_sequence(0, PROMPT, SamplingParams())
    (output,) = bench.runner.step(bench.rows([(0, 3, 0, PROMPT)]))  # fills the blocks with NaN
    bench.runner.close_sequence(0)
    assert isinstance(output.error, RequestError) and output.error.code == "bad-logits"
    assert close(bench.step((0, -1, 0, PROMPT[:3])), expected)
    again = [bench.step((0, -1, at, [token])) for at, token in enumerate(PROMPT[:3])]
    assert close(again[-1], expected)


def test_padding_touches_no_block(open_bench):
    bench = open_bench("llama", math="torch")
    bench.step((7, -1, 0, PROMPT))
    expected = bench.step((7, -1, len(PROMPT), [3]))
    bench.step((7, -1, 0, PROMPT))
    for count in (3, 5):  # padded to 4 and 8
        bench.step(*((seq, -1, 0, [seq + 1]) for seq in range(count)))
    assert close(bench.step((7, -1, len(PROMPT), [3])), expected)


def test_plain_drawn_and_host_rows_choose_as_the_host_does(open_bench):
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(temperature=0.8, top_k=7, top_p=0.9, min_p=0.01, seed=4),
        SamplingParams(temperature=1.3, top_p=0.7, seed=5),
        SamplingParams(temperature=0.7, repetition_penalty=1.3, seed=6),
        SamplingParams(logprobs=2),
    ]
    answers = []
    for bench in (open_bench("llama"), open_bench("llama", math="torch")):
        placed(bench, "attn_mlp_r8", 0)
        fed = [[*PROMPT[: 3 + seq]] for seq in range(len(kinds))]
        done = [0] * len(kinds)
        for seq, kind in enumerate(kinds):
            bench.runner.open_sequence(seq, fed[seq], kind)
        told = []
        for _ in range(8):
            rows = [(s, s % 2 - 1, done[s], fed[s][done[s] :]) for s in range(len(kinds))]
            for seq, output in enumerate(bench.runner.step(bench.rows(rows))):
                assert output.error is None
                done[seq] = len(fed[seq])
                fed[seq].append(output.token)
                told.append((output.token, output.logprob is None, [i for i, _ in output.top]))
        for seq in range(len(kinds)):
            bench.runner.close_sequence(seq)
        answers.append(told)
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.05},
        {"top_k": 50, "top_p": 0.95, "min_p": 0.02},
    ],
)
def test_draws_are_the_host_samplers(fields):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn((40, 200), generator=generator)
    logits[:, 10:20] = logits[:, :1]  # ties
    params = [SamplingParams(temperature=0.9, seed=seed, **fields) for seed in range(40)]
    mine = [Sampler([1], p, 200) for p in params]
    facts = torch.from_numpy(facts_of([Sampler([1], p, 200) for p in params]).copy())
    found = draw(logits, facts, filtered=bool(fields))
    want = [sampler.choose(row).token for sampler, row in zip(mine, logits.numpy(), strict=True)]
    assert found.tolist() == want


def test_rows_that_do_not_sample_and_rows_not_open(open_bench):
    bench = open_bench("llama", math="torch")
    bench.runner.open_sequence(1, PROMPT, SamplingParams())
    rows = bench.rows([(0, -1, 0, PROMPT[:1])], sample=False)
    assert [o.token for o in bench.runner.step(rows)] == [-1]
    rows += bench.rows([(1, -1, 0, PROMPT[:1]), (2, -1, 0, PROMPT[:2])])
    outputs = bench.runner.step(rows)
    assert outputs[0].token == -1 and outputs[0].error is None
    assert outputs[1].token >= 0
    assert outputs[2].error.code == "sequence-not-open"
    bench.runner.close_sequence(1)
    with pytest.raises(InternalError) as caught:
        bench.step((0, 3 if 3 not in bench.runner._adapters._active else 9, 0, PROMPT))
    assert caught.value.code == "empty-slot"


def test_which_tokens_take_which_way():
    g = GEMM_TOKENS
    slots, chunks = split_rows([1, g, g - 1, g, 1], [2, 0, 1, -1, -1])
    assert slots == [2, *[-1] * g, *[1] * (g - 1), *[-1] * g, -1]
    assert [(c.slot, c.begin, c.end) for c in chunks] == [(0, 1, 1 + g), (-1, 2 * g, 3 * g)]


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([], (0, 90)),
        ([(0, 20)], (20, 90)),
        ([(70, 90)], (0, 70)),
        ([(0, 20), (20, 50), (60, 90)], (50, 60)),
        ([(10, 80)], (0, 90)),
        ([(0, 40), (40, 90)], (90, 90)),
    ],
)
def test_the_kernels_run_between_the_chunks(chunks, expected):
    assert between([Chunk(0, *span) for span in chunks], 90) == expected


@pytest.mark.parametrize("long_slot", [-1, 0])
@pytest.mark.parametrize("long_first", [False, True])
def test_a_long_prompt_starts_no_blocks_for_its_tokens(data_dir, long_slot, long_first):
    """Beside rows that decode; elsewhere most of a mixed batch's blocks had nothing to do."""
    lines: list[str] = []
    device = TracingDevice(HostDevice(checked=True, allow_foreign=True), lines.append)
    sizes = {"max_loras": 4, "max_sequences": 8, "max_step_tokens": 128, "num_blocks": 16}
    runner = load(data_dir, device, max_lora_rank=16, **sizes)
    source = DirectorySource(data_dir / "oracle" / "llama" / "adapters" / "attn_mlp_r8")
    for slot in (0, 1):
        runner.commit(slot, stage(source, runner.layout, base_rows=runner.base_rows).image)
    seen: list[torch.Tensor] = []
    runner.logits_sink = lambda seqs, logits: seen.append(logits.float().clone())
    decodes = [RowInput(seq, 1 if seq % 2 else -1, 0, (7 + seq,), (seq,), True) for seq in range(6)]
    prompt = tuple((11 * n) % 90 + 5 for n in range(100))
    prefill = RowInput(6, long_slot, 0, prompt, tuple(range(6, 13)), True)
    rows = [prefill, *decodes] if long_first else [*decodes, prefill]
    lines.clear()
    runner.step(rows)
    grids = [
        int(found[1])
        for line in lines
        if (found := re.match(r"launch lora_\w+ \((?:\d+),(\d+)", line))
    ]
    assert grids and set(grids) == {len(decodes)}
    # And each row's answer is that of the row alone.
    together = seen[0]
    for place, row in enumerate(rows):
        seen.clear()
        runner.step([row])
        assert close(together[place], seen[0][0])
    runner.close()
    device.close()


def test_buckets_and_spans():
    assert [rows_of_buckets(n) for n in (1, 3, 8, 100, 128, 500)] == [1, 4, 8, 128, 128, 500]
    assert [span_of(n, 24) for n in (1, 2, 3, 9, 16, 17)] == [1, 2, 4, 16, 16, 24]


def load(data_dir, device, **options):
    folder = data_dir / "oracle" / "llama" / "base"
    wanted = {
        "num_blocks": 4,
        "max_loras": 2,
        "max_sequences": 4,
        "max_step_tokens": 32,
        "max_embedding_rank": 8,
    }
    return TorchRunner.load(folder, device, RunnerOptions(**(wanted | options)))


def test_close_gives_everything_back_once(data_dir):
    device = HostDevice(checked=True, allow_foreign=True)
    runner = load(data_dir, device)
    assert {"kv cache", "lora pool", "lora planes", "logits"} <= set(device.live_labels())
    runner.close()
    assert device.live_labels() == ()
    runner.close()
    for call in (
        lambda: runner.step([RowInput(0, -1, 0, (1,), (0,), True)]),
        lambda: runner.retire(0),
        lambda: runner.open_sequence(0, PROMPT, SamplingParams()),
    ):
        with pytest.raises(DeviceError) as caught:
            call()
        assert caught.value.code == "runner-closed"


def test_a_fault_in_any_device_call_of_a_load_leaves_nothing(data_dir):
    counting = FaultyDevice(HostDevice(checked=True, allow_foreign=True), [])
    runner = load(data_dir, counting)
    ops = (
        "create_stream", "create_event", "alloc", "pinned_alloc", "memset", "copy_h2d", "launch",
        "synchronize",
    )  # fmt: skip
    calls = {op: counting.calls(op) for op in ops}
    runner.close()
    assert all(calls.values())
    for op, count in calls.items():
        for nth in {1, 2, count // 2, count} - {0}:
            device = FaultyDevice(
                HostDevice(checked=True, allow_foreign=True), [Fault(op, min(nth, count))]
            )
            with pytest.raises(DeviceError) as caught:
                load(data_dir, device)
            assert caught.value.code == "injected"
            assert device.live_labels() == ()
            device.close()


def test_lora_off_and_a_rank_without_kernels(data_dir):
    runner = load(data_dir, HostDevice(checked=True, allow_foreign=True), max_loras=0)
    with pytest.raises(DeviceError) as caught:
        runner.retire(0)
    assert caught.value.code == "lora-off"
    runner.close()
    device = HostDevice(checked=True, allow_foreign=True)
    with pytest.raises(DeviceError) as caught:
        load(data_dir, device, max_lora_rank=200)
    assert (caught.value.code, caught.value.subject) == ("bad-argument", "rank")
    assert device.live_labels() == ()
