"""Stale weights and first uses, by symptom, on the runner: a slot is what it last was given."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rota.gpu.host import HostDevice
from rota.gpu.kernels.compiled import Compiled
from rota.gpu.lora.source import DirectorySource
from rota.gpu.lora.stage import stage
from rota.gpu.model.adapters import MAX_PLANS
from rota.gpu.model.llama import MAX_VIEWS
from rota.gpu.model.options import RunnerOptions
from rota.gpu.model.runner import RowInput, Runner

ZOO = Path(__file__).resolve().parents[1] / "zoo"
PROMPT = [44, 54, 99, 14, 50, 102, 37, 66, 5, 38]
DTYPES = ["float32", "bfloat16"]


def image(bench, name):
    source = DirectorySource(ZOO / "llama" / name)
    return stage(source, bench.runner.layout, base_rows=bench.runner.base_rows).image


def fresh(bench, name):
    """Logits of an adapter in a slot nothing else was in since it was emptied."""
    bench.commit(3, image(bench, name))
    logits = bench.step((0, 3, 0, PROMPT))
    bench.runner.retire(3)
    return logits


# "A smaller adapter answers with what a larger one left in its place."


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("wide_rank", "all_linear"),  # lower rank
        ("all_linear", "wide_rank"),  # higher rank, fewer modules
        ("all_linear", "layers"),  # one layer only
        ("dora", "plain"),  # no factors any more
        ("lora_bias", "plain"),  # no offsets any more
        ("tokens", "plain"),  # no token rows any more
        ("plain", "all_linear"),  # more modules than the first
        ("patterns", "rslora"),  # other scales
    ],
)
def test_nothing_of_the_previous_adapter_remains(open_bench, dtype, before, after):
    bench = open_bench("llama", dtype)
    wanted, other = fresh(bench, after), fresh(bench, before)
    assert not torch.equal(wanted, other)
    bench.commit(0, image(bench, before))
    assert torch.equal(bench.step((0, 0, 0, PROMPT)), other)
    bench.commit(0, image(bench, after))
    assert torch.equal(bench.step((0, 0, 0, PROMPT)), wanted)


# "After a few reloads in a loop, an older version answers."


def test_each_of_many_reloads_is_what_answers(open_bench):
    bench = open_bench("llama")
    names = ["plain", "dora", "tokens", "rslora", "lora_bias"]
    wanted = {name: fresh(bench, name) for name in names}
    base = bench.step((0, -1, 0, PROMPT))
    for turn in range(20):
        name = names[turn % len(names)]
        bench.commit(1, image(bench, name))
        found = bench.step((0, 1, 0, PROMPT), (1, -1, 0, PROMPT))
        assert torch.equal(found[0], wanted[name][0]) and torch.equal(found[1], base[0])


# "A full house of adapters and one request without: the wrong one is chosen."


@pytest.mark.parametrize("dtype", DTYPES)
def test_as_many_adapters_as_slots_and_a_base_row(open_bench, dtype):
    bench = open_bench("llama", dtype)
    names = ["plain", "dora", "patterns", "tokens"]
    wanted = [*(fresh(bench, name)[0] for name in names), bench.step((0, -1, 0, PROMPT))[0]]
    for slot, name in enumerate(names):
        bench.commit(slot, image(bench, name))
    found = bench.step(*((seq, slot, 0, PROMPT) for seq, slot in enumerate((0, 1, 2, 3, -1))))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


# "The first request of each new adapter or rank is slow."


@pytest.fixture
def warm(data_dir) -> Iterator[Runner]:
    runner = Runner.load(
        data_dir / "oracle" / "llama" / "base",
        HostDevice(checked=True),
        RunnerOptions(
            dtype="bfloat16",
            max_loras=4,
            max_lora_rank=16,
            overlay_rows=128,
            num_blocks=8,
            max_step_tokens=64,
            max_sequences=8,
        ),
    )
    yield runner
    runner.close()


def row(seq, slot, tokens=PROMPT):
    return RowInput(seq, slot, 0, tuple(tokens), (seq,), False)


def test_no_first_use_compiles_anything(warm, monkeypatch):
    def late(self, arguments):
        raise AssertionError(f"{self.__name__} was compiled in a step")

    monkeypatch.setattr(Compiled, "_load", late)
    for slot, name in enumerate(["plain", "wide_rank", "dora", "tokens"]):
        source = DirectorySource(ZOO / "llama" / name)
        warm.commit(slot, stage(source, warm.layout, base_rows=warm.base_rows).image)
        warm.step([row(0, slot), row(1, -1)])
    warm.step([row(seq, seq % 4) for seq in range(6)])


# "What is kept per batch shape grows for ever; odd batch sizes fail."


def test_what_is_kept_per_step_is_bounded(warm):
    source = DirectorySource(ZOO / "llama" / "plain")
    made = stage(source, warm.layout).image
    for slot in range(4):
        warm.commit(slot, made)
    for turn in range(200):
        count = turn % 7 + 1
        rows = [row(s, (turn >> s) % 5 - 1, PROMPT[: turn % 9 + 1]) for s in range(count)]
        warm.step(rows)
    adapters, model = warm._adapters, warm._model
    assert 0 < len(adapters._plans) <= min(MAX_PLANS, 2**4)
    assert 0 < len(model._views) <= min(MAX_VIEWS, 64)
