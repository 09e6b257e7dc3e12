"""A step's rows by how they are computed: single tokens together, chunks one by one.

What it owns: nothing. Invariants: every token of a step is a single or lies in one chunk;
`attend_singles` makes no shape from a value, so a decode step can be captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..kernels.rope import BLOCK_TOKENS
from .batch import RowLike
from .torch_batch import DeviceBatch
from .torch_gdn import StateStep
from .torch_ops import Attend, attend_cells, attend_chunk, cells_of


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


def attend_singles(tables: torch.Tensor, lens: torch.Tensor, zero: int, scale: float) -> Attend:
    """Attention of one token a row.

    Args:
        tables: int32 ``[rows, blocks]``, the blocks attention covers.
        lens: int32 ``[rows]``, keys each row sees.
        zero: a cell of zeros, read in place of those a row may not see.
        scale: of the scores.
    """
    cells = cells_of(tables)
    visible = torch.arange(cells.shape[1], device=cells.device) < lens[:, None]
    cells = torch.where(visible, cells, zero)
    mask = visible[:, None, None]

    def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return attend_cells(q, keys, values, cells, mask, scale)

    return attend


class MixedRows:
    """How the layers of one mixed step attend and move states on.

    Args:
        arrays: sent.
        zero: see `attend_singles`. width: of attention's output.
    """

    def __init__(
        self, arrays: DeviceBatch, rows: StepRows, *, zero: int, scale: float, width: int
    ) -> None:
        self._arrays, self._rows = arrays, rows
        self._zero, self._scale, self._width = zero, scale, width
        where = arrays.tables.device
        self._chosen = torch.tensor([row for row, _ in rows.singles]).to(where)
        self._where = torch.tensor([token for _, token in rows.singles]).to(where)

    def attend(self) -> Attend:
        """Rows of one token together, chunks one by one."""
        arrays, rows, scale, width = self._arrays, self._rows, self._scale, self._width
        chunks = []
        for chunk in rows.chunks:
            seen = chunk.start + chunk.end - chunk.begin
            tables = arrays.tables[chunk.row : chunk.row + 1, : -(-seen // BLOCK_TOKENS)]
            chunks.append((chunk, cells_of(tables)[0, :seen]))
        together: Attend | None = None
        where = self._where
        if rows.singles:
            tables = arrays.tables[:, : rows.blocks].index_select(0, self._chosen)
            lens = arrays.lens.index_select(0, self._chosen)
            together = attend_singles(tables, lens, self._zero, scale)

        def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            out = q.new_empty((q.shape[0], width))
            if together is not None:
                out.index_copy_(0, where, together(q.index_select(0, where), keys, values))
            for chunk, cells in chunks:
                begin, end = chunk.begin, chunk.end
                mine = attend_chunk(q[begin:end], keys, values, cells, chunk.start, scale)
                out[begin:end] = mine
            return out

        return attend

    def states(self, held: Sequence[int]) -> StateStep:
        """Which states move on.

        Args:
            held: the place of each row's state.
        """
        chunks = tuple((c.begin, c.end, held[c.row]) for c in self._rows.chunks)
        if not self._rows.singles:
            return StateStep(None, None, chunks)
        places = self._arrays.places.index_select(0, self._chosen)
        return StateStep(places, self._where, chunks)
