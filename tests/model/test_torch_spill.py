"""Spill, restore and snapshots of the accelerator's runner, with torch on the CPU."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

from rota.errors import DeviceError, InternalError
from rota.gpu.decorators import Fault, FaultyDevice
from rota.gpu.host import HostDevice
from rota.gpu.model.options import RunnerOptions
from rota.gpu.model.rows import RowInput
from rota.gpu.model.sampling import SamplingParams
from rota.gpu.model.torch_runner import TorchRunner

LONG = [(7 * i + 3) % 120 for i in range(360)]
BLOCKS = tuple(range(23))  # more than pass at a time
ELSEWHERE = tuple(range(23, 46))


def load(data_dir, device, family="llama", **more):
    options = {
        "dtype": "float32",
        "max_loras": 0,
        "num_blocks": 48,
        "max_step_tokens": 512,
        "max_sequences": 3,
        "spill_bytes": 1 << 20,
    }
    folder = data_dir / "oracle" / family / "base"
    return TorchRunner.load(folder, device, RunnerOptions(**(options | more)))


@pytest.fixture
def serve(data_dir):
    """``serve(family, **more)``: a runner on a checked device; leaves nothing behind."""
    opened = []

    def make(family="llama", **more):
        runner = load(data_dir, HostDevice(checked=True, allow_foreign=True), family, **more)
        opened.append(runner)
        return runner

    yield make
    for runner in opened:
        runner.close()


def logits(runner, *rows):
    seen = []
    runner.logits_sink = lambda seqs, found: seen.append(found.clone())
    runner.step(rows)
    return seen[0]


def row(seq, start, tokens, blocks, **more):
    return RowInput(seq, -1, start, tuple(tokens), blocks, True, **more)


@pytest.mark.parametrize("family", ["llama", "qwen35"])
def test_a_spilled_sequence_goes_on_exactly_elsewhere(serve, family):
    runner = serve(family)
    logits(runner, row(0, 0, LONG, BLOCKS))
    expected = logits(runner, row(0, 360, [5], BLOCKS))
    logits(runner, row(0, 0, LONG, BLOCKS))
    runner.spill(0, BLOCKS)
    logits(runner, row(1, 0, LONG[::-1], BLOCKS))  # the blocks and the state are another's
    runner.restore(0, list(zip(range(23), ELSEWHERE, strict=True)))
    assert torch.equal(logits(runner, row(0, 360, [5], ELSEWHERE)), expected)
    # What was given up is taken again, and a part of a copy may stay behind.
    runner.spill(1, BLOCKS)
    runner.restore(1, [(22, 0), (1, 5)])
    with pytest.raises(InternalError) as caught:
        runner.restore(1, [])
    assert caught.value.code == "sequence-not-spilled"


def test_refusals_by_name_touch_nothing(serve):
    each = serve().info.kv_bytes // 49  # one block more than is given out
    room = 6
    runner = serve(spill_bytes=room * each + each // 2)
    assert runner.info.spill_blocks == room
    for call, code in (
        (lambda: runner.spill(0, list(range(room + 1))), "spill-full"),
        (lambda: runner.spill(0, [48]), "bad-block"),
        (lambda: runner.spill(0, []), "bad-block"),
        (lambda: runner.restore(0, []), "sequence-not-spilled"),
    ):
        with pytest.raises(InternalError) as caught:
            call()
        assert caught.value.code == code
    runner.spill(0, [0])
    with pytest.raises(InternalError) as caught:
        runner.spill(0, [1])
    assert caught.value.code == "sequence-spilled"
    with pytest.raises(InternalError) as caught:
        runner.restore(0, [(1, 0)])
    assert caught.value.code == "bad-block"
    runner.spill(0, list(range(room)))
    runner.close_sequence(0)
    runner.spill(1, list(range(room)))


def test_without_host_memory_nothing_spills(serve):
    runner = serve(spill_bytes=0)
    assert runner.info.spill_blocks == 0
    with pytest.raises(InternalError) as caught:
        runner.spill(0, [0])
    assert caught.value.code == "spill-full"


@pytest.mark.parametrize("op", ["pinned_alloc", "copy_d2h", "copy_h2d"])
def test_a_copy_that_fails_leaves_the_sequence_nowhere_and_the_room_free(data_dir, op):
    counting = FaultyDevice(HostDevice(checked=True, allow_foreign=True), [])
    load(data_dir, counting).close()
    device = FaultyDevice(
        HostDevice(checked=True, allow_foreign=True), [Fault(op, counting.calls(op) + 1)]
    )
    runner = load(data_dir, device)
    with pytest.raises(DeviceError) as caught:
        runner.spill(0, [0, 1])
        runner.restore(0, [(0, 0), (1, 1)])
    assert caught.value.code == "injected"
    runner.spill(0, [0, 1])
    runner.restore(0, [(0, 0), (1, 1)])
    runner.close()
    assert device.live_labels() == ()


@pytest.mark.parametrize("op", ["copy_d2h", "copy_h2d", "record_event", "wait_event"])
@pytest.mark.parametrize("nth", [1, 2, 3, 17, 18])
def test_what_a_failed_copy_left_on_its_way_reaches_no_other(data_dir, op, nth):
    """The copy stream is as late as it may be: pieces queued before the failure run after the next
    copies were asked for."""
    counting = FaultyDevice(HostDevice(checked=True, allow_foreign=True), [])
    runner = load(data_dir, counting)
    logits(runner, row(0, 0, LONG, BLOCKS))
    logits(runner, row(1, 0, LONG[::-1], ELSEWHERE))
    expected = logits(runner, row(1, 360, [5], ELSEWHERE))
    done = counting.calls(op)
    runner.close()
    device = FaultyDevice(HostDevice(checked=True, allow_foreign=True), [Fault(op, done + nth)])
    runner = load(data_dir, device)
    logits(runner, row(0, 0, LONG, BLOCKS))
    logits(runner, row(1, 0, LONG[::-1], ELSEWHERE))
    assert torch.equal(logits(runner, row(1, 360, [5], ELSEWHERE)), expected)
    with suppress(DeviceError):
        runner.spill(0, BLOCKS)
        runner.restore(0, list(enumerate(BLOCKS)))
    runner.close_sequence(0)
    with suppress(DeviceError):
        runner.spill(1, ELSEWHERE)
        runner.restore(1, list(enumerate(BLOCKS)))
        assert torch.equal(logits(runner, row(1, 360, [5], BLOCKS)), expected)
    runner.close()
    assert device.live_labels() == ()


def test_snapshots_bring_a_state_back_for_any_sequence(serve):
    runner = serve("qwen35", snapshots=2)
    assert runner.info.snapshots == 2
    logits(runner, row(0, 0, LONG[:32], BLOCKS, save=1))
    expected = logits(runner, row(0, 32, LONG[32:40], BLOCKS))
    # Another sequence behind the same blocks, from the copy.
    shared = (*BLOCKS[:2], *ELSEWHERE[2:])
    found = logits(runner, row(1, 32, LONG[32:40], shared, load=1))
    assert torch.equal(found, expected)
    with pytest.raises(InternalError) as caught:
        runner.step([row(2, 32, LONG[32:40], ELSEWHERE, load=0)])
    assert caught.value.code == "state-position"
    with pytest.raises(InternalError) as caught:
        runner.step([row(2, 0, LONG[:8], ELSEWHERE, save=2)])
    assert caught.value.code == "bad-snapshot"


def test_a_spilled_sampler_goes_on(serve):
    runner = serve("qwen35")
    answers = []
    for spilled in (False, True):
        runner.open_sequence(0, LONG[:20], SamplingParams(temperature=1.0, seed=5))
        fed = LONG[:20]
        for turn in range(5):
            start = 0 if turn == 0 else len(fed) - 1
            if spilled and turn == 3:
                runner.spill(0, BLOCKS[:2])
                runner.restore(0, [(0, 0), (1, 1)])
            (output,) = runner.step([row(0, start, fed[start:], BLOCKS)])
            fed = [*fed, output.token]
        runner.close_sequence(0)
        answers.append(fed)
    assert answers[0] == answers[1]
