"""What the probe takes and what it does not: ways that are right, wrong, or wrong in graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rota.gpu.model.torch_attention import TorchAttention
from rota.gpu.model.torch_attention_flashinfer import FlashInferAttention
from rota.gpu.model.torch_attention_probe import why_not
from rota.gpu.model.torch_attention_varlen import varlen_as_it_is

from .paged_kernels import GEOMETRIES
from .wrong_ways import (
    Bakes,
    BakesTables,
    Foresees,
    InOrder,
    Interleaved,
    Nan,
    NoPrefix,
    NoScale,
    OneLong,
    OneShort,
    Raises,
    Touches,
    Transposed,
    Uncapturable,
    Unshaped,
)

WRONG = {
    Transposed: "decode: a row of ",
    OneShort: "decode: a row of ",
    OneLong: "decode: a row of 1 keys is not finite",
    Touches: "decode: a row of 1 keys is not finite",
    InOrder: "decode: a row of ",
    Interleaved: "decode: a row of ",
    NoScale: "decode: a row of ",
    Nan: "decode: a row of 1 keys is not finite",
    Unshaped: "decode: shape (1, 12, 64) where (12, 64) is expected",
    NoPrefix: "mixed: a row of ",
    Foresees: "mixed: a row of ",
    Raises: "RuntimeError: page size 16 is not supported by this kernel",
}


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("way", ["torch", "torch-varlen", "flashinfer"])
def test_right_ways_are_taken(host, kernels, way, geometry):
    makes = {
        "torch": TorchAttention,
        "torch-varlen": varlen_as_it_is,
        "flashinfer": FlashInferAttention,
    }
    assert why_not(makes[way], host.spec(*geometry), graphs=False) is None


@pytest.mark.parametrize("way", [varlen_as_it_is, FlashInferAttention, TorchAttention])
def test_right_ways_are_taken_in_graphs(on_driver, kernels, way):
    before = on_driver.space.recorded
    assert why_not(way, on_driver.spec(), graphs=True) is None
    assert on_driver.space.recorded > before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_ways_are_passed_over_by_name(host, wrong, dtype):
    before = wrong.closed
    fault = why_not(wrong, host.spec(dtype=dtype), graphs=False)
    assert fault is not None and fault.made
    assert fault.reason.startswith(WRONG[wrong]), fault.reason
    assert wrong.closed == before + 1


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (Uncapturable, "DeviceError: [capture-violation]"),
        (Bakes, "decode, replayed with other lengths: a row of "),
        (BakesTables, "decode, replayed with other lengths: a row of "),
    ],
)
def test_ways_that_fail_only_in_graphs_are_passed_over(on_driver, wrong, reason):
    fault = why_not(wrong, on_driver.spec(), graphs=True)
    assert fault is not None and fault.reason.startswith(reason), fault
    assert why_not(wrong, on_driver.spec(), graphs=False) is None


def test_a_longer_spec_is_tried_with_the_same_small_problem(host, kernels):
    """The probe's size does not follow from the model's limits."""
    spec = replace(host.spec(), rows=128, blocks=8192)
    assert why_not(FlashInferAttention, spec, graphs=False) is None
