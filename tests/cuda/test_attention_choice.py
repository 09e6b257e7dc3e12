"""Which way to attend is chosen, and what is said of the others."""

from __future__ import annotations

import logging
import re
import sys

import pytest

from rota.errors import DeviceError
from rota.gpu.model.torch_attention import TorchAttention
from rota.gpu.model.torch_attention_choice import CANDIDATES, Candidate, choose_attention
from rota.gpu.model.torch_attention_flashinfer import FlashInferAttention

from .wrong_ways import OneShort, Wrong


def test_auto_takes_the_first_that_agrees_and_says_why_not_the_others(host, kernels, caplog):
    caplog.set_level(logging.INFO, "rota.gpu.model.torch_attention")
    undone = []
    candidates = (
        Candidate("torch-varlen", "wrong", OneShort, lambda: undone.append("wrong")),
        *CANDIDATES[1:],
    )
    choice = choose_attention("auto", host.spec(), graphs=False, candidates=candidates)
    assert choice.name == "flashinfer" and choice.make is FlashInferAttention
    assert undone == ["wrong"]
    assert [reason.partition(":")[0] for reason in choice.passed_over] == [
        "torch-varlen (wrong)",
        "torch-varlen (FA3)",
        "torch-varlen (FA4)",
    ]
    said = [(r.levelname, r.getMessage()) for r in caplog.records]
    assert [level for level, _ in said] == ["WARNING", "INFO", "INFO", "INFO"]
    assert re.search(
        r"torch-varlen \(wrong\) is not used: decode: a row of \d+ keys is [\d.]+ off", said[0][1]
    )
    assert "flashinfer agrees" in said[3][1]


def test_torchs_own_kernel_comes_first(host, kernels):
    flash, module = kernels
    choice = choose_attention("auto", host.spec(), graphs=False)
    assert (choice.name, choice.passed_over) == ("torch-varlen", ())
    assert flash.calls == 2 and module.BatchDecodeWithPagedKVCacheWrapper.made == 0


def test_without_kernels_torch_serves(host, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    choice = choose_attention("auto", host.spec(), graphs=False)
    assert choice.name == "torch" and choice.make is TorchAttention
    assert [reason.partition(":")[0] for reason in choice.passed_over] == [
        str(candidate) for candidate in CANDIDATES
    ]
    assert "no flash attention on CPU" in choice.passed_over[0]
    assert "flashinfer" in choice.passed_over[3]


def test_torch_by_name_tries_nothing(host, kernels):
    choice = choose_attention("torch", host.spec(), graphs=False)
    assert (choice.name, choice.passed_over) == ("torch", ())
    assert kernels[0].calls == 0


def test_a_way_by_name_is_used_or_refused(host, kernels, monkeypatch):
    assert choose_attention("flashinfer", host.spec(), graphs=False).passed_over == ()
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(DeviceError) as caught:
        choose_attention("flashinfer", host.spec(), graphs=False)
    assert (caught.value.code, caught.value.subject) == ("attention-unavailable", "flashinfer")
    assert "ModuleNotFoundError" in str(caught.value.found)


def test_a_device_that_a_way_breaks_ends_the_load(host, caplog):
    class Breaks(Wrong):
        def decode(self, tables, lens, zero):
            raise DeviceError("an illegal address", code="device-dead")

    tried = (Candidate("flashinfer", "", Breaks), Candidate("torch-varlen", "", TorchAttention))
    with pytest.raises(DeviceError) as caught:
        choose_attention("auto", host.spec(), graphs=False, candidates=tried)
    assert caught.value.code == "device-dead"
    assert "the device was lost while flashinfer was tried" in caplog.text
