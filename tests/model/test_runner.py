"""The runner's contract: refusals before anything is touched, slots, failing rows, life time."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from rota.errors import DeviceError, InternalError, ModelError, RequestError
from rota.gpu.decorators import Fault, FaultyDevice
from rota.gpu.host import HostDevice
from rota.gpu.kernels.bgmv import LoraGroup
from rota.gpu.lora.image import SlotImage
from rota.gpu.model.options import RunnerOptions
from rota.gpu.model.rows import RowInput
from rota.gpu.model.runner import Runner
from rota.gpu.model.sampling import SamplingParams

PROMPT = [44, 54, 99, 14, 50, 102, 37]
GOOD = RowInput(0, -1, 0, tuple(PROMPT), (0, 1), True)


def but(**fields):
    return msgspec.structs.replace(GOOD, **fields)


@pytest.fixture
def bench(open_bench):
    """The shared runner with every slot and sequence empty."""
    made = open_bench("llama")
    for slot in range(4):
        made.runner.retire(slot)
    for seq in range(8):
        made.runner.close_sequence(seq)
    return made


def poisoned(bench, value):
    """An image whose q_proj delta of layer 0 is ``value`` everywhere."""
    layout, n = bench.runner.layout, len(bench.runner.layout.pairs)
    buffer = np.zeros(layout.slot_bytes, np.uint8)
    for part in layout.pair_views(buffer, 0):
        part[:] = value
    present = tuple(index == 0 for index in range(n))
    scales = np.array([1.0] + [0.0] * (n - 1), np.float32)
    return SlotImage(buffer, present, scales, (16,) + (0,) * (n - 1), "x", layout.fingerprint())


def test_info(bench):
    info = bench.runner.info
    assert (info.family, info.dtype, info.vocab_size) == ("llama", "float32", 128)
    assert (info.num_blocks, info.block_size, info.eos_ids) == (24, 16, (2,))
    # 24 blocks hold fewer positions than the 512 of the config.
    assert info.context_length == 384
    assert info.kv_bytes == 24 * 16 * 2 * 2 * 2 * 8 * 4  # tokens, layers, k and v, heads, dim, f32
    layout = bench.runner.layout
    assert info.arena_bytes == 4 * layout.max_annex_bytes > 0
    assert info.pool_bytes == 4 * layout.slot_bytes + info.arena_bytes


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [but(blocks=(24,))],
        [but(blocks=(-1,))],
        [but(blocks=())],
        [but(start=10, blocks=(0,))],
        [but(start=26)],
        [but(start=-1)],
        [but(tokens=())],
        [but(start=380, blocks=tuple(range(24)))],
        [but(tokens=(128,))],
        [but(tokens=(3, -1))],
        [GOOD, but(blocks=(2,))],
        [GOOD, but(seq=1)],
        [but(tokens=(1,) * 129, blocks=tuple(range(9)))],
        [but(seq=i, blocks=(i,)) for i in range(9)],
        [but(slot=4)],
        [but(slot=-2)],
        [but(slot=0)],
    ],
)
def test_a_bad_row_is_refused_before_anything_is_written(bench, rows):
    bench.step((0, -1, 0, PROMPT))
    expected = bench.step((0, -1, 7, [1]))
    bench.step((0, -1, 0, PROMPT))
    with pytest.raises(InternalError) as caught:
        bench.runner.step(rows)
    assert caught.value.code in ("bad-row", "empty-slot")
    assert torch.equal(bench.step((0, -1, 7, [1])), expected)


def test_a_slot_must_hold_an_adapter(bench):
    def refused(slot):
        with pytest.raises(InternalError) as caught:
            bench.step((0, slot, 0, PROMPT))
        assert caught.value.code == "empty-slot"

    refused(0)  # never committed
    bench.commit(0, bench.image("attn_mlp_r8"))
    first = bench.step((0, 0, 0, PROMPT))
    refused(1)
    bench.runner.retire(0)
    refused(0)
    bench.runner.retire(0)  # idempotent
    bench.commit(0, bench.image("rslora_r16_bf16"))
    assert not torch.equal(bench.step((0, 0, 0, PROMPT)), first)
    bench.commit(0, bench.image("attn_mlp_r8"))  # nothing of the previous one stays
    assert torch.equal(bench.step((0, 0, 0, PROMPT)), first)


def test_a_failed_commit_leaves_the_slot_empty_and_the_others_alone(bench):
    image = bench.image("attn_mlp_r8")
    bench.commit(0, image)
    bench.commit(1, image)
    expected = bench.step((0, 1, 0, PROMPT))
    wrong = SlotImage(
        image.buffer, image.present, image.scales, image.ranks, image.digest, "another layout"
    )
    with pytest.raises(DeviceError) as caught:
        bench.commit(0, wrong)
    assert caught.value.code == "layout-mismatch"
    with pytest.raises(InternalError):
        bench.step((0, 0, 0, PROMPT))
    assert torch.equal(bench.step((0, 1, 0, PROMPT)), expected)
    with pytest.raises(DeviceError) as caught:
        bench.commit(4, image)
    assert caught.value.code == "bad-slot"


def test_a_batch_of_base_rows_launches_no_lora_kernel(bench, monkeypatch):
    calls = []
    real = LoraGroup.apply

    def counted(self, *args):
        calls.append(self)
        return real(self, *args)

    monkeypatch.setattr(LoraGroup, "apply", counted)
    bench.commit(0, bench.image("attn_mlp_r8"))
    bench.commit(1, poisoned(bench, 0.5))
    bench.step((0, -1, 0, PROMPT), (1, -1, 0, PROMPT))
    assert calls == []
    bench.step((0, -1, 0, PROMPT), (1, 0, 0, PROMPT))
    assert len(calls) == 2 * 4  # layers, groups
    calls.clear()
    bench.step((0, -1, 0, PROMPT), (1, 1, 0, PROMPT))
    assert len(calls) == 1  # the group of the only pair this adapter has


@pytest.mark.parametrize("value", [np.inf, np.nan, 1e30])
def test_a_row_with_bad_logits_fails_alone(bench, value):
    bench.commit(0, poisoned(bench, value))
    expected = bench.step((0, -1, 0, PROMPT))
    for seq in (0, 1, 2):
        bench.runner.open_sequence(seq, PROMPT, SamplingParams())
    outputs = bench.runner.step(
        bench.rows([(0, -1, 0, PROMPT), (1, 0, 0, PROMPT), (2, -1, 0, PROMPT)])
    )
    assert outputs[1].token == -1 and isinstance(outputs[1].error, RequestError)
    assert outputs[1].error.code == "bad-logits"
    for output in (outputs[0], outputs[2]):
        assert output.error is None and output.token == int(expected[0].argmax())


def test_rows_that_do_not_sample(bench):
    bench.runner.open_sequence(0, PROMPT, SamplingParams())
    chunk = but(sample=False)
    assert [o.token for o in bench.runner.step([chunk])] == [-1]
    bench.seen.clear()
    outputs = bench.runner.step([but(seq=1, blocks=(3,), sample=False), GOOD])
    assert [o.seq for o in outputs] == [1, 0]
    assert outputs[0].token == -1 and outputs[0].error is None and outputs[1].token >= 0
    assert bench.seen[0].shape == (1, 128)


def test_a_sequence_that_was_not_opened_fails_alone(bench):
    bench.runner.open_sequence(0, PROMPT, SamplingParams())
    outputs = bench.runner.step([GOOD, but(seq=1, blocks=(3,))])
    assert outputs[0].error is None and outputs[0].token >= 0
    assert outputs[1].token == -1 and outputs[1].error.code == "sequence-not-open"


def test_sequences_open_once_and_close_any_number_of_times(bench):
    bench.runner.open_sequence(0, PROMPT, SamplingParams())
    with pytest.raises(InternalError) as caught:
        bench.runner.open_sequence(0, PROMPT, SamplingParams())
    assert caught.value.code == "sequence-open"
    bench.runner.close_sequence(0)
    bench.runner.close_sequence(0)
    with pytest.raises(RequestError) as caught:
        bench.runner.open_sequence(0, [128], SamplingParams())
    assert caught.value.code == "bad-token"
    bench.runner.open_sequence(0, PROMPT, SamplingParams())


def test_sampling_state_belongs_to_its_sequence(bench):
    def run(neighbours):
        bench.runner.open_sequence(0, PROMPT, SamplingParams(temperature=1.0, seed=9, logprobs=3))
        for seq in neighbours:
            bench.runner.open_sequence(seq, PROMPT, SamplingParams(temperature=2.0, seed=seq))
        fed, found = list(PROMPT), []
        for _ in range(6):
            rows = [(seq, -1, 0, PROMPT) for seq in neighbours]
            output = bench.runner.step(bench.rows([*rows, (0, -1, 0, fed)]))[-1]
            assert output.logprob is not None and output.logprob < 0 and len(output.top) == 3
            fed.append(output.token)
            found.append((output.token, output.logprob, output.top))
        for seq in (0, *neighbours):
            bench.runner.close_sequence(seq)
        return found

    assert run([]) == run([1, 2, 3])


def test_any_error_inside_a_step_has_a_code(bench, monkeypatch):
    def fail(*args):
        raise RuntimeError("broken library")

    bench.commit(0, bench.image("attn_mlp_r8"))
    monkeypatch.setattr(LoraGroup, "apply", fail)
    with pytest.raises(DeviceError) as caught:
        bench.step((0, 0, 0, PROMPT))
    assert caught.value.code == "step-failed" and "broken library" in str(caught.value)


def load(data_dir, device, **options):
    folder = data_dir / "oracle" / "llama" / "base"
    return Runner.load(
        folder, device, RunnerOptions(**({"num_blocks": 4, "max_loras": 2} | options))
    )


def test_close_gives_everything_back_once(data_dir):
    device = HostDevice(checked=True)
    runner = load(data_dir, device)
    assert {"kv cache", "lora pool"} <= set(device.live_labels())
    runner.close()
    assert device.live_labels() == ()
    runner.close()
    for call in (
        lambda: runner.step([GOOD]),
        lambda: runner.retire(0),
        lambda: runner.open_sequence(0, PROMPT, SamplingParams()),
    ):
        with pytest.raises(DeviceError) as caught:
            call()
        assert caught.value.code == "runner-closed"
    runner.close_sequence(0)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"num_blocks": None, "kv_bytes": 10}, "kv-too-small"),
        ({"num_blocks": 0}, "kv-too-small"),
        ({"num_blocks": 1 << 20}, "out-of-memory"),
        ({"max_loras": 4096, "max_lora_rank": 1024}, "pool-too-large"),
        ({"max_loras": -1}, "bad-argument"),
        ({"max_step_tokens": 0}, "bad-argument"),
        ({"max_sequences": True}, "bad-argument"),
        ({"dtype": "int4"}, "unknown-dtype"),
        ({"max_lora_rank": 0}, "bad-layout"),
        ({"overlay_rows": 129}, "bad-layout"),
    ],
)
def test_a_load_that_fails_leaves_nothing_on_the_device(data_dir, options, code):
    device = HostDevice(checked=True, memory_limit=64 << 20)
    with pytest.raises((DeviceError, ModelError)) as caught:
        load(data_dir, device, **options)
    assert caught.value.code == code
    assert device.live_labels() == ()
    device.close()


def test_a_fault_in_any_device_call_of_a_load_leaves_nothing(data_dir):
    counting = FaultyDevice(HostDevice(checked=True), [])
    runner = load(data_dir, counting)
    ops = ("create_stream", "alloc", "memset", "copy_h2d", "synchronize")
    calls = {op: counting.calls(op) for op in ops}
    runner.close()
    tried = 0
    for op, count in calls.items():
        for nth in range(1, count + 1):
            device = FaultyDevice(HostDevice(checked=True), [Fault(op, nth)])
            with pytest.raises(DeviceError) as caught:
                load(data_dir, device)
            assert caught.value.code == "injected"
            assert device.live_labels() == ()
            device.close()
            tried += 1
    assert tried >= 10


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_close_goes_on_when_one_thing_cannot_be_given_back(data_dir, nth):
    inner = HostDevice()
    runner = load(data_dir, FaultyDevice(inner, [Fault("free", nth)]))
    with pytest.raises(DeviceError):
        runner.close()
    assert inner.live_labels() == ()
    runner.close()


def test_lora_off(data_dir):
    runner = load(data_dir, HostDevice(checked=True), max_loras=0)
    try:
        for call in (lambda: runner.commit(0, None), lambda: runner.retire(0)):
            with pytest.raises(DeviceError) as caught:
                call()
            assert caught.value.code == "lora-off"
        with pytest.raises(InternalError) as caught:
            runner.step([but(slot=0)])
        assert caught.value.code == "empty-slot"
        assert runner.info.pool_bytes == 0
    finally:
        runner.close()


def test_kv_memory_is_sized_from_bytes_or_from_what_is_free(data_dir):
    for options, blocks in (
        ({"kv_bytes": 10 * 4096 + 4095}, 10),  # a block of this model: 4096 bytes in float32
        # The 2 sequences' 512 positions each, which is less than half of what is free.
        ({"kv_bytes": None, "max_sequences": 2}, 64),
    ):
        runner = load(
            data_dir, HostDevice(checked=True), dtype="float32", num_blocks=None, **options
        )
        found = runner.info.num_blocks
        runner.close()
        assert found == blocks


def test_base_rows_for_staging_are_read_only(bench):
    embed, head = bench.runner.base_rows.embed(), bench.runner.base_rows.head()
    assert embed.shape == head.shape == (128, 48) and embed.dtype == np.float32
    with pytest.raises(ValueError):
        embed[0, 0] = 1.0
