"""How the rows of a step attend: the contract of every way, and the way that is always there.

What it owns: nothing. Invariants: what `Attention.decode` returns makes no shape from a value and
reads nothing on the host, so a decode step can be captured; what a way must know on the host it
takes in `Attention.plan`, ahead of every decode step and outside of captures. A row's result
depends on nothing but the cells it may see: the others may hold NaN.

KV memory, one layer: keys and values ``[cells, kv_heads, head_dim]``, contiguous, which is also
``[blocks, 16, kv_heads, head_dim]``, the layout paged kernels take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from ..device import Device, Stream
from ..kernels.rope import BLOCK_TOKENS
from ..tensors import TensorSpace
from .config import ModelConfig
from .torch_ops import Attend, attend_cells, attend_chunk, cells_of
from .torch_rows import HostRows, MixedRows

AttentionName = Literal["auto", "torch", "torch-varlen", "flashinfer"]
"""What the option takes; all but "auto" are ways."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a way is made for.

    Attributes:
        rows: most rows of a step, padding included.
        blocks: most KV blocks of a row.
    """

    device: Device
    space: TensorSpace
    stream: Stream
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    rows: int
    blocks: int

    @classmethod
    def of(
        cls,
        device: Device,
        space: TensorSpace,
        stream: Stream,
        config: ModelConfig,
        dtype: torch.dtype,
        rows: int,
    ) -> AttentionSpec:
        """What a model's way is made for."""
        blocks = -(-config.context // BLOCK_TOKENS)
        shape = (config.heads, config.kv_heads, config.head_dim)
        return cls(device, space, stream, *shape, dtype, rows, blocks)

    @property
    def scale(self) -> float:
        """Of the scores."""
        return float(self.head_dim**-0.5)

    @property
    def width(self) -> int:
        """Of a token's output."""
        return self.heads * self.head_dim


class Attention(Protocol):
    """One way to attend. Used by the device thread, inside `TensorSpace.computing`."""

    @property
    def name(self) -> str:
        """What options and `RunnerInfo` call it."""
        ...

    @property
    def spans(self) -> bool:
        """True if a decode step's shape follows from the width of its block tables."""
        ...

    def plan(self, host: HostRows) -> None:
        """Do the host's part of a decode step; the next `decode` of as many rows is about it."""
        ...

    def decode(self, tables: torch.Tensor, lens: torch.Tensor, zero: int) -> Attend:
        """Attention of one token a row.

        Args:
            tables: int32 ``[rows, blocks]``, at an address that stays while graphs do.
            lens: int32 ``[rows]``, keys each row sees, 1 or more; likewise.
            zero: a cell of zeros.
        """
        ...

    def mixed(self, rows: MixedRows, zero: int) -> Attend:
        """Causal attention of the rows of any other step.

        Args:
            zero: a cell of zeros.
        """
        ...

    def close(self) -> None:
        """Let go of what it holds, once. Destroy the graphs first."""
        ...


class TorchAttention:
    """Cells gathered and torch's scaled_dot_product_attention: runs wherever torch does.

    What a row may not see is read from a cell of zeros in its place.
    """

    name = "torch"
    spans = True

    def __init__(self, spec: AttentionSpec) -> None:
        self._scale, self._width = spec.scale, spec.width

    def plan(self, host: HostRows) -> None:
        """Nothing."""

    def decode(self, tables: torch.Tensor, lens: torch.Tensor, zero: int) -> Attend:
        """See `Attention.decode`."""
        scale = self._scale
        cells = cells_of(tables)
        visible = torch.arange(cells.shape[1], device=cells.device) < lens[:, None]
        cells = torch.where(visible, cells, zero)
        mask = visible[:, None, None]

        def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            return attend_cells(q, keys, values, cells, mask, scale)

        return attend

    def mixed(self, rows: MixedRows, zero: int) -> Attend:
        """See `Attention.mixed`: rows of one token together, chunks one by one."""
        kinds, scale, width = rows.kinds, self._scale, self._width
        chunks = []
        for chunk in kinds.chunks:
            seen = chunk.start + chunk.end - chunk.begin
            tables = rows.tables[chunk.row : chunk.row + 1, : -(-seen // BLOCK_TOKENS)]
            chunks.append((chunk, cells_of(tables)[0, :seen]))
        together: Attend | None = None
        if kinds.singles:
            tables = rows.tables[:, : kinds.blocks].index_select(0, rows.chosen)
            lens = rows.lens.index_select(0, rows.chosen)
            together = self.decode(tables, lens, zero)

        def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            out = q.new_empty((q.shape[0], width))
            if together is not None:
                where = rows.where
                out.index_copy_(0, where, together(q.index_select(0, where), keys, values))
            for chunk, cells in chunks:
                begin, end = chunk.begin, chunk.end
                mine = attend_chunk(q[begin:end], keys, values, cells, chunk.start, scale)
                out[begin:end] = mine
            return out

        return attend

    def close(self) -> None:
        """Nothing is held."""


def paged(cache: torch.Tensor) -> torch.Tensor:
    """One layer's keys or values as ``[blocks, 16, kv_heads, head_dim]``."""
    return cache.view(-1, BLOCK_TOKENS, *cache.shape[1:])
