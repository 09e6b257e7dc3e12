"""The way from a llama family's step to the one call that runs all its layers.

What it owns: the buffers between the layers, and the tables of addresses the kernel reads.
Invariants: a step that cannot go this way goes layer by layer, with the same results to the last
bit; a table names only memory that this object or what it was made from keeps alive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from ..kernels import attention_kernel, linear_tiles_kernel
from ..kernels.affine import AffineGroup
from ..kernels.bgmv import LoraGroup, slot_error
from ..kernels.host import HostKernels
from ..kernels.layers_kernel import LAYER_FIELDS, MODEL_FIELDS, PLAN_FIELDS, layers_kernel
from ..kernels.linear_tiles import TileLinear
from ..kernels.memory import view_at
from .adapters import LayerPlan
from .batch import StepBatch
from .config import ModelConfig
from .groups import Delta, DeltaThenAffine
from .kv import KvCache
from .weights import Weights

MAX_ROWS: Final = 64
"""Tokens of a step that may go this way: with more, the calls between are a small part."""
MAX_PLANS: Final = 256
_GROUPS: Final = 4
"""Groups of a layer of these families: on qkv, o, gate_up, down."""


@dataclass(frozen=True, slots=True)
class _Launches:
    """What a plan launches: the kernel's table, scratch bytes it needs, slots of its tables. The
    plan is kept, so that no other has its identity meanwhile."""

    plan: tuple[LayerPlan, ...]
    table: torch.Tensor | None
    need: int = 0
    max_loras: int = 0


def compiled_layers(
    config: ModelConfig,
    weights: Weights,
    kernels: HostKernels,
    kv: KvCache,
    batch: StepBatch,
    buffers: StepBuffers,
) -> CompiledLayers | None:
    """One call for all layers, or ``None`` where some kernel of them is not compiled: another
    dtype, no numba, a processor without matrix tiles, sizes they do not fit."""
    if not (kernels.uses_tiles and kernels.uses_dot) or config.head_dim % 8:
        return None
    layers = []
    for index, layer in enumerate(weights.layers):
        linears = [layer.qkv, layer.o, layer.gate_up, layer.down]
        packed = [linear.place[0] for linear in linears if isinstance(linear, TileLinear)]
        if len(packed) < len(linears):
            return None
        qkv, o, gate_up, down = packed
        norms = [0 if w is None else w.data_ptr() for w in (layer.q_norm, layer.k_norm)]
        before = [layer.input_norm.data_ptr(), layer.post_norm.data_ptr()]
        cache = [kv.keys[index].data_ptr(), kv.values[index].data_ptr()]
        layers.append([before[0], qkv, o, before[1], gate_up, down, *norms, *cache])
    table = torch.tensor(layers, dtype=torch.int64)
    assert table.shape[1] == LAYER_FIELDS
    return CompiledLayers(config, weights, kernels, batch, buffers, table)


@dataclass(frozen=True, slots=True, eq=False)
class StepBuffers:
    """Dense bf16 buffers of a step, and the rotary tables.

    Attributes:
        hidden, normed: the residual stream and its norm, ``[tokens, hidden]``.
        attended: ``[tokens, q_out]``. acted: ``[tokens, intermediate]``.
        cos, sin: float32 ``[positions, rotary_dim / 2]``.
    """

    hidden: torch.Tensor
    normed: torch.Tensor
    attended: torch.Tensor
    acted: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


class CompiledLayers:
    """Runs all layers of one model for up to `MAX_ROWS` tokens. Made by `compiled_layers`.

    Attributes:
        delta: bf16 ``[rows, hidden]``, the last addition of the step that ran last.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        kernels: HostKernels,
        batch: StepBatch,
        buffers: StepBuffers,
        layers: torch.Tensor,
    ) -> None:
        self._config, self._scratch, self._layers = config, kernels.scratch, layers
        self._rows = rows = min(MAX_ROWS, batch.limits.max_step_tokens)
        self._qkv = torch.zeros((rows, config.qkv_out), dtype=torch.bfloat16)
        self.delta = torch.zeros((rows, config.hidden), dtype=torch.bfloat16)
        self._gate_up = torch.zeros((rows, 2 * config.intermediate), dtype=torch.bfloat16)
        # The addresses below stay good as long as these do; the cache is its owner's to close.
        self._kept = weights, batch, buffers
        tables, cos = batch.block_tables, buffers.cos
        sizes = [config.num_layers, config.hidden, config.heads, config.kv_heads, config.head_dim]
        arrays = (batch.row_seq, batch.lens, buffers.hidden, buffers.normed, self._qkv)
        more = (buffers.attended, self.delta, self._gate_up, buffers.acted)
        self._model = torch.tensor(
            [*sizes, cos.shape[1], config.intermediate]
            + [cos.data_ptr(), buffers.sin.data_ptr(), batch.positions.data_ptr()]
            + [batch.slot_mapping.data_ptr(), tables.data_ptr(), tables.stride(0)]
            + [array.data_ptr() for array in arrays + more],
            dtype=torch.int64,
        )
        assert len(self._model) == MODEL_FIELDS
        widest = max(config.hidden, config.q_out, config.intermediate)
        self._need = max(
            attention_kernel.scratch_bytes(
                config.heads, config.kv_heads, config.head_dim, tables.shape[1]
            ),
            linear_tiles_kernel.scratch_bytes(widest, rows),
        )
        # By the identity of the plan.
        self._launches: dict[int, _Launches] = {}

    def run(self, n: int, plan: tuple[LayerPlan, ...] | None, row_slots: int) -> bool:
        """`LlamaModel.layers` of ``n`` tokens, the last addition left in ``delta``; or nothing at
        all and False: too many tokens, or a group the kernel does not know.

        Raises:
            InternalError: slot-out-of-range.
        """
        if n > self._rows:
            return False
        launches = None
        if plan is not None:
            launches = self._launches.get(id(plan)) or self._list(plan)
            if launches.table is None:
                return False
        config, need = self._config, self._need
        bad: int = layers_kernel(
            0,
            self._model.data_ptr(),
            self._layers.data_ptr(),
            n,
            config.rms_eps,
            config.head_dim**-0.5,
            0 if launches is None or launches.table is None else launches.table.data_ptr(),
            row_slots,
            self._scratch.at_least(need if launches is None else max(need, launches.need)),
        )
        if launches is not None and bad >= 0:
            slot = int(view_at(row_slots, (n,), torch.int32)[bad])
            raise slot_error(bad, slot, launches.max_loras)
        return True

    def _list(self, plan: tuple[LayerPlan, ...]) -> _Launches:
        groups = [_parts(delta) for layer in plan for delta in layer[:_GROUPS]]
        known = [parts for parts in groups if parts is not None]
        made = _Launches(plan, None)
        if len(known) == len(groups):
            fields = [0 if part is None else part.address for parts in known for part in parts]
            loras = [lora for lora, _ in known if lora is not None]
            made = _Launches(
                plan,
                torch.tensor(fields, dtype=torch.int64).view(len(plan), PLAN_FIELDS),
                max((lora.scratch_bytes(self._rows) for lora in loras), default=0),
                loras[0].max_loras if loras else 0,
            )
        if len(self._launches) >= MAX_PLANS:
            self._launches.clear()
        self._launches[id(plan)] = made
        return made


def _parts(delta: Delta | None) -> tuple[LoraGroup | None, AffineGroup | None] | None:
    """The kernel's two parts of a launch, or ``None`` for one it does not know."""
    if delta is None:
        return None, None
    lora, vectors = (
        (delta.lora, delta.affine) if isinstance(delta, DeltaThenAffine) else (delta, None)
    )
    if not isinstance(lora, LoraGroup) or not lora.dot:
        return None
    if vectors is not None and not isinstance(vectors, AffineGroup):
        return None
    return lora, vectors
