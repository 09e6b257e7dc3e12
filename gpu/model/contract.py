"""What every runner's contract shares: its facts, its limits, the open sequences, named failures.

What it owns: the sampler of every open sequence (`OpenSequences`). Invariants: a sequence that was
not opened fails alone, by name; what a library raises inside a step leaves as a DeviceError with a
code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Final

import torch

from ...errors import DeviceError, InternalError, RotaError
from ..lora.pool import LoraPool
from .batch import StepBatch
from .rows import RowLike, RowOutput
from .sampling import Choice, Sampler, SamplingParams

MAX_OPEN: Final = 1 << 16
"""Sequences with a sampler at once: running ones, and preempted ones that will come back."""

LogitsSink = Callable[[list[int], torch.Tensor], None]
"""Called with the sequence ids that sample and their logits ``[rows, vocab]`` before sampling."""


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """What is served. ``context_length`` in tokens (also bounded by the KV memory); bytes in B.
    ``spill_blocks``: KV blocks of preempted sequences that host memory may hold.

    ``pool_bytes``: of slots and arena; ``arena_bytes``: of the arena alone.

    ``recurrent``: a sequence's past cannot be taken up anywhere but where its state is, at a
    snapshot, or from position 0. ``snapshots``: how many of them the runner keeps (0: it cannot,
    and no prefix is shared); ``state_bytes``: memory of all states and snapshots;
    ``state_blocks``: the room in host memory, in KV blocks, of one spilled state.

    ``attention``: "host", or how an accelerator attends ("torch-varlen", "flashinfer", "torch");
    ``attention_passed``: the ways before it that are not used, each with the reason.
    """

    family: str
    dtype: str
    vocab_size: int
    context_length: int
    eos_ids: tuple[int, ...]
    num_blocks: int
    block_size: int
    model_bytes: int
    kv_bytes: int
    pool_bytes: int
    max_loras: int
    max_lora_rank: int
    spill_blocks: int = 0
    recurrent: bool = False
    state_bytes: int = 0
    snapshots: int = 0
    state_blocks: int = 0
    attention: str = "host"
    attention_passed: tuple[str, ...] = ()
    arena_bytes: int = 0

    def with_pool(self, pool: LoraPool, max_lora_rank: int) -> RunnerInfo:
        """The same with another pool."""
        return replace(
            self,
            pool_bytes=pool.nbytes,
            max_loras=pool.max_loras,
            max_lora_rank=max_lora_rank,
            arena_bytes=pool.arena_bytes,
        )


@contextmanager
def named_failure() -> Iterator[None]:
    """Turn what a library raises into a DeviceError step-failed."""
    try:
        yield
    except RotaError:
        raise
    except Exception as error:  # whatever a step dies of, its requests end by name
        raise DeviceError(
            f"a step failed: {type(error).__name__}: {str(error)[:500]}", code="step-failed"
        ) from error


def step_outputs(
    rows: Sequence[RowLike], choices: Iterable[Choice], batch: StepBatch
) -> list[RowOutput]:
    """The step's answer, in row order; ``batch`` remembers it for rows of the next step.

    Args:
        choices: of the rows that sample, in order.
        batch: filled with these rows.
    """
    outputs = answers(rows, choices, batch.unfed)
    batch.sampled(outputs)
    return outputs


def answers(
    rows: Sequence[RowLike], choices: Iterable[Choice], unfed: Iterable[int]
) -> list[RowOutput]:
    """A step's answer, in row order.

    Args:
        choices: of the rows that sample, in order.
        unfed: rows that were fed a sample nobody made.
    """
    chosen = iter(choices)
    outputs = [
        _output(row.seq, next(chosen)) if row.sample else RowOutput(row.seq, -1) for row in rows
    ]
    for index in unfed:
        outputs[index] = RowOutput(rows[index].seq, -1, error=_not_fed(rows[index].seq))
    return outputs


def nothing_fed(rows: Sequence[RowLike], batch: StepBatch) -> list[RowOutput] | None:
    """The answer of a step that cannot run, since the step that all its rows are fed from has
    failed; ``None`` for any other."""
    if len(batch.unfed) < len(rows):
        return None
    return step_outputs(rows, repeat(Choice(-1)), batch)


def _output(seq: int, choice: Choice) -> RowOutput:
    return RowOutput(seq, choice.token, choice.logprob, choice.top, choice.error)


def _not_fed(seq: int) -> InternalError:
    return InternalError(
        "the row of the step before whose sample this row is fed has none",
        code="row-not-fed",
        subject=f"sequence {seq}",
    )


class OpenSequences:
    """The samplers of the open sequences.

    Args:
        vocab: width of a row of logits.
        eos_ids: the model's own end ids.
    """

    def __init__(self, vocab: int, eos_ids: tuple[int, ...]) -> None:
        self._vocab, self._eos_ids = vocab, eos_ids
        self._samplers: dict[int, Sampler] = {}

    def open(self, seq: int, prompt: Sequence[int], sampling: SamplingParams) -> None:
        """Make the sampler state of ``seq``.

        Raises:
            InternalError: sequence-open, too-many-sequences. RequestError: as `Sampler`.
        """
        if seq in self._samplers:
            raise InternalError(
                "this sequence is open already", code="sequence-open", subject=f"sequence {seq}"
            )
        if len(self._samplers) >= MAX_OPEN:
            raise InternalError(
                "too many open sequences", code="too-many-sequences", expected=MAX_OPEN
            )
        self._samplers[seq] = Sampler(prompt, sampling, self._vocab, self._eos_ids)

    def close(self, seq: int) -> None:
        """Forget ``seq``. Idempotent."""
        self._samplers.pop(seq, None)

    def clear(self) -> None:
        """Forget every sequence."""
        self._samplers.clear()

    def samplers(self, seqs: Sequence[int]) -> list[Sampler | None]:
        """The sampler of each of ``seqs``, ``None`` where that is not open."""
        return [self._samplers.get(seq) for seq in seqs]

    def choose(
        self, seqs: Sequence[int], choose: Callable[[list[int], list[Sampler]], list[Choice]]
    ) -> list[Choice]:
        """A choice for each of ``seqs``; those that are not open fail alone.

        Args:
            seqs: the sequence of each row of logits.
            choose: called with the rows whose sequence is open, and their samplers.
        """
        samplers = self.samplers(seqs)
        rows = [row for row, sampler in enumerate(samplers) if sampler is not None]
        # Opening was refused for the others; these go on.
        chosen = iter(choose(rows, [s for s in samplers if s is not None]))
        return [
            not_open(seq) if sampler is None else next(chosen)
            for seq, sampler in zip(seqs, samplers, strict=True)
        ]


def not_open(seq: int) -> Choice:
    """What a row of a sequence without a sampler is answered."""
    error = InternalError(
        "this sequence was never opened, or is closed",
        code="sequence-not-open",
        subject=f"sequence {seq}",
    )
    return Choice(-1, error=error)
