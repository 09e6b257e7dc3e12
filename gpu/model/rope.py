"""Rotary tables.

What it owns: nothing. Formulas: transformers' ``modeling_rope_utils`` (default and "llama3"), the
latter from the Llama 3.1 model code: long wavelengths are slowed by ``factor``, short ones are
kept, and those between are blended.
"""

from __future__ import annotations

import math

import torch

from .config import ModelConfig


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """float32 ``[rotary_dim / 2]``: theta^(-2i/d), scaled where the config says so."""
    size = config.rotary_dim
    half = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    inverse: torch.Tensor = 1.0 / (config.rope_theta**half)
    scaling = config.rope_scaling
    if scaling is None:
        return inverse
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / inverse
    slowed = inverse / scaling.factor
    blend = (scaling.original_context / wavelength - low) / (high - low)
    blended = (1 - blend) * slowed + blend * inverse
    out = torch.where(wavelength > scaling.original_context / low, slowed, blended)
    return torch.where(wavelength < scaling.original_context / high, inverse, out)


def rope_tables(config: ModelConfig, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each float32 ``[positions, rotary_dim / 2]``, for positions 0 upwards."""
    angles = torch.outer(torch.arange(positions).float(), inverse_frequencies(config))
    return angles.cos(), angles.sin()
