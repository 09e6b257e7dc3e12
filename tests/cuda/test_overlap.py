"""Kernels that begin while the one before still runs: right where they wait, caught where not."""

from __future__ import annotations

import ctypes
import dataclasses

import numpy as np
import pytest

from rota.errors import DeviceError
from rota.gpu.device import KernelSpec
from rota.gpu.kernels import lora_device
from rota.gpu.kernels.lora_device import lora_specs

ONE, LANES = (1, 1, 1), (32, 1, 1)
WAIT = 'asm volatile("griddepcontrol.wait;" ::: "memory");'
FIRST = """extern "C" __global__ void first(int* p, int v) {
    asm volatile("griddepcontrol.launch_dependents;");
    p[threadIdx.x] = v;
}"""


def second(body):
    """A kernel that may begin early: ``q`` is its own output, ``p`` what `FIRST` writes."""
    source = f"""extern "C" __global__ void second(volatile int* q, volatile int* p) {{
    const int i = threadIdx.x;
    {body}
}}"""
    return KernelSpec("second", "pp", cuda_source=source, overlaps=True)


class Pair:
    """The two kernels, and memory for them."""

    def __init__(self, rig, body):
        d = rig.device
        self.rig = rig
        self.first = d.load_kernel(KernelSpec("first", "pi", cuda_source=FIRST))
        self.second = d.load_kernel(second(body))
        self.p, self.q = (rig.up(np.zeros(32, np.int32), name) for name in "pq")

    def launch(self, value=7, between=lambda: None):
        device, stream = self.rig.device, self.rig.stream
        device.launch(self.first, ONE, LANES, (self.p, value), stream)
        between()
        device.launch(self.second, ONE, LANES, (self.q, self.p), stream)

    def result(self):
        return self.rig.down(self.q, 32, np.int32).tolist()


def story(rig, call):
    """What is said of a call that must lose the device."""
    with pytest.raises(DeviceError) as caught:
        call()
        rig.device.synchronize(rig.stream)
    assert caught.value.code == "device-dead", caught.value
    return rig.driver.story[-1]


def test_a_kernel_that_waits_sees_what_the_one_before_wrote(rig):
    pair = Pair(rig, f"{WAIT} q[i] = p[i] + 1;")
    pair.launch()
    assert pair.result() == [8] * 32
    if rig.driver:
        assert rig.driver.calls["cuLaunchKernelEx"] == rig.driver.calls["cuLaunchKernel"] == 1


FAULTS = {
    "reads first": (
        f"const int v = p[i]; {WAIT} q[i] = v;",
        "reads what the kernel before stores, before griddepcontrol.wait",
    ),
    "stores first": (f"q[i] = 1; {WAIT}", "stores before griddepcontrol.wait"),
    "one thread waits for all": (
        f"if (i == 0) {{ {WAIT} }} q[i] = p[i];",
        "before griddepcontrol.wait",
    ),
    "read-only path": (
        f'{WAIT} int v; asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(p + i)); '
        "q[i] = v;",
        "the read-only path to memory that the kernel before stores to",
    ),
    "nobody waits": ("if (i > 31) q[i] = 1;", "no thread waits for the kernel before"),
}


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_kernel_that_does_not_is_caught(fake_rig, fault, captured):
    body, said = FAULTS[fault]
    pair, d, s = Pair(fake_rig, body), fake_rig.device, fake_rig.stream
    if not captured:
        assert said in story(fake_rig, pair.launch)
        return
    d.begin_capture(s)
    pair.launch()
    graph = d.end_capture(s)
    made = d.instantiate(graph)
    assert said in story(fake_rig, lambda: d.replay(made, s))
    d.destroy_exec(made)
    d.destroy_graph(graph)


def test_after_anything_but_a_kernel_nothing_overlaps(fake_rig):
    pair = Pair(fake_rig, f"const int v = p[i]; {WAIT} q[i] = v;")
    d, s = fake_rig.device, fake_rig.stream
    other = fake_rig.up(np.zeros(1, np.int32))
    pair.launch(5, between=lambda: d.memset(other, 0, 4, s))
    assert pair.result() == [5] * 32


def test_an_early_kernel_may_be_followed_while_the_first_still_runs(fake_rig):
    """Three in a row: what the first wrote is not safe for the third before it waits."""
    pair = Pair(fake_rig, f"{WAIT} if (i > 31) q[i] = p[i];")
    late = fake_rig.device.load_kernel(
        dataclasses.replace(
            second(f"const int v = p[i]; {WAIT} q[i] = v;"),
            name="third",
            cuda_source=second(f"const int v = p[i]; {WAIT} q[i] = v;").cuda_source.replace(
                "second", "third"
            ),
        )
    )

    def three():
        pair.launch()
        fake_rig.device.launch(late, ONE, LANES, (pair.q, pair.p), fake_rig.stream)

    assert "third: " in story(fake_rig, three)


def test_a_graph_begins_after_what_was_before_it_and_is_right_every_time(rig):
    pair, d, s = Pair(rig, f"{WAIT} q[i] = p[i] + 1;"), rig.device, rig.stream
    d.begin_capture(s)
    pair.launch(3)
    graph = d.end_capture(s)
    made = d.instantiate(graph)
    for _ in range(3):
        d.memset(pair.q, 0, 128, s)
        d.replay(made, s)
        assert pair.result() == [4] * 32
    pair.launch(9)
    assert pair.result() == [10] * 32
    d.destroy_exec(made)
    d.destroy_graph(graph)


def with_source(monkeypatch, change):
    """The LoRA kernels with their text changed."""

    def changed(*made_for):
        specs = lora_specs(*made_for)
        source = change(specs[0].cuda_source)
        assert source != specs[0].cuda_source
        return tuple(dataclasses.replace(spec, cuda_source=source) for spec in specs)

    monkeypatch.setattr(lora_device, "lora_specs", changed)


def wait_late(source):
    call = "  wait_for_kernel_before();\n  for (int i"
    assert call in source
    source = source.replace(call, "  for (int i")
    return source.replace(
        "  __syncthreads();\n", "  wait_for_kernel_before();\n  __syncthreads();\n"
    )


LORA_FAULTS = {
    "no wait": (lambda s: s.replace(WAIT, ""), "before griddepcontrol.wait"),
    "waits after the planes": (wait_late, "before griddepcontrol.wait"),
    "planes by the read-only path": (
        lambda s: s.replace("ld.global.f32", "ld.global.nc.f32"),
        "the read-only path",
    ),
}


@pytest.mark.parametrize("fault", LORA_FAULTS)
def test_planted_in_the_lora_kernels_each_is_caught(fake_rig, problem, monkeypatch, fault):
    change, said = LORA_FAULTS[fault]
    with_source(monkeypatch, change)
    p = problem(n=2, k_in=520, rank=16, widths=(40,), slots=[0, 1]).load(fake_rig)
    found = story(fake_rig, p.apply)
    assert found.startswith("lora_expand: ") and said in found


def test_an_expand_without_work_still_waits_once(fake_rig, problem, monkeypatch):
    """The last slice's B is absent: the shrink writes, no block of the expand has work."""
    p = problem(n=2, k_in=64, rank=8, widths=(32,), slots=[0, -1]).load(fake_rig)
    p.b_cells[0, 0] = 0
    fake_rig.write(p.b_table, p.b_cells)
    p.apply()
    assert np.array_equal(p.result(), p.out)
    with_source(monkeypatch, lambda s: s.replace("(blockIdx.x | blockIdx.y) == 0", "false"))
    careless = problem(n=2, k_in=64, rank=8, widths=(32,), slots=[0, -1]).load(fake_rig)
    careless.b_cells[0, 0] = 0
    fake_rig.write(careless.b_table, careless.b_cells)
    assert "no thread waits" in story(fake_rig, careless.apply)


@pytest.mark.parametrize("wide", [False, True], ids=["bf16", "f32"])
def test_before_compute_capability_nine_launches_are_plain(cuda_machine, problem, new_rig, wide):
    if cuda_machine.fake is None:
        pytest.skip("needs a device of another capability")
    driver = cuda_machine.fake.reset(capability=(8, 0))
    rig = new_rig(cuda_machine.open(checked=True), driver)
    p = problem(n=3, k_in=520, rank=16, widths=(40, 9), slots=[0, 1, 1], wide=wide)
    assert np.array_equal(p.solve(rig), p.expected())
    assert (driver.calls["cuLaunchKernel"], driver.calls["cuLaunchKernelEx"]) == (2, 0)
    rig.close()


def test_the_driver_refuses_what_it_does_not_model(fake_rig):
    from cuda.bindings import driver as d

    pair = Pair(fake_rig, f"{WAIT} q[i] = p[i];")
    attribute = d.CUlaunchAttribute()
    attribute.id = d.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    config = d.CUlaunchConfig()
    config.attrs, config.numAttrs = [attribute], 1
    pointers = (ctypes.c_void_p * 2)()
    (result,) = d.cuLaunchKernelEx(config, pair.second.function, ctypes.addressof(pointers), 0)
    assert result.name == "CUDA_ERROR_NOT_SUPPORTED"
