"""Recurrent states: where a row may go on, who holds a place, and what a failed step leaves."""

from __future__ import annotations

import msgspec
import pytest
import torch

from rota.errors import DeviceError, InternalError
from rota.gpu.decorators import Fault, FaultyDevice
from rota.gpu.host import HostDevice
from rota.gpu.kernels.host import HostKernels
from rota.gpu.model.options import RunnerOptions
from rota.gpu.model.runner import RowInput, Runner
from rota.gpu.model.sampling import SamplingParams
from rota.gpu.model.torch_gdn import TorchDeltaNet
from rota.gpu.model.torch_runner import TorchRunner

PROMPT = [44, 54, 99, 14, 50, 102, 37]


@pytest.fixture(params=["host", "torch"])
def bench(request, open_bench):
    made = open_bench("qwen35", math=request.param)
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
    # An accelerator's padding rows have a place and a block to write.
    waste = 1 if isinstance(bench.runner, TorchRunner) else 0
    # 4 linear layers of 8 sequences: 3 inputs of 160 channels, and 4 heads of 16 x 24.
    assert info.state_bytes == 4 * (8 + waste) * 4 * (3 * 160 + 4 * 16 * 24)
    # Only one of five layers attends.
    assert info.kv_bytes == (24 + waste) * 16 * 2 * 2 * 32 * 4
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
        patch.setattr(TorchDeltaNet, "__call__", fail)
        with pytest.raises(DeviceError) as caught:
            bench.step((0, -1, 7, [3]))
        assert caught.value.code == "step-failed"
    refused(bench, "state-position", (0, -1, 7, [3]))
    assert torch.equal(bench.step((0, -1, 0, PROMPT)), whole)
    bench.step((1, -1, 7, [3]))  # not in the failed step


def keeping(open_bench, snapshots=2):
    """A bench over a runner that keeps snapshots and spills."""
    bench = open_bench("qwen35", snapshots=snapshots, spill_bytes=1 << 20)
    for seq in range(100):
        bench.runner.close_sequence(seq)
    return bench


def copying(bench, seq, start, tokens, load=-1, save=-1):
    """One row that loads or saves a snapshot; the logits of its last token."""
    (row,) = bench.rows([(seq, -1, start, tokens)])
    bench.seen.clear()
    bench.runner.step([msgspec.structs.replace(row, load=load, save=save)])
    return bench.seen[0]


LONG = [(5 * i) % 90 + 1 for i in range(40)]


def test_a_snapshot_is_the_state_behind_the_row_that_saved_it(open_bench):
    bench = keeping(open_bench)
    bench.step((0, -1, 0, LONG[:32]))
    whole = bench.step((0, -1, 32, LONG[32:]))
    ahead = bench.step((0, -1, 40, [3]))
    bench.runner.drop_state(0)
    copying(bench, 0, 0, LONG[:32], save=1)
    assert torch.equal(copying(bench, 0, 32, LONG[32:]), whole)
    # Another sequence that begins alike, in another place; the snapshot stays as it was.
    for seq in (0, 0):
        bench.runner.drop_state(seq)
        bench.step((7, -1, 0, [8] * 20))
        assert torch.equal(copying(bench, seq, 32, LONG[32:], load=1), whole)
        assert torch.equal(bench.step((seq, -1, 40, [3])), ahead)


def test_snapshots_are_refused_by_name(open_bench):
    bench = keeping(open_bench, snapshots=3)
    copying(bench, 0, 0, LONG[:32], save=0)

    def told(code, *rows):
        made = bench.rows([row[:4] for row in rows])
        made = [
            msgspec.structs.replace(row, load=load, save=save)
            for row, (*_, load, save) in zip(made, rows, strict=True)
        ]
        with pytest.raises(InternalError) as caught:
            bench.runner.step(made)
        assert caught.value.code == code
        return caught.value

    bench.runner.drop_state(0)
    found = told("state-position", (0, -1, 16, LONG[16:32], 0, -1))
    assert (found.expected, found.found) == ("32", "16")
    told("state-position", (0, -1, 32, LONG[32:], 1, -1))  # never written
    told("state-position", (0, -1, 32, LONG[32:], 3, -1))
    told("bad-snapshot", (0, -1, 0, LONG, -1, 3))
    told("bad-snapshot", (0, -1, 0, LONG[:16], -1, 1), (1, -1, 0, LONG[:16], -1, 1))
    told("bad-snapshot", (0, -1, 32, LONG[32:], 0, -1), (1, -1, 0, LONG[:16], -1, 0))
    # Nothing was touched.
    copying(bench, 0, 32, LONG[32:], load=0)


def test_what_a_failed_step_was_to_save_is_not_there(open_bench, monkeypatch):
    bench = keeping(open_bench)
    copying(bench, 0, 0, LONG[:32], save=0)

    def fail(*_, **__):
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(HostKernels, "delta_net", fail)
        with pytest.raises(DeviceError):
            copying(bench, 1, 0, LONG[:32], save=0)
    bench.runner.drop_state(0)
    with pytest.raises(InternalError, match="state-position"):
        copying(bench, 0, 32, LONG[32:], load=0)


def test_a_state_goes_to_the_host_and_comes_back_to_the_last_bit(open_bench):
    bench = keeping(open_bench)
    runner = bench.runner
    assert runner.info.state_blocks == 4 and runner.info.snapshots == 2
    bench.step((0, -1, 0, LONG))
    ahead = bench.step((0, -1, 40, [3]))
    (row,) = bench.rows([(0, -1, 0, LONG)])
    bench.step((0, -1, 0, LONG))
    with pytest.raises(InternalError, match="state-position"):
        runner.spill(0, row.blocks[:2])  # the state has seen more than these hold
    refused(bench, "state-position", (0, -1, 40, [3]))  # and is given up all the same
    bench.step((0, -1, 0, LONG))
    runner.spill(0, row.blocks[:3])
    refused(bench, "state-position", (0, -1, 40, [3]))
    bench.step((7, -1, 0, [8] * 20))  # in its old place
    runner.restore(0, tuple(enumerate(row.blocks[:3])))
    assert torch.equal(bench.step((0, -1, 40, [3])), ahead)
    refused(bench, "state-position", (0, -1, 40, [3]))
    with pytest.raises(InternalError, match="state-position"):
        runner.spill(5, row.blocks[:1])  # never ran
    # What is left behind on the host goes with its sequence.
    bench.step((0, -1, 0, LONG))
    runner.spill(0, row.blocks[:3])
    runner.close_sequence(0)
    with pytest.raises(InternalError, match="sequence-not-spilled"):
        runner.restore(0, ())


def test_host_memory_is_bounded_in_bytes_states_included(data_dir):
    block, state = 8192, 32256  # one attention layer; four delta nets of 480 and 1536 floats
    device = HostDevice(checked=True)
    runner = load(
        data_dir, device, dtype="float32", num_blocks=8, spill_bytes=6 * block + 1, snapshots=99
    )
    try:
        info = runner.info
        assert info.kv_bytes == 8 * block and info.state_bytes == (4 + 99) * state
        assert (info.spill_blocks, info.state_blocks, info.snapshots) == (6, 4, 99)
        prompt = tuple(LONG)
        runner.step([RowInput(0, -1, 0, prompt, (0, 1, 2), False)])
        with pytest.raises(InternalError, match="spill-full"):
            runner.spill(0, (0, 1, 2))
        runner.step([RowInput(0, -1, 0, prompt[:30], (0, 1, 2), False)])
        runner.spill(0, (0, 1))
        runner.step([RowInput(1, -1, 0, prompt[:16], (3,), False)])
        with pytest.raises(InternalError, match="spill-full"):
            runner.spill(1, (3,))
    finally:
        runner.close()


def test_snapshots_take_no_more_than_an_eighth_of_what_is_free(data_dir):
    device = HostDevice(checked=True, memory_limit=1 << 22)
    runner = load(data_dir, device, dtype="float32", snapshots=4096)
    try:
        assert 0 < runner.info.snapshots <= (1 << 19) // 32256
    finally:
        runner.close()


def load(data_dir, device, **more):
    folder = data_dir / "oracle" / "qwen35" / "base"
    options = {"max_loras": 1, "max_lora_rank": 8, "num_blocks": 2, "max_sequences": 4} | more
    return Runner.load(folder, device, RunnerOptions(**options), use_numba=False)


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
