"""Gated delta net: causal convolution, delta rule and gated norm, token by token.

The recurrence of every token is computed as it is defined, in fp32, for decode rows and prefill
rows alike. So a row's result depends on its own tokens and state alone: not on other rows, or on
how a prefill was cut into chunks.

Formulas and rounding points are those of transformers' `Qwen3_5GatedDeltaNet` (its recurrent form):
the convolution is summed in fp32, rounded, and so is its silu; q and k are normalised in fp32; beta
is rounded to the element type; the output is rounded before the norm, and the norm before its
weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

L2_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class GdnShape:
    """Sizes of one gated delta net layer.

    Attributes:
        key_heads, value_heads: ``value_heads`` is a multiple of ``key_heads``.
        key_dim, value_dim: width of one head.
        conv: tokens the causal convolution sees (its own included).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int

    @property
    def channels(self) -> int:
        """Convolved channels: q, k and v side by side (the width of in_proj_qkv)."""
        return 2 * self.key_heads * self.key_dim + self.value_width

    @property
    def value_width(self) -> int:
        """Width of v, of z (in_proj_z) and of the layer's output before out_proj."""
        return self.value_heads * self.value_dim

    @property
    def projected(self) -> int:
        """Width of in_proj_qkv, z, b and a side by side."""
        return self.channels + self.value_width + 2 * self.value_heads

    @property
    def state_floats(self) -> int:
        """float32 values of one sequence's recurrent state in one layer."""
        return self.value_heads * self.key_dim * self.value_dim


@dataclass(frozen=True, slots=True, eq=False)
class GdnWeights:
    """One layer's small tensors.

    Attributes:
        conv: [conv, channels] of the element type; the last row multiplies the current token.
        decay: f32 [value_heads], -exp(A_log).
        dt_bias: f32 [value_heads].
        norm: [value_dim] of the element type.
        eps: of the norm.
    """

    conv: torch.Tensor
    decay: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class StateRows:
    """Which tokens of a step belong to which state.

    Attributes:
        first, count: i32 [rows], the first token of each row and how many it has.
        slot: i32 [rows], the row's place in both state arrays; no two rows share one.
        rows: rows in use.
    """

    first: torch.Tensor
    count: torch.Tensor
    slot: torch.Tensor
    rows: int


def delta_net_reference(
    shape: GdnShape,
    weights: GdnWeights,
    projected: torch.Tensor,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    rows: StateRows,
    out: torch.Tensor,
) -> None:
    """Write the layer's output before out_proj, and advance both states.

    Args:
        projected: [n, shape.projected]: in_proj_qkv, z, b and a side by side; any row stride. The
            qkv columns are overwritten.
        conv_state: [slots, conv - 1, channels], the last inputs of the convolution, oldest first.
        state: f32 [slots, value_heads, key_dim, value_dim].
        out: [n, value_heads * value_dim], any row stride.
    """
    nk, nv, dk, dv = shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim
    channels, dtype = shape.channels, projected.dtype
    z_at, b_at = channels, channels + nv * dv
    for row in range(rows.rows):
        slot, first = int(rows.slot[row]), int(rows.first[row])
        memory, held = state[slot], conv_state[slot]
        for token in range(first, first + int(rows.count[row])):
            x = projected[token]
            window = torch.cat([held, x[None, :channels]])
            held.copy_(window[1:])
            summed = (window.float() * weights.conv.float()).sum(0).to(dtype)
            u = torch.nn.functional.silu(summed)
            x[:channels] = u
            q = _normed(u[: nk * dk].view(nk, dk)) * dk**-0.5
            k = _normed(u[nk * dk : 2 * nk * dk].view(nk, dk))
            q, k = (part.repeat_interleave(nv // nk, 0) for part in (q, k))
            v = u[2 * nk * dk :].view(nv, dv).float()
            beta = torch.sigmoid(x[b_at : b_at + nv]).float()
            a = x[b_at + nv : b_at + 2 * nv].float()
            wait = torch.nn.functional.softplus(a + weights.dt_bias)
            memory.mul_(torch.exp(weights.decay * wait)[:, None, None])
            delta = (v - torch.einsum("hk,hkv->hv", k, memory)) * beta[:, None]
            memory.add_(k[:, :, None] * delta[:, None, :])
            o = torch.einsum("hk,hkv->hv", q, memory).to(dtype).float()
            o = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + weights.eps)
            gate = torch.nn.functional.silu(x[z_at:b_at].view(nv, dv).float())
            out[token] = ((weights.norm * o.to(dtype)) * gate).to(dtype).flatten()


def _normed(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + L2_EPS)
