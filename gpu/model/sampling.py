"""Choosing the next token of each row.

What it owns: the sampler state of one sequence (`Sampler`): which tokens were seen, how many were
produced, and the counter of its draws. Invariants: a row's choice depends on its own logits, state
and seed alone; a row whose logits are unusable fails alone; draws are counted, so a sequence
recomputed after preemption continues with the draw it would have made.

Order, as in transformers' generation: repetition penalty, frequency and presence penalties, ban of
end ids, temperature, top-k, top-p, min-p. Log-probabilities are of the raw logits.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from ...errors import InternalError, RequestError, RotaError
from .params import SamplingParams

__all__ = ["Choice", "RowSampler", "Sampler", "SamplingParams"]

Floats = npt.NDArray[np.float32]
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST_LOOK = 1024
_CHUNK_ROWS = 8
"""Rows widened to fp32 at a time: few enough to stay in a cache."""


class Choice(msgspec.Struct, frozen=True):
    """``token``, or ``error`` and -1; with logprobs asked for, natural logs and the top ids."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    error: RotaError | None = None


def uniform(seed: int, index: int) -> float:
    """Draw ``index`` of stream ``seed``: a float in [0, 1) of 53 bits.

    SplitMix64's output function (Steele, Lea, Flood 2014), applied to the seed and again to the
    counter, so that neighbouring seeds share no draws.
    """
    return (_mix(_mix(seed) + (index + 1) * _GOLDEN) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def candidates(
    logits: Floats, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The ids that may be drawn, likeliest first (ties: lowest id first), and their probabilities.

    ``logits`` is float32 ``[vocab]`` without NaN, ``temperature`` > 0. Each filter sees the
    renormalised result of the one before; at least one id stays.
    """
    scaled = logits.astype(np.float64) / temperature
    scaled -= scaled.max()
    total = None
    if 0 < top_k < len(scaled):
        ids = _largest(scaled, top_k)[:top_k]
    elif top_p < 1:
        # The mass wanted nearly always lies in a few ids; sorting the whole vocabulary is slow.
        total = float(np.exp(scaled).sum())
        ids = _largest(scaled, min(_FIRST_LOOK, len(scaled)))
        if float(np.exp(scaled[ids]).sum()) < top_p * total:
            ids = np.argsort(-scaled, kind="stable")
    elif min_p > 0:
        ids = _sorted(scaled, np.flatnonzero(np.exp(scaled) >= min_p))
    else:
        ids = np.arange(len(scaled))
    weights = np.exp(scaled[ids])
    if top_p < 1:
        mass = np.cumsum(weights)
        wanted = top_p * (float(mass[-1]) if total is None else total)
        # Keep an id when what is likelier holds less than top_p of the mass.
        keep = 1 + int(np.searchsorted(mass[:-1], wanted, side="left"))
        ids, weights = ids[:keep], weights[:keep]
    if min_p > 0:
        kept = weights >= min_p * weights[0]
        ids, weights = ids[kept], weights[kept]
    return ids, weights / weights.sum()


def _largest(scores: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.int64]:
    """Ids of at least the ``count`` largest scores (more where the last is tied), in order."""
    bound = np.partition(scores, -count)[-count]
    return _sorted(scores, np.flatnonzero(scores >= bound))


def _sorted(scores: npt.NDArray[np.float64], ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """``ids`` (ascending) by falling score; ties keep the lowest id first."""
    return ids[np.argsort(-scores[ids], kind="stable")]


class Sampler:
    """One sequence's sampler.

    Args:
        prompt: ids of the prompt, each in ``0..vocab-1``.
        params: what was asked for.
        vocab: width of a row of logits.
        eos_ids: the model's own end ids.

    Raises:
        RequestError: bad-token for a prompt id, bad-stop-token-ids for a stop id outside the
            vocabulary.
    """

    def __init__(
        self, prompt: Sequence[int], params: SamplingParams, vocab: int, eos_ids: Sequence[int] = ()
    ) -> None:
        for code, ids in (("bad-token", prompt), ("bad-stop-token-ids", params.stop_token_ids)):
            if len(ids) and not 0 <= min(ids) <= max(ids) < vocab:
                raise RequestError(
                    "a token id outside the vocabulary",
                    code=code,
                    expected=f"0..{vocab - 1}",
                    found=next(i for i in ids if not 0 <= i < vocab),
                )
        self.params = params
        self.plain = params.plain_greedy
        self._produced = 0
        self._draws = 0
        self._seen: npt.NDArray[np.bool_] | None = None
        self._counts: npt.NDArray[np.int32] | None = None
        self._banned: list[int] = []
        if params.min_tokens:
            own = () if params.ignore_eos else eos_ids
            self._banned = sorted({*own, *params.stop_token_ids})
        if params.repetition_penalty != 1:
            self._seen = np.zeros(vocab, np.bool_)
            self._seen[list(prompt)] = True
        if params.presence_penalty or params.frequency_penalty:
            self._counts = np.zeros(vocab, np.int32)
        seed = params.seed
        if seed is None and params.temperature > 0:
            seed = int.from_bytes(os.urandom(8), "little")
        self._seed = seed or 0

    @property
    def drawn(self) -> bool:
        """True when the choice is a draw from the raw logits and nothing else is asked for."""
        only = self._seen is None and self._counts is None and not self._banned
        return only and self.params.temperature > 0 and self.params.logprobs is None

    def point(self) -> float:
        """The next draw, in [0, 1); it is counted."""
        self._draws += 1
        return uniform(self._seed, self._draws - 1)

    def choose(self, raw: Floats) -> Choice:
        """Choose from raw logits, float32 ``[vocab]`` (not changed), and remember the choice."""
        peak = float(raw.max())  # NaN if any is
        if not math.isfinite(peak):
            return Choice(-1, error=bad_logits(peak))
        token = self._token(raw)
        if token < 0:
            return Choice(-1, error=bad_logits("no token left to choose"))
        self.accept(token)
        if self.params.logprobs is None:
            return Choice(token)
        return self._with_logprobs(token, raw, self.params.logprobs)

    def accept(self, token: int) -> None:
        """Count ``token`` as produced."""
        self._produced += 1
        if self._seen is not None:
            self._seen[token] = True
        if self._counts is not None:
            self._counts[token] += 1

    def _token(self, raw: Floats) -> int:
        params, scores = self.params, raw
        if self._seen is not None or self._counts is not None or self._banned:
            scores = self._penalised(raw.copy())
        best = int(scores.argmax())
        if not math.isfinite(float(scores[best])):
            return -1
        if params.temperature == 0:
            return best
        ids, probabilities = candidates(
            scores,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
        )
        mass = np.cumsum(probabilities)
        point = self.point() * mass[-1]
        return int(ids[min(int(np.searchsorted(mass, point, side="right")), len(ids) - 1)])

    def _penalised(self, scores: Floats) -> Floats:
        params = self.params
        if self._seen is not None:
            ids = np.flatnonzero(self._seen)
            held, penalty = scores[ids], np.float32(params.repetition_penalty)
            scores[ids] = np.where(held < 0, held * penalty, held / penalty)
        if self._counts is not None:
            ids = np.flatnonzero(self._counts)
            times = self._counts[ids].astype(np.float32)
            scores[ids] -= np.float32(params.frequency_penalty) * times
            scores[ids] -= np.float32(params.presence_penalty)
        if self._banned and self._produced < params.min_tokens:
            scores[self._banned] = -np.inf
        return scores

    @staticmethod
    def _with_logprobs(token: int, raw: Floats, count: int) -> Choice:
        wide = raw.astype(np.float64)
        wide -= wide.max()
        wide -= math.log(float(np.exp(wide).sum()))
        top: tuple[tuple[int, float], ...] = ()
        count = min(count, len(wide))
        if count:
            ids = _largest(wide, count)[:count]
            top = tuple((int(i), float(wide[i])) for i in ids)
        return Choice(token, float(wide[token]), top)


class RowSampler:
    """Chooses for many rows, through one small fp32 buffer.

    Args:
        vocab: width of a row of logits.
    """

    def __init__(self, vocab: int) -> None:
        self._wide = torch.zeros((_CHUNK_ROWS, vocab))

    def __call__(self, samplers: Sequence[Sampler], logits: torch.Tensor) -> list[Choice]:
        """One choice per row of ``logits`` ``[rows, vocab]`` (any float dtype), in row order.

        Raises:
            InternalError: when there is not one sampler for each row.
        """
        if len(samplers) != logits.shape[0]:
            raise InternalError(
                "not one sampler for each row", expected=logits.shape[0], found=len(samplers)
            )
        choices: list[Choice] = []
        for start in range(0, len(samplers), _CHUNK_ROWS):
            part = samplers[start : start + _CHUNK_ROWS]
            wide = self._wide[: len(part)]
            wide.copy_(logits[start : start + len(part)])
            choices += _choose_each(part, wide.numpy())
        return choices


def _choose_each(samplers: Sequence[Sampler], rows: npt.NDArray[np.float32]) -> list[Choice]:
    if not all(sampler.plain for sampler in samplers):
        return [sampler.choose(row) for sampler, row in zip(samplers, rows, strict=True)]
    # numpy returns the first of equal maxima, and the place of a NaN if there is one. A plain
    # sampler has no state to bring up to date.
    tokens = rows.argmax(axis=1)
    peaks = rows[np.arange(len(rows)), tokens]
    return [
        Choice(token) if math.isfinite(peak) else Choice(-1, error=bad_logits(peak))
        for token, peak in zip(tokens.tolist(), peaks.tolist(), strict=True)
    ]


def bad_logits(found: object) -> RotaError:
    """The refusal of a row whose logits hold no finite maximum (its adapter may overflow)."""
    return RequestError(
        "the logits of this row cannot be sampled from",
        code="bad-logits",
        expected="a finite maximum",
        found=found,
    )
