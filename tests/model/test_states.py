"""Recurrent states: where a row may go on, who holds a place, and what a failed step leaves."""

from __future__ import annotations

import pytest
import torch

from rota.errors import DeviceError, InternalError
from rota.gpu.decorators import Fault, FaultyDevice
from rota.gpu.host import HostDevice
from rota.gpu.kernels.host import HostKernels
from rota.gpu.model.runner import Runner
from rota.gpu.model.sampling import SamplingParams

PROMPT = [44, 54, 99, 14, 50, 102, 37]


@pytest.fixture
def bench(open_bench):
    made = open_bench("qwen35")
    for seq in range(100):
        made.runner.close_sequence(seq)
    return made


def refused(bench, code, *rows):
    with pytest.raises(InternalError) as caught:
        bench.step(*rows)
    assert caught.value.code == code
    return caught.value


def test_info_names_what_is_recurrent(bench, open_bench):
    info = bench.runner.info
    assert info.recurrent and (info.family, info.dtype) == ("qwen3_5", "float32")
    # 4 linear layers of 8 sequences: 3 inputs of 160 channels, and 4 heads of 16 x 24.
    assert info.state_bytes == 4 * 8 * 4 * (3 * 160 + 4 * 16 * 24)
    # Only one of five layers attends.
    assert info.kv_bytes == 24 * 16 * 2 * 2 * 32 * 4
    plain = open_bench("llama").runner.info
    assert not plain.recurrent and plain.state_bytes == 0


def test_a_row_goes_on_where_its_state_is_or_starts_again(bench):
    whole = bench.step((0, -1, 0, PROMPT))
    ahead = bench.step((0, -1, 7, [3]))
    found = refused(bench, "state-position", (0, -1, 7, [3]))
    assert (found.expected, found.found) == ("0 or 8", "7")
    refused(bench, "state-position", (1, -1, 4, [3]))  # never began
    # Both refusals touched nothing: not the row's state, not its neighbour's in the same step.
    refused(bench, "state-position", (0, -1, 8, [5]), (2, -1, 9, [5]))
    assert torch.equal(bench.step((0, -1, 0, PROMPT)), whole)
    assert torch.equal(bench.step((0, -1, 7, [3])), ahead)


def test_places_are_bounded_and_given_back(bench):
    expected = bench.step((0, -1, 0, PROMPT))
    for seq in range(1, 8):
        bench.step((seq, -1, 0, [seq]))
    # A ninth sequence has blocks, and no place for its state.
    ninth = bench.rows([(0, -1, 0, PROMPT)])[0]
    ninth = type(ninth)(99, -1, 0, ninth.tokens, ninth.blocks, True)
    with pytest.raises(InternalError) as caught:
        bench.runner.step([ninth])
    assert caught.value.code == "no-state-place"
    bench.runner.drop_state(5)
    bench.runner.drop_state(5)  # idempotent
    bench.seen.clear()
    bench.runner.step([ninth])
    assert torch.equal(bench.seen[0], expected)  # nothing of the previous holder is left
    refused(bench, "state-position", (5, -1, 1, [3]))


def test_a_preempted_sequence_keeps_its_sampler(bench):
    sampling = SamplingParams(temperature=1.0, seed=5)
    answers = []
    for preempted in (False, True):
        bench.runner.open_sequence(0, PROMPT, sampling)
        fed = list(PROMPT)
        for turn in range(6):
            start = 0 if turn == 0 else len(fed) - 1
            if preempted and turn == 3:
                bench.runner.drop_state(0)
                bench.step((1, -1, 0, [9] * 5))  # another one uses the place meanwhile
                start = 0
            rows = bench.rows([(0, -1, start, fed[start:])])
            fed.append(bench.runner.step(rows)[0].token)
        bench.runner.close_sequence(0)
        answers.append(fed)
    assert answers[0] == answers[1]


def test_a_failed_step_leaves_its_sequences_to_start_again(bench, monkeypatch):
    whole = bench.step((0, -1, 0, PROMPT))
    bench.step((1, -1, 0, PROMPT))

    def fail(*_, **__):
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(HostKernels, "delta_net", fail)
        with pytest.raises(DeviceError) as caught:
            bench.step((0, -1, 7, [3]))
        assert caught.value.code == "step-failed"
    refused(bench, "state-position", (0, -1, 7, [3]))
    assert torch.equal(bench.step((0, -1, 0, PROMPT)), whole)
    bench.step((1, -1, 7, [3]))  # not in the failed step


def load(data_dir, device, **more):
    folder = data_dir / "oracle" / "qwen35" / "base"
    options = {"max_loras": 1, "max_lora_rank": 8, "num_blocks": 2, "max_sequences": 4} | more
    return Runner.load(folder, device, use_numba=False, **options)


def test_states_that_do_not_fit_are_refused(data_dir):
    device = HostDevice(checked=True, memory_limit=1 << 22)
    with pytest.raises(DeviceError) as caught:
        load(data_dir, device, max_sequences=512)
    assert caught.value.code == "states-too-large"
    assert "bytes" in str(caught.value.subject)
    device.close()  # raises on a leak


@pytest.mark.parametrize("nth", range(1, 7))  # pool, tables, row slots, two state arrays, KV
def test_an_allocation_that_fails_leaves_nothing(data_dir, nth):
    device = FaultyDevice(HostDevice(checked=True), [Fault("alloc", nth)])
    with pytest.raises(DeviceError) as caught:
        load(data_dir, device)
    assert caught.value.code == "injected"
    assert device.live_labels() == ()
    device.close()
