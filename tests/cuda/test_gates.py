"""Gates on what the compiler makes of the kernels, for every architecture, without a GPU.

Registers and spills come from the compiler's report, the widths of loads from the machine code.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess

import pytest
import torch

from rota.gpu.kernels.affine_device import affine_spec
from rota.gpu.kernels.lookup_device import lookup_spec
from rota.gpu.kernels.lora_device import lora_specs
from rota.gpu.kernels.tables_device import refresh_spec

CAPABILITIES = ((8, 0), (9, 0), (10, 0), (12, 0))
RANKS = (8, 16, 24, 40, 64, 128)
REGISTERS = {"lora_shrink": 96, "lora_expand": 168, "lora_refresh": 32}
"""96 registers keep 5 blocks of 128 threads on a multiprocessor, 168 keep 3 (rank 128 only).

With ten (at rank 128 sixteen) loads of 16 bytes a thread, 100 KB (96 KB) are in flight then: well
above the 23 KB that hide the latency of memory."""


@pytest.fixture(scope="session")
def compiled(cuda_machine):
    """(code, {kernel: (registers, spilled bytes, shared bytes)}) of a source for a capability."""
    from rota.gpu.cuda_nvrtc import Compiler

    @functools.cache
    def make(spec, capability):
        image = Compiler(capability).compile(spec.cuda_source, spec.name)
        found = {}
        parts = re.split(r"Compiling entry function '(\w+)'", image.report)[1:]
        for name, text in zip(parts[::2], parts[1::2], strict=True):
            spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", text)]
            registers = re.search(r"Used (\d+) registers", text)
            shared = re.search(r"(\d+) bytes smem", text)
            assert registers is not None, text
            found[name] = (
                int(registers.group(1)),
                sum(spilled),
                int(shared.group(1)) if shared else 0,
            )
        return image.code, found

    return make


@pytest.fixture(scope="session")
def disassembled(cuda_machine):
    """The machine code of each kernel in a cubin, as text."""
    pathfinder = pytest.importorskip("cuda.pathfinder", reason="cuda-pathfinder is not installed")
    tool = pathfinder.find_nvidia_binary_utility("cuobjdump")
    partner = pathfinder.find_nvidia_binary_utility("nvdisasm")
    if tool is None or partner is None:
        pytest.skip("nvidia-cuda-cuobjdump or nvidia-cuda-nvdisasm is not installed")

    def run(code, folder):
        path = folder / "kernel.cubin"
        path.write_bytes(code)
        # cuobjdump runs nvdisasm from its own folder or the path.
        beside = folder / "nvdisasm"
        if not beside.exists():
            beside.symlink_to(partner)
        out = subprocess.run(
            [tool, "--dump-sass", str(path)],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env={"PATH": f"{folder}:{os.defpath}"},
        ).stdout
        parts = re.split(r"Function : (\w+)", out)[1:]
        return dict(zip(parts[::2], parts[1::2], strict=True))

    return run


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: f"sm_{c[0]}{c[1]}")
def test_registers_and_spills(compiled, capability, rank):
    _, found = compiled(lora_specs(rank, 512)[0], capability)
    assert set(found) == {"lora_shrink", "lora_expand"}
    for name, (registers, spilled, shared) in found.items():
        assert spilled == 0, (name, spilled)
        most = 96 if rank <= 64 else REGISTERS[name]
        assert registers <= most, (name, registers)
        # The driver keeps 1 KB of shared memory a block for itself on newer architectures.
        assert shared <= (16 * rank + 1024 if name == "lora_expand" else 1024), (name, shared)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: f"sm_{c[0]}{c[1]}")
def test_the_float32_kernels(compiled, disassembled, tmp_path, capability, rank):
    code, found = compiled(lora_specs(rank, 512, torch.float32)[0], capability)
    assert set(found) == {"lora_shrink", "lora_expand"}
    for name, (registers, spilled, shared) in found.items():
        assert spilled == 0, (name, spilled)
        # Weights twice as wide: 128 registers keep 4 blocks of the expand on a multiprocessor.
        most = 96 if name == "lora_shrink" else 128 if rank <= 64 else REGISTERS[name]
        assert registers <= most, (name, registers)
        assert shared <= (16 * rank + 1024 if name == "lora_expand" else 1024), (name, shared)
    if rank == 64:
        for text in disassembled(code, tmp_path).values():
            assert len(re.findall(r"\bLDG\.E(?:\.\w+)*\.128", text)) >= 4


@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: f"sm_{c[0]}{c[1]}")
def test_the_table_kernel_is_small(compiled, capability):
    _, found = compiled(refresh_spec(), capability)
    registers, spilled, _ = found["lora_refresh"]
    assert (spilled, registers <= REGISTERS["lora_refresh"]) == (0, True)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=("bf16", "f32"))
@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: f"sm_{c[0]}{c[1]}")
def test_the_affine_kernel_is_small(compiled, capability, dtype):
    _, found = compiled(affine_spec(dtype), capability)
    registers, spilled, _ = found["lora_affine"]
    assert (spilled, registers <= 32) == (0, True)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=("bf16", "f32"))
@pytest.mark.parametrize("rank", (8, 24, 128))
@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: f"sm_{c[0]}{c[1]}")
def test_the_lookup_is_small(compiled, disassembled, tmp_path, capability, rank, dtype):
    code, found = compiled(lookup_spec(rank, dtype), capability)
    registers, spilled, shared = found["lora_lookup"]
    assert (spilled, registers <= 32, shared) == (0, True, 0)
    text = disassembled(code, tmp_path)["lora_lookup"]
    if capability >= (9, 0):  # the expand is let go before anything is read
        assert 0 <= text.index("PREEXIT") < text.index("LDG")


@pytest.mark.parametrize("rank", (8, 16, 64))
@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: f"sm_{c[0]}{c[1]}")
def test_weights_and_input_are_read_sixteen_bytes_at_a_time(
    compiled, disassembled, tmp_path, capability, rank
):
    code, _ = compiled(lora_specs(rank, 512)[0], capability)
    sass = disassembled(code, tmp_path)
    shrink, expand = sass["lora_shrink"], sass["lora_expand"]
    wide = re.compile(r"\bLDG\.E(?:\.\w+)*\.128")
    assert len(wide.findall(shrink)) >= 10  # two steps of one x and four weights each
    lanes = 8 if rank % 64 == 0 else 2 if rank % 16 == 0 else 1
    packs = rank // 8 // lanes
    tiles = 4 if rank <= 8 else 2 if rank <= 16 else 1
    assert len(wide.findall(expand)) >= lanes * packs * tiles >= 3
    assert len(re.findall(r"\bLDS(?:\.\w+)*\.128", expand)) >= 2
    assert len(re.findall(r"\bLDG\.E\.NA\.128", shrink)) >= 8  # weights stay out of L1
    for text in (shrink, expand):
        assert "ATOM" not in text and "RED" not in re.findall(r"^\s*/\*\w+\*/\s+(\w+)", text, re.M)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=("bf16", "f32"))
@pytest.mark.parametrize("rank", (8, 16, 64, 128))
@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: f"sm_{c[0]}{c[1]}")
def test_the_expand_asks_for_its_weights_before_it_waits_for_the_shrink(
    compiled, disassembled, tmp_path, capability, rank, dtype
):
    code, _ = compiled(lora_specs(rank, 512, dtype)[0], capability)
    sass = disassembled(code, tmp_path)
    shrink, expand = sass["lora_shrink"], sass["lora_expand"]
    if capability < (9, 0):
        assert "ACQBULK" not in expand and "PREEXIT" not in shrink
        return
    # The next kernel is let go before the first weights are asked for.
    assert 0 <= shrink.index("PREEXIT") < shrink.index("LDG.E.NA.128")
    loads = re.findall(r"ACQBULK|BAR\.SYNC|LDG\.E\S*", expand)
    barrier = loads.index("BAR.SYNC")
    # Blocks without work wait elsewhere; of those with work, this is the wait.
    wait = max(at for at, text in enumerate(loads[:barrier]) if "ACQBULK" in text)
    wide = [at for at, text in enumerate(loads) if text.startswith("LDG.E.128")]
    assert len(wide) >= 3 and max(wide) < wait
    # Between it and the barrier the planes alone, and not by the read-only path.
    planes = loads[wait + 1 : barrier]
    assert planes and set(planes) == {"LDG.E"}


def test_a_kernel_that_spills_would_be_seen(compiled):
    from rota.gpu.device import KernelSpec

    source = """
extern "C" __global__ void __launch_bounds__(1024, 2) hungry(float* p) {
    float v[96];
    for (int i = 0; i < 96; ++i) v[i] = p[i * 1024 + threadIdx.x];
    for (int r = 0; r < 9; ++r)
        for (int i = 0; i < 96; ++i) v[i] = v[i] * v[(i * 7 + r) % 96] + v[(i + 1) % 96];
    for (int i = 0; i < 96; ++i) p[i * 1024 + threadIdx.x] = v[i];
}
"""
    _, found = compiled(KernelSpec("hungry", "p", cuda_source=source), (9, 0))
    assert found["hungry"][1] > 0
