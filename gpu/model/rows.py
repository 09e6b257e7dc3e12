"""What a step is given and gives back: the rows of the runner's contract.

Owns nothing. Light on purpose (no torch): whoever drives a runner, or stands in for one, reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from ...errors import RotaError


class RowInput(msgspec.Struct, frozen=True):
    """Feed ``tokens`` at positions ``start..start+len-1`` of sequence ``seq``.

    Its KV lives in ``blocks`` (16 tokens each, in order of position). ``slot`` -1 is base.
    ``sample`` is False for prefill chunks that are not the last. A row's one token may be ``~i``
    (negative): what row ``i`` of the step before, of the same sequence, sampled. ``load``: the
    snapshot that the sequence's recurrent state is first copied from; ``save``: the one it is
    copied to after the tokens; -1 is none, as always in families without such a state.
    """

    seq: int
    slot: int
    start: int
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    sample: bool
    load: int = -1
    save: int = -1


class RowLike(Protocol):
    """What a step reads of a row; `RowInput`, or any struct with these fields."""

    @property
    def seq(self) -> int: ...
    @property
    def slot(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def blocks(self) -> Sequence[int]: ...
    @property
    def sample(self) -> bool: ...
    @property
    def load(self) -> int: ...
    @property
    def save(self) -> int: ...


class RowOutput(msgspec.Struct, frozen=True):
    """``token`` is -1 when the row did not sample, or when ``error`` says why it could not.

    ``logprob`` and ``top`` (id, natural log-probability) are set when the sequence asked for them.
    """

    seq: int
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    error: RotaError | None = None
