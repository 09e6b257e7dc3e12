"""Whole models on the test driver and on the host, side by side: the same steps, near answers.

What it owns: nothing; runners are closed by who opened them. Both sides are fed what the host
chooses, so a step is compared that had the same tokens.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import torch

from rota.gpu.host import HostDevice
from rota.gpu.lora.source import DirectorySource
from rota.gpu.lora.stage import stage
from rota.gpu.model.options import RunnerOptions
from rota.gpu.model.rows import RowInput
from rota.gpu.model.runner import Runner
from rota.gpu.model.sampling import SamplingParams
from rota.gpu.model.torch_runner import TorchRunner

ZOO = Path(__file__).resolve().parents[1] / "zoo"
OPTIONS = {
    "max_loras": 3,
    "max_lora_rank": 16,
    "num_blocks": 16,
    "max_step_tokens": 32,
    "max_sequences": 4,
}
TOKENS = {"max_embedding_rank": 4, "overlay_rows": 8}
"""Room for the adapters of the zoo that change token matrices."""
PROMPTS = ([44, 54, 99], [14, 50], [102, 37, 66, 50], [6, 5, 38])
MIXES = ((0, -1, 1, 0), (-1, 1, 1, 2), (0, 1, 2, -1), (-1, -1, -1, -1))
"""The third: as many adapters as there are slots, and a base row."""


class Served:
    """A runner on one device, its adapters, and the logits of the last step."""

    def __init__(self, runner, folder, device, space=None):
        self.runner, self.folder, self.logits = runner, folder, None
        self.device, self.space = device, space
        runner.logits_sink = self.keep
        for seq in range(4):
            runner.open_sequence(seq, PROMPTS[seq], SamplingParams())

    def keep(self, seqs, logits):
        self.logits = logits.float().clone()

    def commit(self, slot, case, part=None):
        """``case``: a name of the oracle's, or a folder. Its annex goes to part ``part`` of the
        arena, default the slot's own."""
        source = DirectorySource(self.folder / "adapters" / case)
        image = stage(source, self.runner.layout, base_rows=self.runner.base_rows).image
        info = self.runner.info
        size = info.arena_bytes // info.max_loras // 256 * 256
        extent = size * (slot if part is None else part)
        self.runner.commit(slot, image, extent if image.annex_bytes else None)

    def step(self, slots, start, tokens):
        rows = [
            RowInput(seq, slot, start[seq], tuple(tokens[seq]), (seq * 3, seq * 3 + 1), True)
            for seq, slot in enumerate(slots)
        ]
        outputs = self.runner.step(rows)
        assert [output.error for output in outputs] == [None] * len(slots)
        return [output.token for output in outputs]


class Both:
    """The same model ``here``, on the test driver, and ``there``, on the host."""

    def __init__(self, here, there):
        self.here, self.there = here, there

    def commit(self, slot, case, part=None):
        for served in (self.here, self.there):
            served.commit(slot, case, part)

    def step(self, slots, start, tokens, about=None):
        """One step of each, whose logits are close. ``about`` says which it was."""
        for served in (self.here, self.there):
            served.step(slots, start, tokens)
        near = torch.allclose(self.here.logits, self.there.logits, rtol=1e-4, atol=1e-4)
        assert near, about

    def continue_prompts(self, mixes, bound):
        """A step for each of ``mixes``, the slots of its rows: the prompts, then what the host
        chose. Logits differ by less than ``bound`` of the largest."""
        fed = [list(prompt) for prompt in PROMPTS[: len(mixes[0])]]
        start = [0] * len(fed)
        for step, mix in enumerate(mixes):
            tokens = [row[at:] for row, at in zip(fed, start, strict=True)]
            self.here.step(mix, start, tokens)
            chosen = self.there.step(mix, start, tokens)
            error = (self.here.logits - self.there.logits).abs().max()
            assert float(error / self.there.logits.abs().max()) < bound, (mix, step)
            start = [len(row) for row in fed]
            for row, token in zip(fed, chosen, strict=True):
                row.append(token)


def _about(data_dir, family, more):
    """Folder and options of a family's model."""
    more = {"expert_adapters": family == "qwen35_moe"} | more
    return data_dir / "oracle" / family, OPTIONS | more


@contextmanager
def models_on_driver(cuda_machine, driver, data_dir):
    """``open(dtype)``: a `Served` on the test driver; leaves nothing behind."""
    from rota.gpu.fakecuda.torch_queue import QueueSpace

    opened = []

    def make(dtype, family="llama", graphs=True, **more):
        device = cuda_machine.open(checked=True)
        space = QueueSpace(device, driver)
        folder, options = _about(data_dir, family, more)
        runner = TorchRunner.load(
            folder / "base",
            device,
            RunnerOptions(dtype=dtype, **options),
            space=space,
            graphs=graphs,
        )
        opened.append((runner, space))
        return Served(runner, folder, device, space)

    yield make
    for runner, space in opened:
        runner.close()
        space.close()
    assert driver.live() == {}, driver.story


@contextmanager
def models_on_host(data_dir):
    """The same on the host."""
    opened = []

    def make(dtype, family="llama", **more):
        folder, options = _about(data_dir, family, more)
        device = HostDevice()
        runner = Runner.load(folder / "base", device, RunnerOptions(dtype=dtype, **options))
        opened.append(runner)
        return Served(runner, folder, device)

    yield make
    for runner in opened:
        runner.close()
