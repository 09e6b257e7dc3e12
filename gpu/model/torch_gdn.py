"""The gated delta net in torch: single tokens of many sequences, or many tokens of one.

What it owns: one layer's small tensors on the device. A decode step takes every row one token on,
with static shapes, so a graph can hold it. A chunk of a prompt is taken in blocks of `BLOCK`
tokens: inside a block the recurrence becomes one triangular system, and only whole blocks follow
one another. Invariants: states of places that no row names are untouched; rows never mix.

Formulas and rounding points are those of `gpu.kernels.gdn`. A block's system: with G the running
sum of log decays, ``D = beta (V - exp(G) K S - tril(exp(G_t - G_i) K K^T, -1) D)`` gives the
increments of the state S (Yang et al., "Parallelizing Linear Transformers with the Delta Rule over
Sequence Length", with the decay of "Gated Delta Networks: Improving Mamba2 with Delta Rule").
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch
from torch.nn import functional

from ..kernels.gdn import L2_EPS, GdnShape, GdnWeights
from ..tensors import TensorSpace

BLOCK: Final = 64
"""Tokens of one triangular system."""


@dataclass(frozen=True, slots=True)
class StateStep:
    """Which tokens of a step move which states on.

    Attributes:
        places: int64 ``[singles]``, the place of each single token's state; ``None`` if there are
            none. Padding rows share a place that belongs to nobody.
        where: int64 ``[singles]``, which tokens these are; ``None``: all of the step, in order.
        chunks: (first token, end, place) of every row with more than one.
    """

    places: torch.Tensor | None
    where: torch.Tensor | None = None
    chunks: tuple[tuple[int, int, int], ...] = ()


class TorchDeltaNet:
    """One layer's delta net, between its projection and out_proj.

    Args:
        weights: on the host; they are uploaded.
    """

    def __init__(self, shape: GdnShape, weights: GdnWeights, space: TensorSpace) -> None:
        self._shape = shape
        up = space.upload
        self._weights = replace(
            weights,
            conv=up(weights.conv.float()),
            decay=up(weights.decay),
            dt_bias=up(weights.dt_bias),
            norm=up(weights.norm),
        )

    def __call__(
        self,
        projected: torch.Tensor,
        conv: torch.Tensor,
        memory: torch.Tensor,
        step: StateStep,
    ) -> torch.Tensor:
        """Advance both states by the step's tokens.

        Args:
            projected: ``[n, shape.projected]``: in_proj_qkv, z, b and a side by side.
            conv: ``[places, conv - 1, channels]``, the last convolution inputs, oldest first.
            memory: float32 ``[places, value_heads, key_dim, value_dim]``.

        Returns:
            ``[n, value_width]`` of projected's dtype, contiguous, newly made.
        """
        if step.places is not None and step.where is None:
            return self._singles(projected, conv, memory, step.places)
        out = projected.new_empty((projected.shape[0], self._shape.value_width))
        if step.places is not None and step.where is not None:
            taken = projected.index_select(0, step.where)
            out.index_copy_(0, step.where, self._singles(taken, conv, memory, step.places))
        for begin, end, place in step.chunks:
            out[begin:end] = self._chunk(projected[begin:end], conv[place], memory[place])
        return out

    def _singles(
        self,
        projected: torch.Tensor,
        conv: torch.Tensor,
        memory: torch.Tensor,
        places: torch.Tensor,
    ) -> torch.Tensor:
        inputs = projected[:, None, : self._shape.channels]
        window = torch.cat((conv.index_select(0, places), inputs), 1)
        conv.index_copy_(0, places, window[:, 1:])
        summed = (window.float() * self._weights.conv).sum(1)
        q, k, v = self._heads(summed.to(projected.dtype))
        beta, decay = self._rates(projected)
        state = memory.index_select(0, places) * decay.exp()[:, :, None, None]
        delta = (v - (k[:, :, None] @ state)[:, :, 0]) * beta[..., None]
        state = state + k[..., None] * delta[:, :, None]
        memory.index_copy_(0, places, state)
        return self._read((q[:, :, None] @ state)[:, :, 0], projected)

    def _chunk(
        self, projected: torch.Tensor, held: torch.Tensor, memory: torch.Tensor
    ) -> torch.Tensor:
        """One sequence's tokens; ``held`` ``[conv - 1, channels]``, ``memory`` of one place."""
        count, width = projected.shape[0], self._shape.conv
        window = torch.cat((held, projected[:, : self._shape.channels]))
        held.copy_(window[count:])
        wide, conv = window.float(), self._weights.conv
        summed = wide[:count] * conv[0]
        for back in range(1, width):
            summed = summed + wide[back : back + count] * conv[back]
        heads = self._heads(summed.to(projected.dtype))
        beta, decay = self._rates(projected)
        size = min(BLOCK, count)
        extra = -count % size
        # Tokens that only pad change nothing: no decay, and beta 0.
        q, k, v = (
            _in_blocks(functional.pad(x.transpose(0, 1), (0, 0, 0, extra)), size) for x in heads
        )
        beta, decay = (_in_blocks(functional.pad(x.t(), (0, extra)), size) for x in (beta, decay))
        out = _blocks(q, k, v, beta, decay.cumsum(2), memory)
        return self._read(out.flatten(1, 2)[:, :count].transpose(0, 1), projected)

    def _heads(self, summed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """float32 q, k ``[n, value_heads, key_dim]``, normalised, and v of the convolution's sums
        ``[n, channels]``."""
        shape, n = self._shape, summed.shape[0]
        u = functional.silu(summed)
        keys = shape.key_heads * shape.key_dim
        repeats = shape.value_heads // shape.key_heads

        def each(x: torch.Tensor) -> torch.Tensor:
            wide = x.reshape(n, shape.key_heads, shape.key_dim).float()
            wide = wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + L2_EPS)
            # Key head j serves the value heads j * repeats and on.
            return wide[:, :, None].expand(-1, -1, repeats, -1).flatten(1, 2)

        v = u[:, 2 * keys :].reshape(n, shape.value_heads, shape.value_dim).float()
        return each(u[:, :keys]) * shape.key_dim**-0.5, each(u[:, keys : 2 * keys]), v

    def _rates(self, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """beta and the logarithm of the decay, float32 ``[n, value_heads]``."""
        weights, at = self._weights, self._shape.channels + self._shape.value_width
        b, a = projected[:, at:].chunk(2, 1)
        wait = functional.softplus(a.float() + weights.dt_bias)
        return torch.sigmoid(b).float(), weights.decay * wait

    def _read(self, o: torch.Tensor, projected: torch.Tensor) -> torch.Tensor:
        """The gated norm of float32 ``[n, value_heads, value_dim]``."""
        shape, weights, dtype = self._shape, self._weights, projected.dtype
        n, at = projected.shape[0], shape.channels
        o = o.to(dtype).float()
        o = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + weights.eps)
        z = projected[:, at : at + shape.value_width].reshape(n, shape.value_heads, shape.value_dim)
        gated = (weights.norm * o.to(dtype)) * functional.silu(z.float())
        return gated.to(dtype).reshape(n, shape.value_width)


def _in_blocks(x: torch.Tensor, size: int) -> torch.Tensor:
    """``[heads, tokens, ...]`` to ``[heads, blocks, size, ...]``."""
    return x.reshape(x.shape[0], -1, size, *x.shape[2:])


def _blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    total: torch.Tensor,
    memory: torch.Tensor,
) -> torch.Tensor:
    """Every block of one sequence; all float32.

    Args:
        q, k: ``[heads, blocks, size, key_dim]``. v: ``[heads, blocks, size, value_dim]``.
        beta: ``[heads, blocks, size]``.
        total: the same, log decay from the block's start up to each token, its own included.
        memory: ``[heads, key_dim, value_dim]``; moved on.

    Returns:
        What the tokens read, of v's shape.
    """
    size = q.shape[2]
    later = torch.ones((size, size), dtype=torch.bool, device=q.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
    faded = total.exp()[..., None]
    pressed = k * beta[..., None]
    system = (pressed @ k.transpose(2, 3)) * between
    sides = torch.cat((v * beta[..., None], pressed * faded), -1)
    # The diagonal is taken as ones and what lies above is not read.
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    own, given = solved.split([v.shape[3], k.shape[3]], -1)
    inner = (q @ k.transpose(2, 3)) * between
    outer = q * faded
    to_end = (k * (total[..., -1:] - total).exp()[..., None]).transpose(2, 3)
    kept = total[..., -1].exp()[..., None, None]
    state, out = memory, []
    for block in range(q.shape[1]):
        delta = own[:, block] - given[:, block] @ state
        out.append(outer[:, block] @ state + inner[:, block] @ delta)
        state = state * kept[:, block] + to_end[:, block] @ delta
    memory.copy_(state)
    return torch.stack(out, 1)
