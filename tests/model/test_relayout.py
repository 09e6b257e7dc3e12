"""A pool exchanged under a runner: equal answers before and after, the old pool kept on failure."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from rota.errors import DeviceError, InternalError
from rota.gpu.decorators import Fault, FaultyDevice
from rota.gpu.host import HostDevice
from rota.gpu.lora.source import DirectorySource
from rota.gpu.lora.stage import stage
from rota.gpu.model.options import RunnerOptions
from rota.gpu.model.rows import RowInput
from rota.gpu.model.runner import Runner
from rota.gpu.model.sampling import SamplingParams
from rota.gpu.model.torch_runner import TorchRunner
from rota.sched.core.effects import Resident

PROMPT = (44, 54, 99, 14, 50, 102)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_loras": 2,
    "max_lora_rank": 8,
    "num_blocks": 8,
    "max_step_tokens": 32,
    "max_sequences": 4,
}


def load(kind: Any, data_dir: Any, device: Any) -> Any:
    return kind.load(data_dir / "oracle" / "llama" / "base", device, RunnerOptions(**OPTIONS))


def fill(runner: Any, data_dir: Any, case: str, slot: int) -> None:
    source = DirectorySource(str(data_dir / "oracle" / "llama" / "adapters" / case))
    runner.commit(slot, stage(source, runner.layout, base_rows=runner.base_rows).image)


def tokens(runner: Any, slot: int, count: int = 6) -> list[int]:
    runner.open_sequence(1, PROMPT, SamplingParams(temperature=0.0))
    made: list[int] = []
    feed, start = PROMPT, 0
    for _ in range(count):
        (out,) = runner.step([RowInput(1, slot, start, feed, (3,), True)])
        start += len(feed)
        feed = (out.token,)
        made.append(out.token)
    runner.close_sequence(1)
    return made


@pytest.mark.parametrize("kind", [Runner, TorchRunner])
def test_answers_are_the_same_after_another_pool(kind: Any, data_dir: Any) -> None:
    device = HostDevice(checked=True, allow_foreign=True)
    runner = load(kind, data_dir, device)
    held = Counter(device.live_labels())
    fill(runner, data_dir, "attn_mlp_r8", 1)
    base, before = tokens(runner, -1), tokens(runner, 1)
    assert base != before
    runner.relayout(5, 16)
    assert Counter(device.live_labels()) == held, "the old pool is gone"
    assert (runner.info.max_loras, runner.info.max_lora_rank) == (5, 16)
    with pytest.raises(InternalError) as empty:
        tokens(runner, 1)
    assert empty.value.code == "empty-slot"
    runner.close_sequence(1)
    fill(runner, data_dir, "attn_mlp_r8", 4)
    fill(runner, data_dir, "rslora_r16_bf16", 0)
    assert tokens(runner, 4) == before and tokens(runner, -1) == base
    runner.relayout(1, 8)
    fill(runner, data_dir, "attn_mlp_r8", 0)
    assert tokens(runner, 0) == before
    runner.close()
    assert device.live_labels() == ()


POINTS = [("alloc", 1), ("copy_h2d", 2), ("synchronize", 1), ("synchronize", 2)]


@pytest.mark.parametrize(
    ("kind", "op", "nth"),
    [(kind, *point) for kind in (Runner, TorchRunner) for point in POINTS]
    + [(TorchRunner, "memset", 1)],  # the host's pool serves from images and clears nothing
)
def test_a_failing_device_keeps_the_old_pool(kind: Any, op: Any, nth: int, data_dir: Any) -> None:
    inner = HostDevice(checked=True, allow_foreign=True)
    counting = FaultyDevice(inner, [])
    runner = load(kind, data_dir, counting)
    fill(runner, data_dir, "attn_mlp_r8", 1)
    before = tokens(runner, 1)
    done = counting.calls(op)
    runner.close()
    device = FaultyDevice(HostDevice(checked=True, allow_foreign=True), [Fault(op, done + nth)])
    runner = load(kind, data_dir, device)
    fill(runner, data_dir, "attn_mlp_r8", 1)
    assert tokens(runner, 1) == before
    held = Counter(device.live_labels())
    with pytest.raises(DeviceError) as failed:
        runner.relayout(4, 16)
    assert failed.value.code == "injected"
    assert Counter(device.live_labels()) == held and runner.info.max_loras == 2
    assert tokens(runner, 1) == before
    runner.close()
    assert device.live_labels() == ()


FREED = [(Runner, 3), (TorchRunner, 4)]
"""What an exchange gives back: the pool, its tables and its row->slot buffer; planes of groups."""


@pytest.mark.parametrize(
    ("kind", "nth"), [(kind, nth + 1) for kind, count in FREED for nth in range(count)]
)
def test_the_new_pool_stands_if_the_old_one_is_not_taken_back(
    kind: Any, nth: int, data_dir: Any
) -> None:
    counting = FaultyDevice(HostDevice(checked=True, allow_foreign=True), [])
    runner = load(kind, data_dir, counting)
    fill(runner, data_dir, "attn_mlp_r8", 1)
    before, done = tokens(runner, 1), counting.calls("free")
    held = Counter(counting.live_labels())
    runner.relayout(3, 16)
    assert counting.calls("free") - done == dict(FREED)[kind]
    runner.close()
    fault = Fault("free", done + nth)
    device = FaultyDevice(HostDevice(checked=True, allow_foreign=True), [fault])
    runner = load(kind, data_dir, device)
    fill(runner, data_dir, "attn_mlp_r8", 1)
    assert tokens(runner, 1) == before
    runner.relayout(3, 16)
    assert device.fired and (Counter(device.live_labels()) - held).total() == 1
    assert (runner.info.max_loras, runner.info.max_lora_rank) == (3, 16)
    fill(runner, data_dir, "attn_mlp_r8", 2)
    assert tokens(runner, 2) == before
    runner.close()
    assert device.live_labels() == ()


@pytest.mark.parametrize("kind", [Runner, TorchRunner])
def test_too_large_a_pool_is_refused_by_name(kind: Any, data_dir: Any) -> None:
    device = HostDevice(checked=True, allow_foreign=True)
    runner = load(kind, data_dir, device)
    with pytest.raises(DeviceError) as refused:
        runner.relayout(4096, 1024)
    assert refused.value.code in ("pool-too-large", "bad-argument", "rank-too-large")
    assert tokens(runner, -1)
    runner.close()


@pytest.mark.parametrize("kind", [Runner, TorchRunner])
def test_low_rank_token_matrices_have_their_room_in_the_new_pool_too(
    kind: Any, data_dir: Any
) -> None:
    folder = data_dir / "oracle" / "qwen35"
    options = OPTIONS | {"max_lora_rank": 4, "max_embedding_rank": 8}
    device = HostDevice(checked=True, allow_foreign=kind is TorchRunner)
    runner = kind.load(folder / "base", device, RunnerOptions(**options))

    def place(slot: int) -> int:
        source = DirectorySource(str(folder / "adapters" / "embed_head_lora"))
        image = stage(source, runner.layout, base_rows=runner.base_rows).image
        runner.commit(slot, image, slot * runner.layout.max_annex_bytes)
        return image.annex_bytes

    held = place(1)
    base, before = tokens(runner, -1), tokens(runner, 1)
    assert base != before
    strides = [pair.stride for pair in runner.layout.pairs[-2:]]
    who = [Resident(1, "a", True)]
    assert runner.relayout(3, 32, who) == (runner.layout.max_annex_bytes * 3, (held,))
    place(2)
    assert tokens(runner, 2) == before and tokens(runner, -1) == base
    assert strides == [pair.stride for pair in runner.layout.pairs[-2:]] == [8, 8]
    runner.close()
