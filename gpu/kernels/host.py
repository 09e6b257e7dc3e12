"""`HostKernels`: every CPU kernel of one engine; numba or torch reference, chosen once.

Owns the choice and the packer of linears. Invariant: whatever the choice, a row's result does not
depend on the other rows of the call.
"""

from __future__ import annotations

import logging

import torch

from ...errors import DeviceError
from . import act, attention, norm, rope
from .bgmv import LoraGroup, LoraSlice
from .linear import LinearPacker, PackedLinear

logger = logging.getLogger("rota.gpu.kernels")


class HostKernels:
    """The kernels for one element type.

    Args:
        dtype: torch.bfloat16 or torch.float32, of activations, weights, caches and adapters.
        use_numba: use the numba kernels; without numba the torch references serve, with one log
            line.

    Raises:
        DeviceError: "unsupported-dtype".
    """

    def __init__(self, dtype: torch.dtype, *, use_numba: bool = True) -> None:
        if dtype not in (torch.bfloat16, torch.float32):
            raise DeviceError(
                "the host kernels do not know this element type",
                code="unsupported-dtype",
                expected="torch.bfloat16 or torch.float32",
                found=dtype,
            )
        self.dtype = dtype
        self.uses_numba = False
        self._packer = LinearPacker(dtype)

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        """Pack a linear layer; see `LinearPacker.pack`."""
        return self._packer.pack(weight, bias)

    def rms_norm(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        eps: float,
        out: torch.Tensor,
        *,
        one_plus: bool = False,
    ) -> None:
        """See `norm.rms_norm_reference`."""
        norm.rms_norm_reference(x, w, eps, out, one_plus=one_plus)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        w: torch.Tensor,
        eps: float,
        out: torch.Tensor,
        *,
        one_plus: bool = False,
    ) -> None:
        """See `norm.add_rms_norm_reference`."""
        norm.add_rms_norm_reference(x, residual, w, eps, out, one_plus=one_plus)

    def rope_and_cache(
        self,
        qkv: torch.Tensor,
        heads: int,
        kv_heads: int,
        positions: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        q_norm_w: torch.Tensor | None = None,
        k_norm_w: torch.Tensor | None = None,
        eps: float = 1e-6,
        *,
        one_plus: bool = False,
    ) -> None:
        """See `rope.rope_and_cache_reference`."""
        rope.rope_and_cache_reference(
            qkv,
            heads,
            kv_heads,
            positions,
            cos,
            sin,
            k_cache,
            v_cache,
            slot_mapping,
            q_norm_w,
            k_norm_w,
            eps,
            one_plus=one_plus,
        )

    def paged_attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_tables: torch.Tensor,
        row_seq: torch.Tensor,
        lens: torch.Tensor,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """See `attention.paged_attention_reference`."""
        attention.paged_attention_reference(
            q, k_cache, v_cache, block_tables, row_seq, lens, scale, out
        )

    def silu_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """See `act.silu_mul_reference`."""
        act.silu_mul_reference(gate_up, out)

    def lora_group(
        self, slices: tuple[LoraSlice, ...], *, k_in: int, rank: int, max_loras: int
    ) -> LoraGroup:
        """Make the group of up to three pairs that share one input; see `bgmv.LoraGroup`."""
        return LoraGroup(
            slices,
            k_in=k_in,
            rank=rank,
            max_loras=max_loras,
            dtype=self.dtype,
            use_numba=self.uses_numba,
        )
