"""Attention by torch's own paged kernel, ``torch.nn.attention.varlen.varlen_attn``.

What it owns: the row starts of decode steps on the device. Invariant: the kernel is called with
``block_table`` and ``seqused_k`` and reads the KV memory as it lies.

Sources: ``torch/nn/attention/varlen.py`` of torch 2.13 (arguments, shapes, "requires seqused_k")
and ``_fa3.py``, ``_fa4.py`` beside it. Torch's built-in kernel (FlashAttention 2) refuses block
tables; FlashAttention 3 (``flash_attn_interface``, compute capability 9.0) and 4
(``flash_attn.cute``, 9.0 and 10.0) take pages of any size once torch has activated them, which it
does for the whole process. Both take float16 and bfloat16 only.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch

from ..kernels.rope import BLOCK_TOKENS
from .torch_attention import AttentionSpec, paged
from .torch_ops import Attend
from .torch_rows import HostRows, MixedRows


class VarlenAttention:
    """See `gpu.model.torch_attention.Attention`.

    Args:
        kernel: has the arguments of ``varlen_attn``.
    """

    name = "torch-varlen"
    spans = True

    def __init__(self, spec: AttentionSpec, kernel: Callable[..., Any]) -> None:
        self._spec, self._kernel = spec, kernel
        self._starts = spec.space.upload(torch.arange(spec.rows + 1, dtype=torch.int32))

    def plan(self, host: HostRows) -> None:
        """Nothing: the kernel reads lengths and tables on the device."""

    def decode(self, tables: torch.Tensor, lens: torch.Tensor, zero: int) -> Attend:
        """See `Attention.decode`."""
        longest = tables.shape[1] * BLOCK_TOKENS
        return self._attend(self._starts[: tables.shape[0] + 1], 1, longest, tables, lens)

    def mixed(self, rows: MixedRows, zero: int) -> Attend:
        """See `Attention.mixed`: one call for all rows."""
        lengths = rows.kinds.lengths
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        longest = int(rows.host.lens.max())
        tables = rows.tables[:, : -(-longest // BLOCK_TOKENS)]
        return self._attend(starts.to(rows.tables.device), max(lengths), longest, tables, rows.lens)

    def close(self) -> None:
        """What the starts take is torch's."""
        del self._starts

    def _attend(
        self,
        starts: torch.Tensor,
        most: int,
        longest: int,
        tables: torch.Tensor,
        lens: torch.Tensor,
    ) -> Attend:
        spec, kernel = self._spec, self._kernel

        def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = kernel(
                q,
                paged(keys),
                paged(values),
                starts,
                None,
                most,
                longest,
                scale=spec.scale,
                # Causal, aligned to the last key.
                window_size=(-1, 0),
                enable_gqa=spec.heads != spec.kv_heads,
                seqused_k=lens,
                block_table=tables,
            )
            return out.reshape(q.shape[0], spec.width)

        return attend


def varlen_as_it_is(spec: AttentionSpec) -> VarlenAttention:
    """The way with whatever flash attention is active in this process.

    Raises:
        RuntimeError: this torch has none for these tensors. ImportError: it has no varlen_attn.
    """
    kind = spec.space.torch_device.type.upper()
    operation = "aten::_flash_attention_forward"
    if not torch._C._dispatch_has_kernel_for_dispatch_key(operation, kind):
        raise RuntimeError(f"torch {torch.__version__} has no flash attention on {kind}")
    # Late: it imports torch's compiler.
    return VarlenAttention(spec, importlib.import_module("torch.nn.attention.varlen").varlen_attn)


def varlen_activated(kind: str) -> Callable[[AttentionSpec], VarlenAttention]:
    """The way once flash attention ``kind`` ("FA3", "FA4") is activated.

    The returned function raises ImportError where it is not installed, and ValueError where this
    torch does not know it.
    """

    def make(spec: AttentionSpec) -> VarlenAttention:
        if spec.space.torch_device.type != "cuda":
            raise RuntimeError("its kernels take CUDA tensors only")
        importlib.import_module("torch.nn.attention").activate_flash_attention_impl(kind)
        return varlen_as_it_is(spec)

    return make


def restore_varlen() -> None:
    """Give torch its built-in flash attention back."""
    if torch.version.cuda is not None:
        importlib.import_module("torch.nn.attention").restore_flash_attention_impl(False)
