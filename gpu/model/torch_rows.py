"""A step's rows by how they are computed: single tokens together, chunks one by one.

What it owns: nothing. Invariant: every token of a step is a single or lies in one chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ..kernels.rope import BLOCK_TOKENS
from .rows import RowLike
from .torch_gdn import StateStep


@dataclass(frozen=True, slots=True)
class HostRows:
    """What the host knows of a step's rows, padding included; good until the next step is sent.

    Attributes:
        tables: int32 ``[rows, blocks]``; behind a row's own blocks lie ids of any others.
        lens: int32 ``[rows]``, keys the row's last token sees.
    """

    tables: npt.NDArray[np.int32]
    lens: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ChunkRow:
    """Row ``row`` feeds tokens ``begin..end - 1`` of the step at positions ``start`` and on."""

    row: int
    begin: int
    end: int
    start: int


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step that is not one decode batch.

    Attributes:
        lengths: tokens of each row.
        singles: (row, token) of every row with one token.
        chunks: the others.
        blocks: KV blocks that hold what the single tokens see.
    """

    lengths: list[int]
    singles: list[tuple[int, int]]
    chunks: list[ChunkRow]
    blocks: int

    @classmethod
    def of(cls, rows: Sequence[RowLike]) -> StepRows:
        """Sort the rows of a step."""
        lengths, singles, chunks = [len(row.tokens) for row in rows], [], []
        at = blocks = 0
        for index, (row, count) in enumerate(zip(rows, lengths, strict=True)):
            if count == 1:
                singles.append((index, at))
                blocks = max(blocks, row.start // BLOCK_TOKENS + 1)
            else:
                chunks.append(ChunkRow(index, at, at + count, row.start))
            at += count
        return cls(lengths, singles, chunks, blocks)


class MixedRows:
    """The rows of a step that is not one decode batch, on the host and on the device.

    Attributes:
        kinds: the rows, sorted.
        tables: int32 ``[rows, blocks]`` on the device. lens: int32 ``[rows]``.
        host: the same on the host.
    """

    def __init__(
        self, kinds: StepRows, tables: torch.Tensor, lens: torch.Tensor, host: HostRows
    ) -> None:
        self.kinds, self.tables, self.lens, self.host = kinds, tables, lens, host
        self._chosen: torch.Tensor | None = None
        self._where: torch.Tensor | None = None

    @property
    def chosen(self) -> torch.Tensor:
        """int64, the rows of single tokens; there is one."""
        if self._chosen is None:
            chosen = torch.tensor([row for row, _ in self.kinds.singles])
            self._chosen = chosen.to(self.tables.device)
        return self._chosen

    @property
    def where(self) -> torch.Tensor:
        """int64, their tokens."""
        if self._where is None:
            where = torch.tensor([token for _, token in self.kinds.singles])
            self._where = where.to(self.tables.device)
        return self._where

    def states(self, held: Sequence[int], places: torch.Tensor) -> StateStep:
        """Which states move on.

        Args:
            held: the place of each row's state. places: the same on the device.
        """
        chunks = tuple((c.begin, c.end, held[c.row]) for c in self.kinds.chunks)
        if not self.kinds.singles:
            return StateStep(None, None, chunks)
        return StateStep(places.index_select(0, self.chosen), self.where, chunks)
