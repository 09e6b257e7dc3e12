"""Which weights and which forward pass a family has on a tensor space.

What it owns: nothing. Invariant: weights that `read` made of a config are those `bind` expects for
it.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch

from ..tensors import TensorSpace
from .config import ModelConfig
from .states import StateArena
from .tensors import Progress
from .torch_hybrid import TorchHybrid
from .torch_kv import TorchKv
from .torch_llama import TorchLlama
from .torch_model import TorchModel
from .torch_ops import TorchPacker
from .weights import DtypeName, HybridWeights, Weights, pack_weights


def read(
    model_dir: Path,
    config: ModelConfig,
    dtype: DtypeName,
    space: TensorSpace,
    told: Progress | None = None,
) -> tuple[Weights | HybridWeights, torch.dtype]:
    """The weights of ``model_dir``, their matrices on the space, and the engine's dtype.

    Raises:
        ModelError: as `pack_weights`.
    """
    weights, packer = pack_weights(
        model_dir, config, dtype, lambda target: TorchPacker(space, target), told
    )
    return weights, packer.dtype


def bind(
    config: ModelConfig,
    weights: Weights | HybridWeights,
    space: TensorSpace,
    kv: TorchKv,
    states: StateArena | None,
    positions: int,
) -> TorchModel:
    """The forward pass over this memory, for ``positions`` positions."""
    if config.gated:
        hybrid = cast(HybridWeights, weights)
        return TorchHybrid(config, hybrid, space, kv, states, positions=positions)
    return TorchLlama(config, cast(Weights, weights), space, kv, positions=positions)
