"""The forward pass of the llama family (llama, qwen2, qwen3) over a flat batch of tokens.

What it owns: the work buffers of a step and the rotary tables. Invariants: decode rows and prefill
chunks are the same to every operation, and a token's result depends on its own row alone, so it is
the same to the last bit however a prompt is cut and whatever runs beside it; the delta of a row's
adapter is added before qk-norm and rope; a batch of base rows launches no LoRA kernel.

Layer (transformers' ``modeling_llama``): h += o(attention(norm(h))); h += down(silu(gate) * up).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from ..kernels.host import HostKernels
from .adapters import LayerPlan
from .batch import StepBatch
from .compiled_layers import StepBuffers, compiled_layers
from .config import ModelConfig
from .final import final_states
from .kv import KvCache
from .rope import rope_tables
from .weights import Weights

MAX_VIEWS: Final = 128


@dataclass(frozen=True, slots=True)
class _Views:
    """Buffers and batch arrays cut to ``n`` tokens, made once per ``n``."""

    tokens: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    row_seq: torch.Tensor
    lens: torch.Tensor
    hidden: torch.Tensor
    normed: torch.Tensor
    attended: torch.Tensor
    acted: torch.Tensor


class LlamaModel:
    """One model bound to its weights, kernels, KV memory and batch arrays.

    Args:
        positions: positions the rotary tables cover.
        batch: the arrays each step fills; their addresses are kept.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        kernels: HostKernels,
        kv: KvCache,
        batch: StepBatch,
        *,
        positions: int,
    ) -> None:
        self._config, self._weights, self._kernels = config, weights, kernels
        self._kv, self._batch = kv, batch
        self._cos, self._sin = rope_tables(config, positions)
        size, dtype = batch.limits.max_step_tokens, kernels.dtype
        self._hidden = torch.zeros((size, config.hidden), dtype=dtype)
        self._normed = torch.zeros((size, config.hidden), dtype=dtype)
        self._attended = torch.zeros((size, config.q_out), dtype=dtype)
        self._acted = torch.zeros((size, config.intermediate), dtype=dtype)
        self._views: dict[int, _Views] = {}
        buffers = StepBuffers(
            self._hidden, self._normed, self._attended, self._acted, self._cos, self._sin
        )
        self._compiled = compiled_layers(config, weights, kernels, kv, batch, buffers)

    def _cut(self, n: int) -> _Views:
        found = self._views.get(n)
        if found is None:
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            batch = self._batch
            found = _Views(
                batch.tokens[:n],
                batch.positions[:n],
                batch.slot_mapping[:n],
                batch.row_seq[:n],
                batch.lens[:n],
                self._hidden[:n],
                self._normed[:n],
                self._attended[:n],
                self._acted[:n],
            )
            self._views[n] = found
        return found

    def embed(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Embed the first ``n`` tokens of the batch; returns (tokens, hidden), both views."""
        views = self._cut(n)
        torch.index_select(self._weights.embed, 0, views.tokens, out=views.hidden)
        return views.tokens, views.hidden

    def layers(
        self, n: int, plan: tuple[LayerPlan, ...] | None, row_slots: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run every layer on what `embed` left; writes the KV of all ``n`` tokens.

        Args:
            plan: the LoRA groups to launch per layer, or ``None``.
            row_slots: address of int32 ``[n]``, the slot of each token (unused without a plan).

        Returns:
            The residual stream before the last addition, and that addition; both ``[n, hidden]``.
        """
        compiled = self._compiled
        if compiled is not None and compiled.run(n, plan, row_slots):
            return self._cut(n).hidden, compiled.delta[:n]
        return self._layer_by_layer(n, plan, row_slots)

    def warm_up(
        self, n: int, plan: tuple[LayerPlan, ...] | None, row_slots: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run `layers` every way it may go; returns as it."""
        if self._compiled is not None:
            self._compiled.run(n, plan, row_slots)
        return self._layer_by_layer(n, plan, row_slots)

    def _layer_by_layer(
        self, n: int, plan: tuple[LayerPlan, ...] | None, row_slots: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        config, kernels, views = self._config, self._kernels, self._cut(n)
        heads, kv_heads, head_dim = config.heads, config.kv_heads, config.head_dim
        hidden, q_out, qkv_out = config.hidden, config.q_out, config.qkv_out
        inter, eps, scale = config.intermediate, config.rms_eps, config.head_dim**-0.5
        h, x, attended, acted = views.hidden, views.normed, views.attended, views.acted
        positions, mapping, row_seq, lens = (
            views.positions,
            views.slot_mapping,
            views.row_seq,
            views.lens,
        )
        cos, sin, tables = self._cos, self._sin, self._batch.block_tables
        x_at, attended_at, acted_at = x.data_ptr(), attended.data_ptr(), acted.data_ptr()
        rms_norm, add_rms_norm = kernels.rms_norm, kernels.add_rms_norm
        rope, attend, act = kernels.rope_and_cache, kernels.paged_attention, kernels.silu_mul
        q_shape, q_stride = (n, heads, head_dim), (qkv_out, head_dim, 1)
        delta: torch.Tensor | None = None
        on_qkv = on_o = on_gate_up = on_down = None
        layers = self._weights.layers
        for index, layer in enumerate(layers):
            if plan is not None:
                on_qkv, on_o, on_gate_up, on_down = plan[index][:4]
            keys, values = self._kv.keys[index], self._kv.values[index]
            if delta is None:
                rms_norm(h, layer.input_norm, eps, x)
            else:
                add_rms_norm(delta, h, layer.input_norm, eps, x)
            qkv = layer.qkv(x)
            if on_qkv is not None:
                on_qkv.apply(x_at, hidden, qkv.data_ptr(), qkv_out, row_slots, n)
            rope(
                qkv,
                heads,
                kv_heads,
                positions,
                cos,
                sin,
                keys,
                values,
                mapping,
                layer.q_norm,
                layer.k_norm,
                eps,
            )
            query = qkv.as_strided(q_shape, q_stride)
            attend(query, keys, values, tables, row_seq, lens, scale, attended)
            delta = layer.o(attended)
            if on_o is not None:
                on_o.apply(attended_at, q_out, delta.data_ptr(), hidden, row_slots, n)
            add_rms_norm(delta, h, layer.post_norm, eps, x)
            gate_up = layer.gate_up(x)
            if on_gate_up is not None:
                on_gate_up.apply(x_at, hidden, gate_up.data_ptr(), 2 * inter, row_slots, n)
            act(gate_up, acted)
            delta = layer.down(acted)
            if on_down is not None:
                on_down.apply(acted_at, inter, delta.data_ptr(), hidden, row_slots, n)
        assert delta is not None  # a config has at least one layer
        return h, delta

    def head(
        self, h: torch.Tensor, delta: torch.Tensor, rows: list[int] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Final norm and lm_head of the tokens ``rows`` (``None``: all, in order).

        Args:
            h, delta: what `layers` returned.

        Returns:
            (states ``[m, hidden]`` given to lm_head, logits ``[m, vocab]``), engine dtype.
        """
        norm, eps = self._weights.final_norm, self._config.rms_eps
        states = final_states(self._kernels, norm, eps, h, delta, rows)
        return states, self._weights.head(states)
