"""What only the hybrid families have on an accelerator, with torch on the CPU."""

from __future__ import annotations

import pytest
import torch

from rota.errors import DeviceError
from rota.gpu.host import HostDevice
from rota.gpu.kernels.gdn import GdnShape, GdnWeights, StateRows, delta_net_reference
from rota.gpu.model.options import RunnerOptions
from rota.gpu.model.torch_gdn import BLOCK, StateStep, TorchDeltaNet
from rota.gpu.model.torch_runner import TorchRunner
from rota.gpu.tensors import HostSpace

from .judging import PROMPT, close, placed

SHAPE = GdnShape(key_heads=2, value_heads=4, key_dim=16, value_dim=24, conv=4)


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
    slot, facts = placed(bench, case), ref["cases"][case]
    exact = ref["tensors"][f"{case}.logits.f32"]
    parts = [bench.step((0, slot, at, [token])) for at, token in enumerate(facts["ids"])]
    found = torch.cat(parts).float()[-len(exact) :]
    error = (found - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt()
    assert float(error) < 3 * facts["bf16_vs_f32_relrms"]


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


def test_padding_moves_no_state(open_bench):
    bench = open_bench("qwen35", math="torch")
    for seq in range(100):
        bench.runner.close_sequence(seq)
    whole = bench.step((0, -1, 0, PROMPT))
    ahead = bench.step((0, -1, 22, [3]))
    assert torch.equal(bench.step((0, -1, 0, PROMPT)), whole)
    for seq in (1, 2, 3):
        bench.step((seq, -1, 0, [seq]))
    bench.step(*((seq, -1, 1, [seq]) for seq in (1, 2, 3)))  # padded to 4
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
