"""Faults put in on purpose: each must be caught, by name, where it happens."""

from __future__ import annotations

import ctypes
import dataclasses

import numpy as np
import pytest

from rota.errors import DeviceError
from rota.gpu.device import KernelSpec
from rota.gpu.kernels import lora_device
from rota.gpu.kernels.lora_device import lora_specs

ONE = (1, 1, 1)


def dead(rig, call):
    """The story of a call that must lose the device."""
    with pytest.raises(DeviceError) as caught:
        call()
        rig.device.synchronize(rig.stream)
    assert caught.value.code == "device-dead", caught.value
    assert caught.value.found.startswith("CUDA_ERROR_")
    return rig.driver.story[-1]


def kernel(rig, source, params, name="k"):
    return rig.device.load_kernel(KernelSpec(name, params, cuda_source=source))


def test_an_overrun_of_eight_elements_is_caught_at_its_load(fake_rig, problem):
    p = problem(n=1, k_in=64, rank=8, widths=(16,), slots=[0]).load(fake_rig)
    short = fake_rig.up(p.a[0, 0].ravel()[:-8], "short A")
    p.a_cells[0, 0] = short
    fake_rig.write(p.a_table, p.a_cells)
    story = dead(fake_rig, p.apply)
    assert "lora_shrink: `ld.global.nc" in story
    assert "16 bytes past the end of the device allocation of 1008 bytes" in story


def test_an_overrun_of_the_output_is_caught_at_its_store(fake_rig, problem):
    p = problem(n=2, k_in=64, rank=8, widths=(16,), slots=[0, 1]).load(fake_rig)
    small = fake_rig.up(p.out.ravel()[: -p.gap - 1], "small out")
    p.out_addr = small
    story = dead(fake_rig, p.apply)
    assert "lora_expand: `" in story and "out of bounds" in story


def test_a_missing_barrier_is_a_race(fake_rig, problem, monkeypatch):
    def without_barrier(*made_for):
        shrink, expand = lora_specs(*made_for)
        source = expand.cuda_source.replace("__syncthreads();", "")
        assert source != expand.cuda_source
        return tuple(dataclasses.replace(spec, cuda_source=source) for spec in (shrink, expand))

    monkeypatch.setattr(lora_device, "lora_specs", without_barrier)
    p = problem(n=1, k_in=64, rank=64, widths=(128,), slots=[0]).load(fake_rig)
    assert "race in shared memory between warps" in dead(fake_rig, p.apply)


def test_a_barrier_not_all_threads_reach_is_caught(fake_rig):
    source = """
extern "C" __global__ void k(int* p) {
    if (threadIdx.x < 32) __syncthreads();
    p[threadIdx.x] = 1;
}"""
    k, p = kernel(fake_rig, source, "p"), fake_rig.up(np.zeros(64, np.int32))
    story = dead(
        fake_rig, lambda: fake_rig.device.launch(k, ONE, (64, 1, 1), (p,), fake_rig.stream)
    )
    assert "only 32 of 64 threads reach a barrier" in story


def test_a_misaligned_sixteen_byte_load_is_caught(fake_rig, problem):
    p = problem(n=1, k_in=64, rank=8, widths=(16,), slots=[0]).load(fake_rig)
    odd = fake_rig.up(np.concatenate([np.zeros(1, np.uint16), p.a[0, 0].ravel()]), "odd A")
    p.a_cells[0, 0] = odd + 2
    fake_rig.write(p.a_table, p.a_cells)
    assert "misaligned 16-byte access" in dead(fake_rig, p.apply)


def test_two_blocks_that_store_to_one_address_are_caught(fake_rig):
    source = """extern "C" __global__ void k(int* p) { p[threadIdx.x] = 7; }"""
    k, p = kernel(fake_rig, source, "p"), fake_rig.up(np.zeros(32, np.int32))
    story = dead(
        fake_rig,
        lambda: fake_rig.device.launch(k, (2, 1, 1), (32, 1, 1), (p,), fake_rig.stream),
    )
    assert "both store to" in story


def test_lanes_that_store_different_values_to_one_address_are_caught(fake_rig):
    source = """extern "C" __global__ void k(int* p) { p[0] = threadIdx.x; }"""
    k, p = kernel(fake_rig, source, "p"), fake_rig.up(np.zeros(1, np.int32))
    story = dead(
        fake_rig, lambda: fake_rig.device.launch(k, ONE, (32, 1, 1), (p,), fake_rig.stream)
    )
    assert "two lanes store different values" in story


def test_a_loop_without_end_ends(fake_rig, monkeypatch):
    monkeypatch.setattr("rota.gpu.fakecuda.ptx_exec.MAX_STEPS", 10_000)
    source = """extern "C" __global__ void k(volatile int* p) { while (p[0] == 0) {} }"""
    k, p = kernel(fake_rig, source, "p"), fake_rig.up(np.zeros(1, np.int32))
    story = dead(fake_rig, lambda: fake_rig.device.launch(k, ONE, ONE, (p,), fake_rig.stream))
    assert "a loop without end" in story


def test_a_shuffle_from_lanes_that_left_is_caught(fake_rig):
    source = """
extern "C" __global__ void k(int* p) {
    if (threadIdx.x >= 16) return;
    p[threadIdx.x] = __shfl_xor_sync(0xffffffffu, (int)threadIdx.x, 16);
}"""
    k, p = kernel(fake_rig, source, "p"), fake_rig.up(np.zeros(32, np.int32))
    story = dead(
        fake_rig, lambda: fake_rig.device.launch(k, ONE, (32, 1, 1), (p,), fake_rig.stream)
    )
    assert "not all lanes of the mask run the shuffle" in story


def test_an_unknown_instruction_is_refused_by_its_text(fake_rig):
    source = """extern "C" __global__ void k(float* p) { p[0] = __sinf(p[0]); }"""
    k, p = kernel(fake_rig, source, "p"), fake_rig.up(np.zeros(1, np.float32))
    story = dead(fake_rig, lambda: fake_rig.device.launch(k, ONE, ONE, (p,), fake_rig.stream))
    assert "sin.approx" in story and "not known to the interpreter" in story


def capture(rig, p):
    rig.device.begin_capture(rig.stream)
    p.apply()
    graph = rig.device.end_capture(rig.stream)
    made = rig.device.instantiate(graph)
    rig.device.destroy_graph(graph)
    return made


def test_a_slot_freed_under_a_graph_is_caught_through_its_table(fake_rig, problem):
    p = problem(n=2, k_in=64, rank=8, widths=(16,), slots=[0, 1]).load(fake_rig)
    graph = capture(fake_rig, p)
    fake_rig.device.replay(graph, fake_rig.stream)
    fake_rig.device.synchronize(fake_rig.stream)
    gone = int(p.a_cells[0, 1])
    fake_rig.device.free(gone)
    fake_rig.held.remove(gone)
    story = dead(fake_rig, lambda: fake_rig.device.replay(graph, fake_rig.stream))
    assert "lora_shrink: `ld.global.nc" in story and "used after free" in story
    fake_rig.device.destroy_exec(graph)


def test_a_table_freed_under_a_graph_is_refused_before_the_driver_is_asked(rig, problem):
    p = problem(n=2, k_in=64, rank=8, widths=(16,), slots=[0, 1]).load(rig)
    graph = capture(rig, p)
    rig.device.free(p.rows_addr)
    rig.held.remove(p.rows_addr)
    with pytest.raises(DeviceError) as caught:
        rig.device.replay(graph, rig.stream)
    assert (caught.value.code, caught.value.subject) == ("use-after-free", "row slots")
    rig.device.destroy_exec(graph)


@pytest.mark.parametrize(
    "args",
    [
        lambda p: (p, 4.0),
        lambda p: (p, 1 << 31),
        lambda p: (p, "4"),
        lambda p: (-1, 4),
        lambda p: (1 << 64, 4),
        lambda p: (float(p), 4),
        lambda p: (p,),
        lambda p: (p, 4, 4),
        lambda p: (None, 4),
    ],
)
def test_a_wrong_argument_is_refused_and_nothing_is_launched(rig, args):
    source = """
extern "C" __global__ void k(int* p, int n) {
    if (threadIdx.x < n) p[threadIdx.x] = 7;
}"""
    k, p = kernel(rig, source, "pi"), rig.up(np.zeros(8, np.int32))
    with pytest.raises(DeviceError) as caught:
        rig.device.launch(k, ONE, (8, 1, 1), args(p), rig.stream)
    assert (caught.value.code, caught.value.subject) == ("bad-argument", "k")
    assert not rig.down(p, 8, np.int32).any()


def test_an_address_packed_from_a_wrapper_object_is_caught(fake_rig):
    """cuda.bindings packs a CUdeviceptr object given as c_void_p by its own host address."""
    from cuda.bindings import driver as d

    source = """extern "C" __global__ void k(int* p) { p[0] = 7; }"""
    k, p = kernel(fake_rig, source, "p"), fake_rig.up(np.zeros(1, np.int32))
    wrapped = ((d.CUdeviceptr(p),), (ctypes.c_void_p,))
    stream = fake_rig.device.stream_handle(fake_rig.stream)
    (result,) = d.cuLaunchKernel(k.function, *ONE, *ONE, 0, stream, wrapped, 0)
    assert int(result) == 0  # the driver cannot know
    story = dead(fake_rig, lambda: None)
    assert "outside every allocation" in story or "out of bounds" in story


def test_an_allocation_in_a_capture_is_refused_and_the_capture_can_be_dropped(rig, problem):
    p = problem(n=1, k_in=64, rank=8, widths=(16,), slots=[0]).load(rig)
    rig.device.begin_capture(rig.stream)
    p.apply()
    with pytest.raises(DeviceError) as caught:
        rig.device.alloc(8, label="x")
    assert caught.value.code == "capture-violation"
    assert rig.device.abort_capture_if_active(rig.stream)
    p.apply()
    assert np.array_equal(p.result(), p.expected())


def test_reading_an_unfinished_copy_shows_stale_bytes_and_waiting_cures_it(fake_rig):
    d, s = fake_rig.device, fake_rig.stream
    target = d.pinned_alloc(4, label="target")
    ctypes.memmove(target, b"old.", 4)
    a = fake_rig.up(np.frombuffer(b"new.", np.uint8))
    d.copy_d2h(target, a, 4, s)
    assert ctypes.string_at(target, 4) == b"old."
    event = d.create_event(label="copied")
    d.record_event(event, s)
    d.synchronize_event(event)
    assert ctypes.string_at(target, 4) == b"new."
    d.destroy_event(event)
    d.pinned_free(target)


def test_planes_nobody_wrote_show_as_nan(fake_rig, problem):
    p = problem(n=1, k_in=64, rank=8, widths=(16,), slots=[0]).load(fake_rig)
    real = p.group._device

    class SkipsTheShrink:
        def launch(self, kernel, *rest):
            if kernel.spec.name != "lora_shrink":
                real.launch(kernel, *rest)

    p.group._device = SkipsTheShrink()
    p.apply()
    got = p.result()[0, p.columns[0] : p.columns[0] + 16]
    assert ((got & 0x7FFF) > 0x7F80).all()
