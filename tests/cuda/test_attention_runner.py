"""A model that attends by a paged kernel, on the test driver: the same logits, from graphs."""

from __future__ import annotations

import sys

import pytest

from rota.errors import DeviceError
from rota.gpu.host import HostDevice
from rota.gpu.model.options import RunnerOptions
from rota.gpu.model.rows import RowInput
from rota.gpu.model.runner import Runner
from rota.gpu.model.sampling import SamplingParams
from rota.gpu.model.torch_runner import TorchRunner

PROMPTS = (1, 14, 15, 17, 29)
"""Tokens: each row crosses the end of a block in another decode step, or none."""
OPTIONS = {"max_loras": 0, "num_blocks": 24, "max_step_tokens": 96, "max_sequences": 6}


@pytest.fixture
def load(cuda_machine, data_dir):
    """``load(family, attention)``: a runner on the test driver; leaves nothing behind."""
    if cuda_machine.fake is None:
        pytest.skip("runs torch on the test driver; on a GPU see bench/gpu_all.py")
    from rota.gpu.fakecuda.torch_queue import QueueSpace

    driver = cuda_machine.fake.reset()
    opened = []

    def make(family, attention):
        device = cuda_machine.open(checked=True)
        space = QueueSpace(device, driver)
        opened.append((device, space))
        options = RunnerOptions(dtype="float32", attention=attention, **OPTIONS)
        runner = TorchRunner.load(
            data_dir / "oracle" / family / "base", device, options, space=space
        )
        opened[-1] = (runner, space)
        return runner

    yield make
    for runner, space in opened:
        runner.close()
        space.close()
    assert driver.live() == {}, driver.story


def served(runner, steps=20):
    """Logits of prompts of `PROMPTS` tokens, two of them in two parts beside decode rows, and of
    ``steps`` decode steps."""
    logits = []
    runner.logits_sink = lambda seqs, found: logits.append(found.float().clone())
    for seq in range(len(PROMPTS)):
        runner.open_sequence(seq, [1], SamplingParams())

    def row(seq, start, count, sample=True):
        tokens = tuple((7 * seq + 3 * at) % 90 + 1 for at in range(start, start + count))
        blocks = tuple(4 * seq + 3 - at for at in range(4))
        return RowInput(seq, -1, start, tokens, blocks, sample)

    def step(*rows):
        assert [output.error for output in runner.step(rows)] == [None] * len(rows)

    step(row(0, 0, 1), row(1, 0, 14), row(2, 0, 15), row(3, 0, 9, False))
    step(row(3, 9, 8), row(0, 1, 1), row(4, 0, 20, False), row(1, 14, 1))
    step(row(4, 20, 9), row(2, 15, 1))
    ends = [2, 15, 16, 17, 29]
    for _ in range(steps):
        step(*(row(seq, ends[seq], 1) for seq in (3, 0, 4, 1, 2)))
        ends = [end + 1 for end in ends]
    runner.logits_sink = None
    return logits


@pytest.mark.parametrize("family", ["llama", "qwen35"])
@pytest.mark.parametrize("way", ["torch-varlen", "flashinfer"])
def test_a_model_answers_the_same_by_any_way(load, data_dir, kernels, way, family):
    runner = load(family, way)
    assert (runner.info.attention, runner.info.attention_passed) == (way, ())
    there = Runner.load(
        data_dir / "oracle" / family / "base",
        HostDevice(),
        RunnerOptions(dtype="float32", **OPTIONS),
    )
    assert there.info.attention == "host"
    try:
        for found, expected in zip(served(runner), served(there), strict=True):
            assert float((found - expected).abs().max()) < 1e-4 * float(expected.abs().max())
    finally:
        there.close()
    # A kernel that finds lengths itself needs one graph; the other one each for 2 and 4 blocks.
    assert runner.captured == {"flashinfer": 1, "torch-varlen": 2}[way]


def decoded(runner, depth, steps=18):
    """Prompts and what follows them, ``depth`` steps in flight: rows change places, most end."""
    known = {
        seq: [(7 * seq + 3 * at) % 90 + 1 for at in range(count)]
        for seq, count in enumerate(PROMPTS)
    }
    for seq, tokens in known.items():
        runner.open_sequence(seq, tokens, SamplingParams())
    ends, before, flights = dict.fromkeys(known, 0), [], []
    for turn in range(steps):
        order = list(known)[: 5 if turn < steps // 2 else 2]
        order = order[turn % 2 :] + order[: turn % 2]
        rows = []
        for seq in order:
            tokens = known[seq] if turn == 0 else known[seq][-1:]
            if turn and depth == 2:
                tokens = [~before.index(seq)]
            blocks = tuple(4 * seq + 3 - at for at in range(4))
            rows.append(RowInput(seq, -1, ends[seq], tuple(tokens), blocks, True))
            ends[seq] += len(tokens)
        flights.append((order, runner.begin(rows)))
        before = order
        while len(flights) > (depth - 1 if turn < steps - 1 else 0):
            asked, flight = flights.pop(0)
            for seq, output in zip(asked, flight.finish(), strict=True):
                assert output.error is None
                known[seq].append(output.token)
    for seq in known:
        runner.close_sequence(seq)
    return known


@pytest.mark.parametrize("way", ["torch", "torch-varlen", "flashinfer"])
def test_two_steps_in_flight_choose_what_one_at_a_time_does(load, kernels, way):
    """Each step is planned from rows of its own, while the one before it runs."""
    runner = load("llama", way)
    assert decoded(runner, 2) == decoded(runner, 1)


def test_auto_takes_torchs_kernel_and_names_what_it_passed(load, kernels, monkeypatch):
    assert load("llama", "auto").info.attention == "torch-varlen"
    kernels[0].broken = True
    runner = load("llama", "auto")
    assert runner.info.attention == "flashinfer"
    assert "torch-varlen: decode: a row of 1 keys is not finite" in runner.info.attention_passed[0]


def test_a_kernel_by_name_that_is_not_there_ends_the_load(load, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(DeviceError) as caught:
        load("llama", "flashinfer")
    assert (caught.value.code, caught.value.subject) == ("attention-unavailable", "flashinfer")


def test_the_host_refuses_a_kernel_by_name(data_dir):
    device = HostDevice()
    with pytest.raises(DeviceError) as caught:
        Runner.load(
            data_dir / "oracle" / "llama" / "base",
            device,
            RunnerOptions(attention="flashinfer", **OPTIONS),
        )
    assert (caught.value.code, caught.value.subject) == ("attention-unavailable", "flashinfer")
    device.close()


def test_a_way_nobody_knows_is_refused():
    with pytest.raises(DeviceError) as caught:
        RunnerOptions(attention="fast")
    assert (caught.value.code, caught.value.subject) == ("bad-argument", "attention")
