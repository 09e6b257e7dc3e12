"""Choosing tokens on the device: argmax for plain rows, draws for sampled ones.

What it owns: what draws need, on the device and pinned, one block for each of two steps in flight;
the ids lie in `DeviceBatch.chosen`. Invariants: the choice is the one `gpu.model.sampling` makes,
with its draws and its order of filters, up to rounding of sums; every id is one of the vocabulary,
also where logits are unusable (`DeviceBatch.peaks` says so), since the next step may be fed it
before anyone has looked; `DeviceSampler.greedy` can be captured; rows that ask for more (penalties,
log-probabilities, a ban of end ids) are chosen on the host from their logits, a few at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from ...errors import DeviceError
from ..device import Device, Stream
from ..kernels.memory import view_at
from ..tensors import TensorSpace
from .sampling import Choice, Sampler, bad_logits
from .torch_batch import TWINS, DeviceBatch

HOST_ROWS: Final = 8
"""Rows of logits brought to the host at a time."""


FACTS: Final = 5
"""What a draw needs: temperature, top_k, top_p, min_p, and its point."""


def facts_of(samplers: Sequence[Sampler]) -> npt.NDArray[np.float64]:
    """float64 ``[5, m]`` for `draw`; takes one draw of each sampler. A filter that is off lets
    everything pass."""
    return np.array(
        [
            (
                s.params.temperature,
                s.params.top_k or math.inf,
                s.params.top_p if s.params.top_p < 1 else math.inf,
                s.params.min_p,
                s.point(),
            )
            for s in samplers
        ],
        np.float64,
    ).T


def draw(logits: torch.Tensor, facts: torch.Tensor, *, filtered: bool) -> torch.Tensor:
    """A token for each row: float ``[m, vocab]`` to int64 ``[m]``, on its device; any id of the
    vocabulary where a row has a NaN.

    Formulas and order as in `gpu.model.sampling.candidates`, in float64. Nothing waits.

    Args:
        facts: ``[5, m]``, of `facts_of`.
        filtered: some row has a filter.
    """
    temperature, top_k, top_p, min_p, points = (row[:, None] for row in facts.unbind(0))
    scaled = logits.double() / temperature
    scaled = scaled - scaled.amax(1, keepdim=True)
    ids: torch.Tensor | None = None
    if filtered:
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
    found = torch.searchsorted(mass, points * mass[:, -1:], right=True)
    if ids is None:
        return found[:, 0].clamp(max=weights.shape[1] - 1)
    last = (weights > 0).sum(1, keepdim=True) - 1
    return ids.gather(1, torch.minimum(found, last).clamp(min=0))[:, 0]


def filtered(sampler: Sampler) -> bool:
    """True if only some ids may be drawn."""
    p = sampler.params
    return bool(p.top_k or p.top_p < 1 or p.min_p > 0)


def on_device(sampler: Sampler) -> bool:
    """True if the choice needs nothing of the host's: the next step may be fed it at once."""
    return sampler.plain or sampler.drawn


class DeviceSampler:
    """Chooses for the rows of a step.

    Args:
        vocab: width of a row of logits.
        rows: most rows, padding included.
        arrays: where the ids go.

    Raises:
        DeviceError: what the allocations raise.
    """

    def __init__(
        self, device: Device, space: TensorSpace, vocab: int, rows: int, arrays: DeviceBatch
    ) -> None:
        self._device, self._space, self._arrays = device, space, arrays
        self._vocab = vocab
        self._memory: list[int] = []
        self._pinned: list[int] = []
        # Facts of every row, and the rows of logits they are for.
        self._nbytes = 8 * (FACTS + 1) * rows
        try:
            self._draws, *self._twins = self._blocks(self._nbytes, "draws", TWINS)
            self._wide = self._blocks(4 * HOST_ROWS * vocab, "logits for the host", 1)
        except DeviceError:
            self.close()
            raise
        facts, where = (FACTS, rows), 8 * FACTS * rows
        self._facts = space.view(self._draws, facts, torch.float64)
        self._where = space.view(self._draws + where, (rows,), torch.int64)
        self._host = [
            (
                view_at(twin, facts, torch.float64).numpy(),
                view_at(twin + where, (rows,), torch.int64).numpy(),
            )
            for twin in self._twins
        ]
        for facts_twin, where_twin in self._host:
            facts_twin[...] = where_twin[...] = 0
        self._wide_view = space.view(self._wide[0], (HOST_ROWS, vocab), torch.float32)

    def _blocks(self, nbytes: int, label: str, twins: int) -> list[int]:
        self._memory.append(self._device.alloc(nbytes, label=label))
        for _ in range(twins):
            self._pinned.append(self._device.pinned_alloc(nbytes, label=f"{label} (host)"))
        return [self._memory[-1], *self._pinned[-twins:]]

    def greedy(self, logits: torch.Tensor) -> None:
        """Queue the argmax of every row, and its value. ``logits``: ``[m, vocab]``."""
        # The first of equal maxima; a NaN wins and is seen in the value.
        peaks, tokens = logits.max(1)
        count = logits.shape[0]
        self._arrays.chosen[:count].copy_(tokens)
        self._arrays.peaks[:count].copy_(peaks)

    def draw(
        self,
        samplers: Sequence[Sampler],
        rows: Sequence[int],
        logits: torch.Tensor,
        *,
        twin: int,
        stream: Stream,
    ) -> None:
        """Queue the draws of those of ``samplers`` that draw; one draw of each is taken.

        Args:
            rows: the row of ``logits`` of each sampler; `greedy` has seen these logits.
            logits: ``[m, vocab]``.
            twin: the pinned block to use; no step in flight may have it.
        """
        drawing = [(s, row) for s, row in zip(samplers, rows, strict=True) if s.drawn]
        if not drawing:
            return
        kinds = [[one for one in drawing if filtered(one[0]) is kind] for kind in (False, True)]
        facts, where = self._host[twin]
        facts[:, : len(drawing)] = facts_of([s for kind in kinds for s, _ in kind])
        where[: len(drawing)] = [row for kind in kinds for _, row in kind]
        self._device.copy_h2d(self._draws, self._twins[twin], self._nbytes, stream)
        self._space.join(stream)
        begin = 0
        for kind, mine in enumerate(kinds):
            end = begin + len(mine)
            if mine:
                at = self._where[begin:end]
                chosen = draw(
                    logits.index_select(0, at), self._facts[:, begin:end], filtered=bool(kind)
                )
                self._arrays.chosen.index_copy_(0, at, chosen)
            begin = end

    def on_host(
        self,
        samplers: Sequence[Sampler],
        rows: Sequence[int],
        logits: torch.Tensor,
        stream: Stream,
    ) -> list[Choice]:
        """Choices of the rows that the host chooses for; waits."""
        made: list[Choice] = []
        source, target = self._wide
        for start in range(0, len(rows), HOST_ROWS):
            part = rows[start : start + HOST_ROWS]
            where = torch.tensor(part).to(logits.device)
            self._wide_view[: len(part)].copy_(logits.index_select(0, where))
            self._space.join(stream)
            self._device.copy_d2h(target, source, 4 * len(part) * self._vocab, stream)
            self._device.synchronize(stream)
            values = view_at(target, (len(part), self._vocab), torch.float32).numpy()
            mine = samplers[start : start + HOST_ROWS]
            made += [sampler.choose(raw) for sampler, raw in zip(mine, values, strict=True)]
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


def choice_of(sampler: Sampler, token: int, peak: float) -> Choice:
    """The device's choice for a sampler, ``peak`` the row's greatest logit."""
    if not math.isfinite(peak):
        return Choice(-1, error=bad_logits(peak))
    sampler.accept(token)
    return Choice(token)
