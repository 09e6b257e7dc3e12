"""The zoo's folders, and one runner per checkpoint and dtype with room for all it can serve."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rota.gpu.host import HostDevice
from rota.gpu.lora.source import DirectorySource
from rota.gpu.lora.stage import StagedAdapter, stage
from rota.gpu.model.options import RunnerOptions
from rota.gpu.model.runner import RowInput, Runner
from rota.gpu.model.torch_runner import TorchRunner

ZOO = Path(__file__).resolve().parent
SLOTS = 48
HYBRID = ("qwen3_next", "qwen3_next_v4", "qwen35")


class Keeper:
    """A runner over one checkpoint, and PEFT's answers.

    ``math="torch"`` is an accelerator's runner, with the host in the accelerator's place.
    """

    def __init__(self, family: str, dtype: str, math: str, data_dir: Path) -> None:
        self.folder, self.hybrid = ZOO / family, family in HYBRID
        kind: type[Runner] | type[TorchRunner] = TorchRunner if math == "torch" else Runner
        self.runner = kind.load(
            data_dir / "oracle" / family.removesuffix("_v4") / "base",
            HostDevice(checked=True, allow_foreign=math == "torch"),
            RunnerOptions(
                dtype=dtype,
                max_loras=SLOTS,
                max_lora_rank=16,
                overlay_rows=128,
                max_embedding_rank=16,
                expert_adapters=family in HYBRID,
                num_blocks=SLOTS + 1,
                max_step_tokens=512,
                max_sequences=SLOTS + 1,
            ),
        )
        self.prompt = json.loads((self.folder / "zoo.json").read_text())["prompt"]
        self._tag = {"float32": "f32", "bfloat16": "bf16"}[dtype]
        self._answers = load_file(self.folder / "answers.safetensors")
        self._seen: list[torch.Tensor] = []
        self.runner.logits_sink = lambda seqs, logits: self._seen.append(logits.clone())

    def stage(self, name: str, buffer: bytearray | None = None) -> StagedAdapter:
        source = DirectorySource(self.folder / name)
        base_rows = self.runner.base_rows
        return stage(source, self.runner.layout, base_rows=base_rows, buffer=buffer)

    def commit(self, slot: int, name: str) -> None:
        """Stage and commit, with a part of the arena that is always this slot's."""
        image, info = self.stage(name).image, self.runner.info
        part = info.arena_bytes // info.max_loras // 256 * 256
        self.runner.commit(slot, image, slot * part if image.annex_bytes else None)

    def answer(self, name: str, tag: str = "") -> torch.Tensor:
        """PEFT's logits of the last positions, in the runner's dtype or of the other model ("f32",
        "bf16"): float32 ``[n, vocab]``."""
        return self._answers[f"{name}.{tag or self._tag}"].float()

    def logits(self, slots: Sequence[int]) -> torch.Tensor:
        """Logits of the last positions of the prompt, one row a slot: ``[rows, n, vocab]``."""
        last = len(self.answer("base"))
        start = len(self.prompt) - last + 1
        pieces = [(0, self.prompt[:start])]
        pieces += [(at, [self.prompt[at]]) for at in range(start, len(self.prompt))]
        found = []
        for at, tokens in pieces:
            rows = [
                RowInput(seq, slot, at, tuple(tokens), (seq,), True)
                for seq, slot in enumerate(slots)
            ]
            self._seen.clear()
            self.runner.step(rows)
            found.append(self._seen[0].float())
        return torch.stack(found, 1)


@pytest.fixture(scope="package")
def keeper(data_dir: Path) -> Iterator[Callable[..., Keeper]]:
    made: dict[tuple[str, str, str], Keeper] = {}

    def get(family: str, dtype: str, math: str = "host") -> Keeper:
        key = (family, dtype, math)
        if key not in made:
            made[key] = Keeper(*key, data_dir)
        return made[key]

    yield get
    for one in made.values():
        one.runner.close()
