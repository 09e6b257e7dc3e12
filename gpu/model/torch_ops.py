"""The base model's operations as torch, for any torch device: linears, rope, KV writes, attention.

What it owns: nothing (`TorchPacker` hands its matrices to the linears it makes). Invariants: no
operation reads a value on the host or makes a shape from one, so all of them but `attend_rows` can
be captured; rounding points are those of the host kernels (norms, activation: `gpu.kernels.norm`,
`gpu.kernels.act`, whose references serve here too).

KV layout: keys and values ``[(blocks + 1) * 16, kv_heads, head_dim]``, a token's cell at
``block * 16 + offset``; the last block belongs to nobody and takes what padding rows write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ..kernels.norm import rms_norm_reference
from ..kernels.rope import BLOCK_TOKENS
from ..tensors import TensorSpace
from .tensors import Linear


class TorchLinear:
    """y = x W^T + b.

    Attributes:
        weight: ``[n_out, k_in]``.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[m, k_in]`` to ``[m, n_out]``."""
        return torch.nn.functional.linear(x, self.weight, self._bias)


class TorchExperts(tuple[TorchLinear, ...]):
    """The linears of one layer's experts, whose matrices lie in one tensor.

    Attributes:
        weight: ``[experts, n_out, k_in]``.
    """

    weight: torch.Tensor

    @classmethod
    def over(cls, weight: torch.Tensor) -> TorchExperts:
        """A linear over each matrix of ``weight``."""
        made = cls(TorchLinear(matrix, None) for matrix in weight)
        made.weight = weight
        return made


class TorchPacker:
    """Puts matrices where the space's tensors live; see `gpu.model.tensors.Packer`."""

    def __init__(self, space: TensorSpace, dtype: torch.dtype) -> None:
        self._space = space
        self.dtype = dtype

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """Upload, and make the operation."""
        upload = self._space.upload
        return TorchLinear(upload(weight), None if bias is None else upload(bias))

    def experts(self, weights: Iterator[torch.Tensor], count: int) -> TorchExperts:
        """Upload all in one piece."""
        first = next(weights)
        whole = torch.empty((count, *first.shape), dtype=self.dtype)
        whole[0] = first
        for index, weight in enumerate(weights, 1):
            whole[index] = weight
        return TorchExperts.over(self._space.upload(whole))


def head_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, *, one_plus: bool = False
) -> torch.Tensor:
    """RMS norm of every head, or ``x`` itself without a weight. ``x``: ``[n, heads, head_dim]``."""
    if weight is None:
        return x
    out = torch.empty_like(x)
    rms_norm_reference(x, weight, eps, out, one_plus=one_plus)
    return out


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Half-split rotation; every product and the sum is rounded to the element type.

    Args:
        x: ``[n, heads, head_dim]``.
        cos, sin: ``[n, 1, rotary_dim / 2]``, of x's dtype; dimensions behind the rotated ones stay.
    """
    half = cos.shape[-1]
    low, high, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)


def attend_cells(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cells: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of one query a row over the cells of its sequence.

    Args:
        q: ``[rows, heads, head_dim]``.
        keys, values: one layer's cache.
        cells: int64 ``[rows, length]``, cell of each position; of those a row may not see, one
            whose contents are finite (a masked value is still multiplied by zero).
        visible: bool ``[rows, 1, 1, length]``; at least one a row.
        scale: of the scores.

    Returns:
        ``[rows, heads * head_dim]``.
    """
    rows, heads, head_dim = q.shape
    kv_heads = keys.shape[1]
    # The heads of a group are so many queries of their key head.
    queries = q.reshape(rows, kv_heads, heads // kv_heads, head_dim)
    length = cells.shape[1]
    flat = cells.reshape(-1)
    shape = (rows, length, kv_heads, head_dim)
    k = keys.index_select(0, flat).view(shape).transpose(1, 2)
    v = values.index_select(0, flat).view(shape).transpose(1, 2)
    out = torch.nn.functional.scaled_dot_product_attention(
        queries, k, v, attn_mask=visible, scale=scale
    )
    return out.reshape(rows, heads * head_dim)


def attend_chunk(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cells: torch.Tensor,
    start: int,
    scale: float,
) -> torch.Tensor:
    """Causal attention of one sequence's chunk.

    Args:
        q: ``[count, heads, head_dim]``, positions ``start..start + count - 1``.
        keys, values: one layer's cache, the chunk's own cells written.
        cells: int64 ``[start + count]``, cell of each position.
        scale: of the scores.

    Returns:
        ``[count, heads * head_dim]``.
    """
    count, heads, head_dim = q.shape
    k = keys.index_select(0, cells).transpose(0, 1)[None]
    v = values.index_select(0, cells).transpose(0, 1)[None]
    mask = None
    if start:
        seen = torch.arange(start + count, device=q.device)
        mask = seen <= torch.arange(start, start + count, device=q.device)[:, None]
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=heads != keys.shape[1],
    )
    return out[0].transpose(0, 1).reshape(count, heads * head_dim)


def cells_of(tables: torch.Tensor) -> torch.Tensor:
    """Block tables ``[rows, blocks]`` to cells, int64 ``[rows, blocks * 16]``."""
    offsets = torch.arange(BLOCK_TOKENS, device=tables.device)
    return (tables.long()[:, :, None] * BLOCK_TOKENS + offsets).flatten(1)


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(q ``[n, heads, head_dim]``, keys, values of a layer) -> ``[n, heads * head_dim]``."""
