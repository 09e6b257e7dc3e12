"""All decoder layers of a llama family in one call, for the few rows of a decode step.

The work between two linears takes a few microseconds; what calling each kernel from Python costs
beside it is mostly memory too: by the time a piece of code is needed again, the weights that
streamed through have driven it from the caches. Here the layers follow each other without leaving
compiled code, and without the GIL. Every operation is the kernel that `gpu.model.llama` calls one
by one, with the same arguments, so the results are the same to the last bit.

Tables are int64; addresses unless said otherwise. Of the model: layers (a count), hidden, heads,
kv_heads, head_dim, half the rotary dimension and intermediate (sizes), cos, sin, the arrays of the
step (positions, slot mapping, block tables, elements between two of their rows, sequence of each
row, lengths) and the buffers (residual stream, normed, qkv, attended, delta, gate_up, acted), each
of them dense. Of a layer: `LAYER_FIELDS`. Of a plan, for each layer and group: the LoRA group and
its vectors, 0 where there is nothing to launch.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Final

from .act import silu_mul_kernel
from .affine import affine_kernel
from .attention_kernel import paged_attention_kernel
from .bf16 import inlined, kernel, ld_i64
from .bgmv_dot import lora_dot_kernel
from .linear_tiles_kernel import tile_linear_kernel
from .norm import rms_norm_kernel
from .rope import rope_and_cache_kernel

MODEL_FIELDS: Final = 22
LAYER_FIELDS: Final = 10
"""Norm before attention, qkv, o, norm before the MLP, gate_up, down (packed linears), norms of q
and k heads or 0, keys, values."""
PLAN_FIELDS: Final = 8

_norm = rms_norm_kernel.device
_linear = tile_linear_kernel.device
_rope = rope_and_cache_kernel.device
_attend = paged_attention_kernel.device
_act = silu_mul_kernel.device
_lora = lora_dot_kernel.device
_affine = affine_kernel.device


@inlined
def _adapt(tag, plan, scratch, x, xs, out, os, row_slots, n):
    """A group's delta, then its vectors; the first row with a wrong slot, or -1."""
    bad = -1
    group, vectors = ld_i64(plan, 0), ld_i64(plan, 1)
    if group:
        bad = _lora(tag, group, scratch, x, xs, out, os, row_slots, n)
    if vectors and bad < 0:
        bad = _affine(tag, vectors, out, os, row_slots, n)
    return bad


@kernel
def layers_kernel(tag, model, layers, n, eps, scale, plan, row_slots, scratch):
    """`LlamaModel.layers` of ``n`` rows; returns -1, or the first row whose slot is outside the
    tables (what was written by then is undefined)."""
    count, hidden, heads = ld_i64(model, 0), ld_i64(model, 1), ld_i64(model, 2)
    kv_heads, head_dim, half = ld_i64(model, 3), ld_i64(model, 4), ld_i64(model, 5)
    inter, cos, sin = ld_i64(model, 6), ld_i64(model, 7), ld_i64(model, 8)
    positions, mapping, tables = ld_i64(model, 9), ld_i64(model, 10), ld_i64(model, 11)
    table_step, row_seq, lens = ld_i64(model, 12), ld_i64(model, 13), ld_i64(model, 14)
    h, x, qkv, attended = ld_i64(model, 15), ld_i64(model, 16), ld_i64(model, 17), ld_i64(model, 18)
    delta, gate_up, acted = ld_i64(model, 19), ld_i64(model, 20), ld_i64(model, 21)
    q_out = heads * head_dim
    qkv_out = q_out + 2 * kv_heads * head_dim
    for index in range(count):
        layer = layers + 8 * LAYER_FIELDS * index
        keys, values = ld_i64(layer, 8), ld_i64(layer, 9)
        if index == 0:
            _norm(tag, 0, 0, h, hidden, 0, 0, ld_i64(layer, 0), eps, x, hidden, n, hidden)
        else:
            _norm(tag, 1, 0, delta, hidden, h, hidden, ld_i64(layer, 0), eps, x, hidden, n, hidden)
        _linear(tag, ld_i64(layer, 1), scratch, x, hidden, qkv, qkv_out, n)
        if plan:
            bad = _adapt(tag, plan, scratch, x, hidden, qkv, qkv_out, row_slots, n)
            if bad >= 0:
                return bad
        _rope(
            tag,
            qkv,
            qkv_out,
            n,
            heads,
            kv_heads,
            head_dim,
            half,
            positions,
            cos,
            sin,
            keys,
            values,
            mapping,
            ld_i64(layer, 6),
            ld_i64(layer, 7),
            eps,
            0,
        )
        _attend(
            tag,
            qkv,
            qkv_out,
            heads,
            head_dim,
            keys,
            values,
            kv_heads,
            tables,
            table_step,
            row_seq,
            lens,
            scale,
            attended,
            q_out,
            n,
            scratch,
        )
        _linear(tag, ld_i64(layer, 2), scratch, attended, q_out, delta, hidden, n)
        if plan:
            bad = _adapt(tag, plan + 16, scratch, attended, q_out, delta, hidden, row_slots, n)
            if bad >= 0:
                return bad
        _norm(tag, 1, 0, delta, hidden, h, hidden, ld_i64(layer, 3), eps, x, hidden, n, hidden)
        _linear(tag, ld_i64(layer, 4), scratch, x, hidden, gate_up, 2 * inter, n)
        if plan:
            bad = _adapt(tag, plan + 32, scratch, x, hidden, gate_up, 2 * inter, row_slots, n)
            if bad >= 0:
                return bad
        _act(tag, gate_up, 2 * inter, acted, inter, n, inter)
        _linear(tag, ld_i64(layer, 5), scratch, acted, inter, delta, hidden, n)
        if plan:
            bad = _adapt(tag, plan + 48, scratch, acted, inter, delta, hidden, row_slots, n)
            if bad >= 0:
                return bad
            plan += 8 * PLAN_FIELDS
    return -1
