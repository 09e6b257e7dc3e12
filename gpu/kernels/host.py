"""`HostKernels`: every CPU kernel of one engine; numba or torch reference, chosen once.

Owns the choice and the packer of linears. Invariant: whatever the choice, a row's result does not
depend on the other rows of the call.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch

from ...errors import DeviceError
from . import (
    act,
    attention,
    attention_kernel,
    bf16,
    gate,
    gdn,
    gdn_kernel,
    hugepages,
    norm,
    rope,
    route,
)
from .affine import AffineGroup, AffineSlice
from .bgmv import LoraGroup, LoraSlice
from .linear import Linear, LinearPacker
from .linear_tiles import TilePacker
from .lookup import LookupGroup
from .memory import Scratch

logger = logging.getLogger("rota.gpu.kernels")


class HostKernels:
    """The kernels for one element type.

    Args:
        dtype: torch.bfloat16 or torch.float32, of activations, weights, caches and adapters.
        use_numba: use the numba kernels; without numba the torch references serve, with one log
            line.
        use_dot: multiply bf16 adapters pair by pair where the processor can (`bf16.has_dot`). The
            results of the two ways differ in their last bits, so one engine keeps to one.
        use_tiles: run bf16 linears on matrix tiles where the processor has them (`bf16.has_tiles`)
            and torch keeps to one thread; with more, the library shares a linear out among them.

    Raises:
        DeviceError: "unsupported-dtype".
    """

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        use_numba: bool = True,
        use_dot: bool = True,
        use_tiles: bool = True,
    ) -> None:
        if dtype not in (torch.bfloat16, torch.float32):
            raise DeviceError(
                "the host kernels do not know this element type",
                code="unsupported-dtype",
                expected="torch.bfloat16 or torch.float32",
                found=dtype,
            )
        self.dtype = dtype
        self.uses_numba = use_numba and bf16.AVAILABLE
        if use_numba and not self.uses_numba:
            logger.warning("numba is not installed: torch reference kernels serve, slowly")
        self.uses_dot = use_dot and self.uses_numba and dtype == torch.bfloat16 and bf16.has_dot()
        self._tag: int | float = 0 if dtype == torch.bfloat16 else 0.0
        self._scratch = Scratch()
        self.uses_tiles = use_tiles and self._may_use_tiles()
        self._packer = LinearPacker(dtype, TilePacker(self._scratch) if self.uses_tiles else None)
        self._places: list[tuple[int, int]] = []

    def _may_use_tiles(self) -> bool:
        if not self.uses_numba or self.dtype != torch.bfloat16:
            return False
        why = bf16.why_no_tiles()
        if why is None and torch.get_num_threads() > 1:
            why = f"torch has {torch.get_num_threads()} threads"
        if why is not None:
            logger.info("linears are the library's: %s", why)
        return why is None

    @property
    def scratch(self) -> Scratch:
        """Memory for one kernel call at a time, of any of these kernels."""
        return self._scratch

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """Pack a linear layer; see `LinearPacker.pack`."""
        made = self._packer.pack(weight, bias)
        self._places.append(made.place)
        return made

    def settle(self) -> None:
        """All linears are packed: put their weights on huge pages (`hugepages`)."""
        hugepages.settle(self._places)
        self._places.clear()

    def experts(self, weights: Iterator[torch.Tensor], count: int) -> tuple[Linear, ...]:
        """Pack linear layers one by one."""
        return tuple(self.linear(weight) for weight in weights)

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
        if not self.uses_numba:
            norm.rms_norm_reference(x, w, eps, out, one_plus=one_plus)
            return
        n, h = x.shape
        norm.rms_norm_kernel(
            self._tag,
            0,
            int(one_plus),
            x.data_ptr(),
            x.stride(0),
            0,
            0,
            w.data_ptr(),
            eps,
            out.data_ptr(),
            out.stride(0),
            n,
            h,
        )

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
        if not self.uses_numba:
            norm.add_rms_norm_reference(x, residual, w, eps, out, one_plus=one_plus)
            return
        n, h = x.shape
        norm.rms_norm_kernel(
            self._tag,
            1,
            int(one_plus),
            x.data_ptr(),
            x.stride(0),
            residual.data_ptr(),
            residual.stride(0),
            w.data_ptr(),
            eps,
            out.data_ptr(),
            out.stride(0),
            n,
            h,
        )

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
        if not self.uses_numba:
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
            return
        rope.rope_and_cache_kernel(
            self._tag,
            qkv.data_ptr(),
            qkv.stride(0),
            qkv.shape[0],
            heads,
            kv_heads,
            k_cache.shape[3],
            cos.shape[1],
            positions.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            slot_mapping.data_ptr(),
            0 if q_norm_w is None else q_norm_w.data_ptr(),
            0 if k_norm_w is None else k_norm_w.data_ptr(),
            eps,
            int(one_plus),
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
        head_dim = q.shape[2]
        if not self.uses_numba or head_dim % 8:
            attention.paged_attention_reference(
                q, k_cache, v_cache, block_tables, row_seq, lens, scale, out
            )
            return
        rows, heads = q.shape[:2]
        kv_heads = k_cache.shape[1]
        need = attention_kernel.scratch_bytes(heads, kv_heads, head_dim, block_tables.shape[1])
        attention_kernel.paged_attention_kernel(
            self._tag,
            q.data_ptr(),
            q.stride(0),
            heads,
            head_dim,
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            kv_heads,
            block_tables.data_ptr(),
            block_tables.stride(0),
            row_seq.data_ptr(),
            lens.data_ptr(),
            scale,
            out.data_ptr(),
            out.stride(0),
            rows,
            self._scratch.at_least(need),
        )

    def silu_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """See `act.silu_mul_reference`."""
        if not self.uses_numba:
            act.silu_mul_reference(gate_up, out)
            return
        act.silu_mul_kernel(
            self._tag,
            gate_up.data_ptr(),
            gate_up.stride(0),
            out.data_ptr(),
            out.stride(0),
            out.shape[0],
            out.shape[1],
        )

    def sigmoid_mul(self, x: torch.Tensor, gates: torch.Tensor) -> None:
        """See `gate.sigmoid_mul_reference`."""
        if not self.uses_numba:
            gate.sigmoid_mul_reference(x, gates)
            return
        n, heads, width = x.shape
        gate.sigmoid_mul_kernel(
            self._tag,
            x.data_ptr(),
            x.stride(0),
            gates.data_ptr(),
            gates.stride(0),
            gates.stride(1),
            int(gates.shape[2] == 1),
            n,
            heads,
            width,
        )

    def route(self, logits: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
        """See `route.route_reference`."""
        if not self.uses_numba:
            route.route_reference(logits, weights, ids)
            return
        n, experts = logits.shape
        k = ids.shape[1]
        route.route_kernel(
            self._tag,
            logits.data_ptr(),
            logits.stride(0),
            weights.data_ptr(),
            ids.data_ptr(),
            self._scratch.at_least(route.scratch_bytes(experts, k)),
            n,
            experts,
            k,
        )

    def delta_net(
        self,
        shape: gdn.GdnShape,
        weights: gdn.GdnWeights,
        projected: torch.Tensor,
        conv_state: torch.Tensor,
        state: torch.Tensor,
        rows: gdn.StateRows,
        out: torch.Tensor,
    ) -> None:
        """See `gdn.delta_net_reference`."""
        if not self.uses_numba:
            gdn.delta_net_reference(shape, weights, projected, conv_state, state, rows, out)
            return
        x, stride = projected.data_ptr(), projected.stride(0)
        first, count, slot = rows.first.data_ptr(), rows.count.data_ptr(), rows.slot.data_ptr()
        gdn_kernel.conv_kernel(
            self._tag,
            x,
            stride,
            weights.conv.data_ptr(),
            shape.conv,
            shape.channels,
            conv_state.data_ptr(),
            first,
            count,
            slot,
            rows.rows,
        )
        gdn_kernel.delta_kernel(
            self._tag,
            x,
            stride,
            shape.key_heads,
            shape.value_heads,
            shape.key_dim,
            shape.value_dim,
            state.data_ptr(),
            weights.decay.data_ptr(),
            weights.dt_bias.data_ptr(),
            weights.norm.data_ptr(),
            weights.eps,
            first,
            count,
            slot,
            rows.rows,
            out.data_ptr(),
            out.stride(0),
            self._scratch.at_least(gdn_kernel.scratch_bytes(shape.key_dim, shape.value_dim)),
        )

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
            scratch=self._scratch if self.uses_numba else None,
            dot=self.uses_dot,
        )

    def affine_group(self, slices: tuple[AffineSlice, ...], *, max_loras: int) -> AffineGroup:
        """Make the group of up to three pairs' vectors; see `affine.AffineGroup`."""
        return AffineGroup(slices, max_loras=max_loras, dtype=self.dtype, use_numba=self.uses_numba)

    def lookup_group(
        self, part: LoraSlice, *, vocab: int, rank: int, max_loras: int
    ) -> LookupGroup:
        """Make the group of the embedding's pair; see `lookup.LookupGroup`."""
        return LookupGroup(part, vocab=vocab, rank=rank, max_loras=max_loras, dtype=self.dtype)
