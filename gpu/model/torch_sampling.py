"""Choosing tokens on the device: argmax for plain rows, draws for sampled ones.

What it owns: the step's results on the device and their pinned twins. Invariants: the choice is the
one `gpu.model.sampling` makes, with its draws and its order of filters, up to rounding of sums;
`DeviceSampler.greedy` can be captured; rows that ask for more (penalties, log-probabilities, a ban
of end ids) are chosen on the host from their logits, a few at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

import torch

from ...errors import DeviceError
from ..device import Device, Stream
from ..kernels.memory import view_at
from ..tensors import TensorSpace
from .sampling import Choice, Sampler, bad_logits

HOST_ROWS: Final = 8
"""Rows of logits brought to the host at a time."""


def draw(logits: torch.Tensor, samplers: Sequence[Sampler]) -> torch.Tensor:
    """A token for each row: float ``[m, vocab]`` without NaN to int64 ``[m]``, on its device.

    Takes one draw of each sampler. Formulas and order as in `gpu.model.sampling.candidates`, in
    float64.
    """
    params = [sampler.params for sampler in samplers]
    facts = torch.tensor(
        [
            (p.temperature, p.top_k or math.inf, p.top_p if p.top_p < 1 else math.inf, p.min_p)
            for p in params
        ],
        dtype=torch.float64,
    )
    points = torch.tensor([sampler.point() for sampler in samplers], dtype=torch.float64)
    facts, points = facts.to(logits.device), points.to(logits.device)
    temperature, top_k, top_p, min_p = (column[:, None] for column in facts.unbind(1))
    scaled = logits.double() / temperature
    scaled = scaled - scaled.amax(1, keepdim=True)
    ids: torch.Tensor | None = None
    if any(p.top_k or p.top_p < 1 or p.min_p > 0 for p in params):
        # Stable: of equal scores the lowest id comes first. A row without filters is drawn in
        # another order than alone, from the same probabilities: so rows are drawn apart.
        scaled, ids = torch.sort(scaled, dim=1, descending=True, stable=True)
        place = torch.arange(scaled.shape[1], device=scaled.device)
        weights = torch.where(place < top_k, scaled.exp(), 0.0)
        mass = weights.cumsum(1)
        before = torch.nn.functional.pad(mass[:, :-1], (1, 0), value=-1.0)
        weights = torch.where(before < top_p * mass[:, -1:], weights, 0.0)
        weights = torch.where(weights >= min_p * weights[:, :1], weights, 0.0)
    else:
        weights = scaled.exp()
    mass = weights.cumsum(1)
    wanted = points[:, None] * mass[:, -1:]
    last = (weights > 0).sum(1, keepdim=True) - 1 if ids is not None else weights.shape[1] - 1
    found = torch.searchsorted(mass, wanted, right=True)
    found = torch.minimum(found, torch.as_tensor(last, device=found.device))
    return (found if ids is None else ids.gather(1, found))[:, 0]


def filtered(sampler: Sampler) -> bool:
    """True if only some ids may be drawn."""
    p = sampler.params
    return bool(p.top_k or p.top_p < 1 or p.min_p > 0)


class DeviceSampler:
    """Chooses for the rows of a step.

    Args:
        vocab: width of a row of logits.
        rows: most rows, padding included.

    Raises:
        DeviceError: what the allocations raise.
    """

    def __init__(self, device: Device, space: TensorSpace, vocab: int, rows: int) -> None:
        self._device, self._space = device, space
        self._vocab, self._rows = vocab, rows
        self._memory: list[int] = []
        self._pinned: list[int] = []
        try:
            self._results = self._pair(12 * rows, "step results")
            self._wide = self._pair(4 * HOST_ROWS * vocab, "logits for the host")
        except DeviceError:
            self.close()
            raise
        at = self._results[0]
        self._tokens = space.view(at, (rows,), torch.int64)
        self._peaks = space.view(at + 8 * rows, (rows,), torch.float32)
        self._wide_view = space.view(self._wide[0], (HOST_ROWS, vocab), torch.float32)

    def _pair(self, nbytes: int, label: str) -> tuple[int, int]:
        self._memory.append(self._device.alloc(nbytes, label=label))
        self._pinned.append(self._device.pinned_alloc(nbytes, label=f"{label} (host)"))
        return self._memory[-1], self._pinned[-1]

    def greedy(self, logits: torch.Tensor) -> None:
        """Queue the argmax of every row, and its value. ``logits``: ``[m, vocab]``."""
        # The first of equal maxima; a NaN wins and is seen in the value.
        peaks, tokens = logits.max(1)
        count = logits.shape[0]
        self._tokens[:count].copy_(tokens)
        self._peaks[:count].copy_(peaks)

    def choose(
        self, samplers: Sequence[Sampler], rows: Sequence[int], logits: torch.Tensor, stream: Stream
    ) -> list[Choice]:
        """A choice for each sampler, once the stream is done.

        Args:
            rows: the row of ``logits`` of each sampler; `greedy` has seen these logits.
            logits: ``[m, vocab]``.
        """
        for kind in (False, True):
            mine = [
                (s, row)
                for s, row in zip(samplers, rows, strict=True)
                if s.drawn and filtered(s) is kind
            ]
            if mine:
                where = torch.tensor([row for _, row in mine]).to(logits.device)
                chosen = draw(logits.index_select(0, where), [s for s, _ in mine])
                self._tokens.index_copy_(0, where, chosen)
        device, (source, target) = self._device, self._results
        self._space.join(stream)
        device.copy_d2h(target, source, 12 * self._rows, stream)
        by_row = self._on_host(
            [(s, row) for s, row in zip(samplers, rows, strict=True) if not (s.plain or s.drawn)],
            logits,
            stream,
        )
        device.synchronize(stream)
        tokens = view_at(target, (self._rows,), torch.int64).tolist()
        peaks = view_at(target + 8 * self._rows, (self._rows,), torch.float32).tolist()
        choices = []
        for sampler, row in zip(samplers, rows, strict=True):
            choice = by_row.get(row)
            if choice is None and not math.isfinite(peaks[row]):
                choice = Choice(-1, error=bad_logits(peaks[row]))
            if choice is None:
                sampler.accept(tokens[row])
                choice = Choice(tokens[row])
            choices.append(choice)
        return choices

    def _on_host(
        self, mine: list[tuple[Sampler, int]], logits: torch.Tensor, stream: Stream
    ) -> dict[int, Choice]:
        made: dict[int, Choice] = {}
        source, target = self._wide
        for start in range(0, len(mine), HOST_ROWS):
            part = mine[start : start + HOST_ROWS]
            where = torch.tensor([row for _, row in part]).to(logits.device)
            self._wide_view[: len(part)].copy_(logits.index_select(0, where))
            self._space.join(stream)
            self._device.copy_d2h(target, source, 4 * len(part) * self._vocab, stream)
            self._device.synchronize(stream)
            values = view_at(target, (len(part), self._vocab), torch.float32).numpy()
            for (sampler, row), raw in zip(part, values, strict=True):
                made[row] = sampler.choose(raw)
        return made

    def close(self) -> None:
        """Free everything, once; one refusal does not keep the rest."""
        with ExitStack() as stack:
            for address in self._memory:
                stack.callback(self._device.free, address)
            for address in self._pinned:
                stack.callback(self._device.pinned_free, address)
            self._memory.clear()
            self._pinned.clear()
