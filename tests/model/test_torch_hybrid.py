"""The hybrid families' accelerator code, with torch on the CPU: against the oracle and the host."""

from __future__ import annotations

import pytest
import torch

from rota.errors import DeviceError, InternalError
from rota.gpu.host import HostDevice
from rota.gpu.kernels.gdn import GdnShape, GdnWeights, StateRows, delta_net_reference
from rota.gpu.model.options import RunnerOptions
from rota.gpu.model.sampling import SamplingParams
from rota.gpu.model.torch_gdn import BLOCK, StateStep, TorchDeltaNet
from rota.gpu.model.torch_runner import TorchRunner
from rota.gpu.tensors import HostSpace

CASES = [
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
    ("qwen35_moe", "base"),
    ("qwen35_moe", "all_linear"),
    ("qwen35_moe", "experts_down_only"),
    ("qwen35_moe", "router"),
    ("qwen35_moe", "experts_router_attn"),
    ("qwen35_vl", "tokens_tied"),
]
CUT_CASES = {
    "qwen35": ("gdn_all_r4", "rslora_r16_bf16"),
    "qwen35_moe": ("experts_router_attn", "all_linear"),
}
PROMPT = [44, 54, 99, 14, 50, 102, 37, 66, 50, 6, 5, 38, 7, 34, 85, 23, 4, 30, 20, 22, 62, 49]
FP32 = 1e-4
SHAPE = GdnShape(key_heads=2, value_heads=4, key_dim=16, value_dim=24, conv=4)


def place(bench, case, slot=1):
    if case == "base":
        return -1
    bench.runner.commit(slot, bench.image(case))
    return slot


def close(found, expected):
    return float((found - expected).abs().max()) < FP32 * float(expected.abs().max())


def rank_of(case):
    return 64 if case == "r64" else 16


@pytest.mark.parametrize(("family", "case"), CASES)
def test_fp32_agrees_with_transformers_and_peft(open_bench, reference, family, case):
    bench = open_bench(family, math="torch", max_lora_rank=rank_of(case))
    ref = reference(family)
    slot, facts = place(bench, case), ref["cases"][case]
    expected = ref["tensors"][f"{case}.logits.f32"]
    ids = facts["ids"]
    one_by_one = [bench.step((0, slot, at, [token])) for at, token in enumerate(ids)]
    assert close(torch.cat(one_by_one)[-len(expected) :], expected)
    assert close(bench.step((0, slot, 0, ids)), expected[-1:])
    tokens = bench.greedy([(slot, ids)], len(facts["greedy_f32"]))
    assert tokens == [facts["greedy_f32"]]


@pytest.mark.parametrize(
    ("family", "case"),
    [
        ("qwen35", "base"),
        ("qwen35", "all_linear"),
        ("qwen35_moe", "base"),
        ("qwen35_moe", "experts_router_attn"),
    ],
)
def test_bf16_errs_as_transformers_does(open_bench, reference, family, case):
    """Experts of bf16 take grouped_mm, those of fp32 do not."""
    bench, ref = open_bench(family, "bfloat16", math="torch"), reference(family)
    slot, facts = place(bench, case), ref["cases"][case]
    exact = ref["tensors"][f"{case}.logits.f32"]
    parts = [bench.step((0, slot, at, [token])) for at, token in enumerate(facts["ids"])]
    found = torch.cat(parts).float()[-len(exact) :]
    error = (found - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt()
    assert float(error) < 3 * facts["bf16_vs_f32_relrms"]


@pytest.mark.parametrize("family", ["qwen35", "qwen35_moe"])
def test_mixed_batches_agree_with_each_row_alone_in_peft(open_bench, reference, family):
    bench, ref = open_bench(family, math="torch"), reference(family)
    mixed = ref["mixed"]
    names = sorted({name for name in mixed["adapters"] if name != "__base__"})
    for slot, name in enumerate(names):
        bench.runner.commit(slot, bench.image(name))
    slots = [-1 if name == "__base__" else names.index(name) for name in mixed["adapters"]]
    logits = bench.step(*((seq, slots[seq], 0, ids) for seq, ids in enumerate(mixed["rows"])))
    for row in range(len(slots)):
        assert close(logits[row], ref["tensors"][f"mixed.{row}.last_logits.f32"])
    tokens = bench.greedy(list(zip(slots, mixed["rows"], strict=True)), 12)
    assert tokens == mixed["greedy_alone_f32"]


@pytest.mark.parametrize(
    ("family", "cuts"),
    [
        ("qwen35", [22]),
        ("qwen35", [16, 6]),
        ("qwen35", [17, 1, 4]),
        ("qwen35_moe", [22]),
        ("qwen35_moe", [3, 18, 1]),
    ],
)
def test_any_cut_of_a_prompt_beside_anything_agrees_with_the_host(open_bench, family, cuts):
    benches = [open_bench(family), open_bench(family, math="torch")]
    found = []
    for bench in benches:
        for slot, case in zip((0, 2), CUT_CASES[family], strict=True):
            place(bench, case, slot)
        at, logits = 0, None
        for step, size in enumerate(cuts):
            others = [(1, 2, step, [5 + step]), (2, -1, step, [9 + step])]
            logits = bench.step(others[0], (0, 0, at, PROMPT[at : at + size]), others[1])
            at += size
        found.append(logits)
    assert close(found[1], found[0])


def weights(generator):
    def normal(*shape):
        return torch.randn(shape, generator=generator)

    return GdnWeights(
        conv=normal(SHAPE.conv, SHAPE.channels) * 0.5,
        decay=-normal(SHAPE.value_heads).exp(),
        dt_bias=normal(SHAPE.value_heads),
        norm=normal(SHAPE.value_dim),
        eps=1e-6,
    )


@pytest.mark.parametrize("count", [2, 5, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
def test_blocks_of_a_chunk_are_the_recurrence(count):
    """Outputs and both states, after a chunk that goes on from a state, beside two single rows."""
    generator = torch.Generator().manual_seed(count)
    mine = weights(generator)
    places, n = 5, count + 2
    projected = torch.randn((n, SHAPE.projected), generator=generator)
    conv = torch.randn((places, SHAPE.conv - 1, SHAPE.channels), generator=generator)
    state = torch.randn(
        (places, SHAPE.value_heads, SHAPE.key_dim, SHAPE.value_dim), generator=generator
    )
    old = conv.clone(), state.clone()
    wanted = [projected.clone(), conv.clone(), state.clone()]
    rows = StateRows(
        torch.tensor([0, 1, count + 1]),
        torch.tensor([1, count, 1]),
        torch.tensor([4, 2, 0]),
        3,
    )
    expected = torch.empty((n, SHAPE.value_width))
    delta_net_reference(SHAPE, mine, *wanted, rows, expected)
    device = HostDevice()
    net = TorchDeltaNet(SHAPE, mine, HostSpace(device))
    step = StateStep(torch.tensor([4, 0]), torch.tensor([0, count + 1]), ((1, count + 1, 2),))
    found = net(projected, conv, state, step)
    device.close()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state, wanted[2], rtol=1e-4, atol=1e-4)
    assert torch.equal(conv, wanted[1])
    for place in (1, 3):
        assert torch.equal(conv[place], old[0][place])
        assert torch.equal(state[place], old[1][place])


def test_decays_that_underflow_leave_no_nan():
    generator = torch.Generator().manual_seed(1)
    mine = weights(generator)
    mine.decay.fill_(-50.0)
    mine.dt_bias.fill_(40.0)
    projected = torch.randn((2 * BLOCK, SHAPE.projected), generator=generator)
    conv = torch.zeros((1, SHAPE.conv - 1, SHAPE.channels))
    state = torch.zeros((1, SHAPE.value_heads, SHAPE.key_dim, SHAPE.value_dim))
    device = HostDevice()
    net = TorchDeltaNet(SHAPE, mine, HostSpace(device))
    found = net(projected, conv, state, StateStep(None, None, ((0, 2 * BLOCK, 0),)))
    device.close()
    assert torch.isfinite(found).all() and torch.isfinite(state).all()


def refused(bench, code, *rows):
    with pytest.raises(InternalError) as caught:
        bench.step(*rows)
    assert caught.value.code == code


def test_states_go_on_start_again_and_are_given_back(open_bench):
    bench = open_bench("qwen35", math="torch")
    for seq in range(100):
        bench.runner.close_sequence(seq)
    info = bench.runner.info
    assert info.recurrent and info.state_bytes == 4 * 9 * 4 * (3 * 160 + 4 * 16 * 24)
    whole = bench.step((0, -1, 0, PROMPT))
    ahead = bench.step((0, -1, 22, [3]))
    refused(bench, "state-position", (0, -1, 22, [3]))
    refused(bench, "state-position", (1, -1, 4, [3]))
    for seq in range(1, 8):
        bench.step((seq, -1, 0, [seq]))
    ninth = bench.rows([(0, -1, 0, PROMPT)])[0]
    ninth = type(ninth)(99, -1, 0, ninth.tokens, ninth.blocks, True)
    with pytest.raises(InternalError) as caught:
        bench.runner.step([ninth])
    assert caught.value.code == "no-state-place"
    bench.runner.drop_state(5)
    bench.seen.clear()
    bench.runner.step([ninth])
    assert torch.equal(bench.seen[0], whole)  # nothing of the previous holder is left
    assert torch.equal(bench.step((0, -1, 0, PROMPT)), whole)
    # Steps padded to a bucket move nobody's state but their own.
    bench.step(*((seq, -1, 1, [seq]) for seq in (1, 2, 3)))
    assert close(bench.step((0, -1, 22, [3])), ahead)


def test_a_state_of_nan_is_gone_with_its_sequence(open_bench):
    bench = open_bench("qwen35", math="torch")
    for seq in range(100):
        bench.runner.close_sequence(seq)
    expected = bench.step((0, -1, 0, PROMPT[:1]))
    for memory in (*bench.runner._states.memory, *bench.runner._states.conv):
        memory.fill_(torch.nan)
    assert close(bench.step((0, -1, 0, PROMPT[:1])), expected)
    assert close(bench.step((0, -1, 0, PROMPT[:3])), bench.step((1, -1, 0, PROMPT[:3])))


def test_a_failed_step_leaves_its_sequences_to_start_again(open_bench, monkeypatch):
    bench = open_bench("qwen35", math="torch")
    whole = bench.step((0, -1, 0, PROMPT))
    bench.step((1, -1, 0, PROMPT))

    def fail(*_, **__):
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(TorchDeltaNet, "__call__", fail)
        with pytest.raises(DeviceError) as caught:
            bench.step((0, -1, 22, [3]))
        assert caught.value.code == "step-failed"
    refused(bench, "state-position", (0, -1, 22, [3]))
    assert torch.equal(bench.step((0, -1, 0, PROMPT)), whole)
    bench.step((1, -1, 22, [3]))  # not in the failed step


def test_a_preempted_sequence_keeps_its_sampler(open_bench):
    bench = open_bench("qwen35", math="torch")
    answers = []
    for preempted in (False, True):
        bench.runner.open_sequence(0, PROMPT, SamplingParams(temperature=1.0, seed=5))
        fed = list(PROMPT)
        for turn in range(6):
            start = 0 if turn == 0 else len(fed) - 1
            if preempted and turn == 3:
                bench.runner.drop_state(0)
                start = 0
            rows = bench.rows([(0, -1, start, fed[start:])])
            fed.append(bench.runner.step(rows)[0].token)
        bench.runner.close_sequence(0)
        answers.append(fed)
    assert answers[0] == answers[1]


def test_states_that_do_not_fit_are_refused_and_close_gives_them_back(data_dir):
    folder = data_dir / "oracle" / "qwen35" / "base"
    options = {"max_loras": 1, "max_lora_rank": 8, "num_blocks": 2}
    device = HostDevice(checked=True, allow_foreign=True, memory_limit=1 << 23)
    with pytest.raises(DeviceError) as caught:
        TorchRunner.load(folder, device, RunnerOptions(max_sequences=512, **options))
    assert caught.value.code == "states-too-large"
    assert device.live_labels() == ()
    device.close()
    device = HostDevice(checked=True, allow_foreign=True)
    runner = TorchRunner.load(folder, device, RunnerOptions(max_sequences=4, **options))
    assert {"recurrent states", "conv states"} <= set(device.live_labels())
    runner.close()
    assert device.live_labels() == ()
