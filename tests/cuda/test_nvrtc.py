"""Compilation and its cache: keys, damage, refusals."""

from __future__ import annotations

import logging

import pytest

from rota.errors import DeviceError
from rota.gpu.device import KernelSpec

SOURCE = 'extern "C" __global__ void k(int* p) { p[0] = 1; }'


@pytest.fixture
def compiler(cuda_machine, tmp_path):
    from rota.gpu.cuda_nvrtc import Compiler

    def make(capability=(9, 0), form="cubin", cache=True):
        return Compiler(capability, form=form, cache_dir=tmp_path if cache else None)

    return make


def test_code_comes_from_the_cache_the_second_time_bit_for_bit(compiler, tmp_path):
    first = compiler().compile(SOURCE, "k")
    assert first.code[:4] == b"\x7fELF" and "registers" in first.report
    again = compiler().compile(SOURCE, "k")
    assert (again.code, again.report) == (first.code, "")
    assert len(list(tmp_path.iterdir())) == 1
    fresh = compiler(cache=False).compile(SOURCE, "k")
    assert fresh.report and len(list(tmp_path.iterdir())) == 1


def test_source_architecture_and_form_are_parts_of_the_key(compiler, tmp_path):
    images = [
        compiler().compile(SOURCE, "k"),
        compiler().compile(SOURCE + "\n", "k"),
        compiler((8, 0)).compile(SOURCE, "k"),
        compiler(form="ptx").compile(SOURCE, "k"),
    ]
    assert all(image.report or image.code for image in images)
    assert len(list(tmp_path.iterdir())) == 4
    assert b".visible .entry k(" in images[3].code


@pytest.mark.parametrize("damage", [lambda raw: raw[:-1], lambda raw: raw[:40], lambda raw: b""])
def test_a_damaged_entry_is_made_again(compiler, tmp_path, caplog, damage):
    good = compiler().compile(SOURCE, "k").code
    (entry,) = tmp_path.iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(damage(whole))
    with caplog.at_level(logging.WARNING, logger="rota.gpu.cuda.nvrtc"):
        assert compiler().compile(SOURCE, "k").code == good
    assert "damaged" in caplog.text
    assert entry.read_bytes() == whole
    assert compiler().compile(SOURCE, "k").report == ""


def test_a_cache_that_cannot_be_written_costs_a_log_line_only(cuda_machine, tmp_path, caplog):
    from rota.gpu.cuda_nvrtc import Compiler

    (tmp_path / "file").write_bytes(b"")
    with caplog.at_level(logging.WARNING, logger="rota.gpu.cuda.nvrtc"):
        image = Compiler((9, 0), cache_dir=tmp_path / "file").compile(SOURCE, "k")
    assert image.code and "was not cached" in caplog.text


def test_source_that_does_not_compile_is_refused_with_the_log(compiler, tmp_path):
    with pytest.raises(DeviceError) as caught:
        compiler().compile("extern void k( {", "broken")
    assert (caught.value.code, caught.value.subject) == ("bad-argument", "broken")
    assert "error:" in caught.value.message and "broken.cu" in caught.value.message
    assert list(tmp_path.iterdir()) == []


def test_a_kernel_that_is_not_in_its_source_is_refused_and_the_module_is_unloaded_at_close(rig):
    with pytest.raises(DeviceError) as caught:
        rig.device.load_kernel(KernelSpec("absent", "p", cuda_source=SOURCE))
    assert (caught.value.code, caught.value.found) == ("bad-argument", "CUDA_ERROR_NOT_FOUND")


def test_kernels_of_one_source_share_a_module(rig):
    source = SOURCE + SOURCE.replace(" k(", " other(")
    for name in ("k", "other", "k"):
        rig.device.load_kernel(KernelSpec(name, "p", cuda_source=source))
    if rig.driver is not None:
        assert rig.driver.calls["cuModuleLoadData"] == 1
