"""Conversions: BF16 rounding against torch on every kind of float, and NaN."""

from __future__ import annotations

import numpy as np
import torch

from rota.gpu.lora.layout import Elem
from rota.gpu.lora.pack import bf16_to_f32, to_bf16, to_elem


def by_torch(values: np.ndarray) -> np.ndarray:
    converted = torch.from_numpy(values.copy()).to(torch.bfloat16)
    return converted.view(torch.int16).numpy().view(np.uint16)


def every_kind() -> np.ndarray:
    """float32 of all exponents and signs: random low bits, ties, and their neighbours."""
    rng = np.random.default_rng(5)
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    lows = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, *rng.integers(0, 1 << 16, 4).tolist()]
    return np.concatenate([high | np.uint32(low) for low in lows]).view(np.float32)


def test_float32_rounds_like_torch_and_nan_stays_nan() -> None:
    values = every_kind()
    nan = np.isnan(values)
    found = to_bf16(values)
    np.testing.assert_array_equal(found[~nan], by_torch(values)[~nan])
    assert np.isnan(bf16_to_f32(found[nan])).all()
    np.testing.assert_array_equal(to_bf16(values[~nan], finite=True), found[~nan])
    assert to_bf16(np.zeros((0, 3), np.float32)).shape == (0, 3)


def test_every_float16() -> None:
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    nan = np.isnan(values)
    found = to_bf16(values.reshape(256, 256)).reshape(-1)
    np.testing.assert_array_equal(found[~nan], by_torch(values)[~nan])
    assert np.isnan(bf16_to_f32(found[nan])).all()
    wide = to_elem(values[~nan], Elem.F32)
    np.testing.assert_array_equal(wide, values[~nan].astype(np.float32))


def test_every_bf16_survives_the_round_trip() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    wide = bf16_to_f32(bits)
    nan = np.isnan(wide)
    np.testing.assert_array_equal(to_bf16(wide)[~nan], bits[~nan])
    assert to_elem(bits, Elem.BF16) is bits
