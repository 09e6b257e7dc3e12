"""Which weights and which forward pass a family has on the host.

What it owns: nothing. Invariant: weights that `read` made of a config are those `bind` expects for
it.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

from ..kernels.host import HostKernels
from .batch import StepBatch
from .config import ModelConfig
from .hybrid import HybridModel
from .kv import KvCache
from .llama import LlamaModel
from .states import StateArena
from .tensors import Progress
from .weights import DtypeName, HybridWeights, Weights, load_hybrid_weights, load_weights

HostModel = LlamaModel | HybridModel
HostWeights = Weights | HybridWeights


def read(
    model_dir: Path,
    config: ModelConfig,
    dtype: DtypeName,
    *,
    use_numba: bool,
    told: Progress | None = None,
) -> tuple[HostWeights, HostKernels]:
    """The weights of ``model_dir``, and the kernels they were packed for.

    Raises:
        ModelError: as `load_weights` and `load_hybrid_weights`.
    """
    load = load_hybrid_weights if config.gated else load_weights
    weights, kernels = load(model_dir, config, dtype, use_numba=use_numba, told=told)
    kernels.settle()
    return weights, kernels


def bind(
    config: ModelConfig,
    weights: HostWeights,
    kernels: HostKernels,
    kv: KvCache,
    batch: StepBatch,
    states: StateArena | None,
    positions: int,
) -> HostModel:
    """The forward pass over this memory, for ``positions`` positions."""
    if config.gated:
        hybrid = cast(HybridWeights, weights)
        return HybridModel(config, hybrid, kernels, kv, batch, states, positions=positions)
    plain = cast(Weights, weights)
    return LlamaModel(config, plain, kernels, kv, batch, positions=positions)
