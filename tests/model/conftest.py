"""Runners over the tiny checkpoints, on a checked device: leaks fail at close."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from rota.gpu.decorators import TracingDevice
from rota.gpu.host import HostDevice
from rota.gpu.lora.annex import ANNEX_ALIGN
from rota.gpu.lora.image import SlotImage
from rota.gpu.lora.source import DirectorySource
from rota.gpu.lora.stage import stage
from rota.gpu.model.options import RunnerOptions
from rota.gpu.model.runner import RowInput, Runner
from rota.gpu.model.sampling import SamplingParams
from rota.gpu.model.torch_runner import TorchRunner

Row = tuple[int, int, int, Sequence[int]]
"""seq, slot, start, tokens"""
BLOCKS_EACH = 3


class Bench:
    """A runner with the logits of its last step, and fixed blocks per sequence."""

    def __init__(self, runner: Any, folder: Path) -> None:
        self.runner, self.folder = runner, folder
        self.seen: list[torch.Tensor] = []
        runner.logits_sink = lambda seqs, logits: self.seen.append(logits.clone())

    def image(self, case: str) -> SlotImage:
        source = DirectorySource(self.folder / "adapters" / case)
        return stage(source, self.runner.layout, base_rows=self.runner.base_rows).image

    def commit(self, slot: int, image: SlotImage) -> None:
        """Commit, with a part of the arena that is always this slot's."""
        info = self.runner.info
        part = info.arena_bytes // info.max_loras // ANNEX_ALIGN * ANNEX_ALIGN
        self.runner.commit(slot, image, slot * part if image.annex_bytes else None)

    def rows(self, rows: Sequence[Row], sample: bool = True) -> list[RowInput]:
        return [
            RowInput(
                seq,
                slot,
                start,
                tuple(tokens),
                tuple(range(seq * BLOCKS_EACH, (seq + 1) * BLOCKS_EACH)),
                sample,
            )
            for seq, slot, start, tokens in rows
        ]

    def step(self, *rows: Row, sample: bool = True) -> torch.Tensor | None:
        """The logits ``[rows, vocab]`` of one step, or ``None`` when no row samples."""
        self.seen.clear()
        self.runner.step(self.rows(rows, sample))
        return self.seen[0] if self.seen else None

    def greedy(self, rows: Sequence[tuple[int, Sequence[int]]], count: int) -> list[list[int]]:
        """``count`` greedy tokens of every (slot, prompt), all in one batch."""
        for seq, (_, prompt) in enumerate(rows):
            self.runner.open_sequence(seq, prompt, SamplingParams())
        fed = [list(prompt) for _, prompt in rows]
        done = [0] * len(rows)
        answers: list[list[int]] = [[] for _ in rows]
        for _ in range(count):
            outputs = self.runner.step(
                self.rows(
                    [(s, slot, done[s], fed[s][done[s] :]) for s, (slot, _) in enumerate(rows)]
                )
            )
            for seq, output in enumerate(outputs):
                assert output.error is None
                done[seq] = len(fed[seq])
                fed[seq].append(output.token)
                answers[seq].append(output.token)
        for seq in range(len(rows)):
            self.runner.close_sequence(seq)
        return answers


Opener = Callable[..., Bench]


@pytest.fixture(scope="module")
def open_bench(data_dir: Path) -> Iterator[Opener]:
    """``open_bench(family, dtype, **more)``: one runner per distinct call, closed at the end.

    ``math="torch"`` opens a `TorchRunner`: the code an accelerator runs, with torch on the CPU.
    """
    made: dict[Any, Bench] = {}

    def make(family: str, dtype: str = "float32", **more: Any) -> Bench:
        key = (family, dtype, *sorted(more.items()))
        kind: Any = TorchRunner if more.pop("math", "host") == "torch" else Runner
        if key not in made:
            options: dict[str, Any] = {
                "max_loras": 4,
                "max_lora_rank": 16,
                "num_blocks": 24,
                "overlay_rows": 128,
                "max_embedding_rank": 16,
            }
            options["expert_adapters"] = family == "qwen35_moe"
            how: dict[str, Any] = {}
            if kind is Runner:
                how["use_numba"] = more.pop("use_numba", True)
            folder = data_dir / "oracle" / family
            runner = kind.load(
                folder / "base",
                HostDevice(checked=True, allow_foreign=kind is TorchRunner),
                RunnerOptions(
                    dtype=dtype, max_step_tokens=128, max_sequences=8, **(options | more)
                ),
                **how,
            )
            made[key] = Bench(runner, folder)
        return made[key]

    yield make
    for bench in made.values():
        bench.runner.close()  # raises on a leak


@pytest.fixture(scope="session")
def reference(data_dir: Path) -> Callable[[str], dict[str, Any]]:
    """``reference(family)``: ref.json, with the tensors of ref.safetensors under "tensors"."""

    def read(family: str) -> dict[str, Any]:
        folder = data_dir / "oracle" / family
        found: dict[str, Any] = json.loads((folder / "ref.json").read_text())
        with safe_open(str(folder / "ref.safetensors"), "pt") as file:
            found["tensors"] = {name: file.get_tensor(name) for name in file.keys()}
        return found

    return read


@pytest.fixture(params=["host", "driver"])
def machine(request: pytest.FixtureRequest) -> str:
    """What `traced` runs on: the host in place of an accelerator, or the test driver."""
    return str(request.param)


@pytest.fixture
def traced(
    machine: str, request: pytest.FixtureRequest, data_dir: Path
) -> Iterator[Callable[..., Any]]:
    """``traced(family, wrap, **options)``: a `TorchRunner` on a checked device, inside ``wrap``,
    with ``.trace``, the device's calls, and ``.driver``; leaves nothing behind."""
    opened: list[tuple[Any, Any]] = []
    cuda = request.getfixturevalue("cuda_machine") if machine == "driver" else None
    if cuda is not None and cuda.fake is None:
        pytest.skip("runs torch on the test driver")
    driver = None if cuda is None else cuda.fake.reset()

    def load(family: str, wrap: Callable[[Any], Any] | None = None, **options: Any) -> Any:
        inner: Any = HostDevice(checked=True, allow_foreign=True)
        space = None
        if cuda is not None:
            from rota.gpu.fakecuda.torch_queue import QueueSpace

            inner = cuda.open(checked=True)
            space = QueueSpace(inner, driver)
        trace: list[str] = []
        device = TracingDevice(inner if wrap is None else wrap(inner), trace.append)
        folder = data_dir / "oracle" / family / "base"
        runner: Any = TorchRunner.load(folder, device, RunnerOptions(**options), space=space)
        opened.append((runner, space))
        runner.trace, runner.driver = trace, driver
        return runner

    yield load
    for runner, space in opened:
        runner.close()
        if space is not None:
            space.close()
    if driver is not None:
        assert driver.live() == {}, driver.story
