"""The forward pass of the hybrid families (qwen3_5, qwen3_5_moe) over a flat batch of tokens.

What it owns: the work buffers of a step and the rotary tables. Invariants: as in `llama`: a token's
result depends on its own sequence alone, to the last bit; the delta of a row's adapter is added to
the raw output of its linear, before gates are split off, norms, rope and convolution; a batch of
base rows launches no LoRA kernel. The states of the linear layers move on by exactly the tokens of
the step.

Layer (transformers' ``modeling_qwen3_5``): h += mixer(norm(h)); h += mlp(norm(h)), where the mixer
is gated attention or a gated delta net and every norm multiplies by 1 + w.
"""

from __future__ import annotations

import torch

from ..kernels.host import HostKernels
from .adapters import ATTN_OUT, DOWN, GATE_UP, GDN_OUT, IN_B_A, IN_QKV_Z, QKV, LayerPlan
from .batch import StepBatch
from .config import ModelConfig
from .final import final_states
from .hybrid_weights import AttentionWeights, DeltaNetWeights, DenseWeights
from .kv import KvCache
from .moe import MoeBlock
from .rope import rope_tables
from .states import StateArena
from .weights import HybridWeights


class HybridModel:
    """One model bound to its weights, kernels, KV memory, states and batch arrays.

    Args:
        positions: positions the rotary tables cover.
        batch: the arrays each step fills.
        states: of the linear layers, begun for each step; ``None`` when there is no such layer.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: HybridWeights,
        kernels: HostKernels,
        kv: KvCache,
        batch: StepBatch,
        states: StateArena | None,
        *,
        positions: int,
    ) -> None:
        self._config, self._weights, self._kernels = config, weights, kernels
        self._kv, self._batch, self._states = kv, batch, states
        self._cos, self._sin = rope_tables(config, positions)
        self._kv_index = {layer: index for index, layer in enumerate(config.kv_layers)}
        linear = sorted(config.linear_layers)
        self._state_index = {layer: index for index, layer in enumerate(linear)}
        size = batch.limits.max_step_tokens

        def buffer(width: int) -> torch.Tensor:
            return torch.zeros((size, width), dtype=kernels.dtype)

        self._hidden, self._normed = buffer(config.hidden), buffer(config.hidden)
        self._split = buffer(config.attn_out + 2 * config.kv_out)
        self._attended = buffer(config.attn_out)
        self._read = buffer(config.gdn.value_width if config.gdn else 0)
        self._acted = buffer(config.intermediate)
        self._moe = MoeBlock(config.moe, kernels, size) if config.moe is not None else None

    def embed(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Embed the first ``n`` tokens of the batch; returns (tokens, hidden), both views."""
        tokens, hidden = self._batch.tokens[:n], self._hidden[:n]
        torch.index_select(self._weights.embed, 0, tokens, out=hidden)
        return tokens, hidden

    def layers(
        self, n: int, plan: tuple[LayerPlan, ...] | None, row_slots: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run every layer on what `embed` left; writes KV and states of all ``n`` tokens.

        Args:
            plan: the LoRA groups to launch per layer, or ``None``.
            row_slots: address of int32 ``[n]``, the slot of each token (unused without a plan).

        Returns:
            The residual stream before the last addition, and that addition; both ``[n, hidden]``.
        """
        kernels, eps = self._kernels, self._config.rms_eps
        h, x = self._hidden[:n], self._normed[:n]
        delta: torch.Tensor | None = None
        for index, layer in enumerate(self._weights.layers):
            groups = None if plan is None else plan[index]
            if delta is None:
                kernels.rms_norm(h, layer.input_norm, eps, x, one_plus=True)
            else:
                kernels.add_rms_norm(delta, h, layer.input_norm, eps, x, one_plus=True)
            if isinstance(layer.mixer, AttentionWeights):
                delta = self._attend(index, layer.mixer, x, groups, row_slots)
            else:
                delta = self._delta_net(index, layer.mixer, x, groups, row_slots)
            kernels.add_rms_norm(delta, h, layer.post_norm, eps, x, one_plus=True)
            if isinstance(layer.mlp, DenseWeights):
                delta = self._dense(layer.mlp, x, groups, row_slots)
            else:
                assert self._moe is not None
                delta = self._moe.run(layer.mlp, x, groups, row_slots)
        assert delta is not None  # a config has at least one layer
        return h, delta

    def warm_up(
        self, n: int, plan: tuple[LayerPlan, ...] | None, row_slots: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run `layers` every way it may go; returns as it."""
        return self.layers(n, plan, row_slots)

    def _attend(
        self,
        layer: int,
        weights: AttentionWeights,
        x: torch.Tensor,
        groups: LayerPlan | None,
        row_slots: int,
    ) -> torch.Tensor:
        config, kernels, batch, n = self._config, self._kernels, self._batch, x.shape[0]
        heads, kv_heads, head_dim = config.heads, config.kv_heads, config.head_dim
        attn_out, q_out, kv_out = config.attn_out, config.q_out, config.kv_out
        raw = weights.qkv(x)
        if groups is not None and (group := groups[QKV]) is not None:
            group.apply(x.data_ptr(), x.stride(0), raw.data_ptr(), raw.stride(0), row_slots, n)
        # Each head's query is followed by its gate.
        pairs = raw[:, :q_out].view(n, heads, 2 * head_dim)
        qkv = self._split[:n]
        qkv[:, :attn_out].view(n, heads, head_dim).copy_(pairs[..., :head_dim])
        qkv[:, attn_out:].copy_(raw[:, q_out:])
        index = self._kv_index[layer]
        keys, values = self._kv.keys[index], self._kv.values[index]
        kernels.rope_and_cache(
            qkv,
            heads,
            kv_heads,
            batch.positions[:n],
            self._cos,
            self._sin,
            keys,
            values,
            batch.slot_mapping[:n],
            weights.q_norm,
            weights.k_norm,
            config.rms_eps,
            one_plus=True,
        )
        query = qkv.as_strided((n, heads, head_dim), (attn_out + 2 * kv_out, head_dim, 1))
        mixed = self._attended[:n]
        kernels.paged_attention(
            query,
            keys,
            values,
            batch.block_tables,
            batch.row_seq[:n],
            batch.lens[:n],
            head_dim**-0.5,
            mixed,
        )
        kernels.sigmoid_mul(mixed.view(n, heads, head_dim), pairs[..., head_dim:])
        delta = weights.o(mixed)
        if groups is not None and (group := groups[ATTN_OUT]) is not None:
            at, stride = mixed.data_ptr(), mixed.stride(0)
            group.apply(at, stride, delta.data_ptr(), delta.stride(0), row_slots, n)
        return delta

    def _delta_net(
        self,
        layer: int,
        weights: DeltaNetWeights,
        x: torch.Tensor,
        groups: LayerPlan | None,
        row_slots: int,
    ) -> torch.Tensor:
        gdn, n = self._config.gdn, x.shape[0]
        states = self._states
        assert gdn is not None and states is not None  # there is a linear layer
        projected = weights.projection(x)
        at, stride = projected.data_ptr(), projected.stride(0)
        if groups is not None:
            if (group := groups[IN_QKV_Z]) is not None:
                group.apply(x.data_ptr(), x.stride(0), at, stride, row_slots, n)
            if (group := groups[IN_B_A]) is not None:
                at += (gdn.channels + gdn.value_width) * projected.itemsize
                group.apply(x.data_ptr(), x.stride(0), at, stride, row_slots, n)
        index = self._state_index[layer]
        mixed = self._read[:n]
        conv, memory = states.conv[index], states.memory[index]
        self._kernels.delta_net(gdn, weights.inner, projected, conv, memory, states.rows, mixed)
        delta = weights.out(mixed)
        if groups is not None and (group := groups[GDN_OUT]) is not None:
            at, stride = mixed.data_ptr(), mixed.stride(0)
            group.apply(at, stride, delta.data_ptr(), delta.stride(0), row_slots, n)
        return delta

    def _dense(
        self, weights: DenseWeights, x: torch.Tensor, groups: LayerPlan | None, row_slots: int
    ) -> torch.Tensor:
        n = x.shape[0]
        gate_up, acted = weights.gate_up(x), self._acted[:n]
        if groups is not None and (group := groups[GATE_UP]) is not None:
            at, stride = gate_up.data_ptr(), gate_up.stride(0)
            group.apply(x.data_ptr(), x.stride(0), at, stride, row_slots, n)
        self._kernels.silu_mul(gate_up, acted)
        delta = weights.down(acted)
        if groups is not None and (group := groups[DOWN]) is not None:
            at, stride = acted.data_ptr(), acted.stride(0)
            group.apply(at, stride, delta.data_ptr(), delta.stride(0), row_slots, n)
        return delta

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
        states = final_states(self._kernels, norm, eps, h, delta, rows, one_plus=True)
        return states, self._weights.head(states)
