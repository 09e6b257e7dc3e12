"""Launches: shared memory, shapes, kinds of arguments, threads side by side."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from rota.errors import DeviceError
from rota.gpu.device import KernelSpec

REVERSE = """
extern "C" __global__ void reverse(int* p, int n) {
    extern __shared__ int held[];
    held[threadIdx.x] = p[blockIdx.x * n + threadIdx.x];
    __syncthreads();
    p[blockIdx.x * n + threadIdx.x] = held[n - 1 - threadIdx.x];
}
"""
WHERE = """
extern "C" __global__ void where(int* p) {
    int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    p[block * blockDim.x * blockDim.y * blockDim.z + thread] = block * 1000 + thread;
}
"""
TYPES = """
extern "C" __global__ void types(long long* out, int i, long long l, float f, const int* p) {
    out[0] = i; out[1] = l; out[2] = (long long)(f * 4.0f); out[3] = p[0];
}
"""


@pytest.mark.parametrize("shared", [512, 49152, 65536, 200_000])
def test_dynamic_shared_memory_beyond_the_default_is_opted_in(rig, shared):
    n = 96
    p = rig.up(np.arange(3 * n, dtype=np.int32))
    k = rig.device.load_kernel(KernelSpec("reverse", "pi", cuda_source=REVERSE))
    for _ in range(2):
        rig.device.launch(k, (3, 1, 1), (n, 1, 1), (p, n), rig.stream, shared)
    assert rig.down(p, 3 * n, np.int32).tolist() == list(range(3 * n))
    rig.device.launch(k, (3, 1, 1), (n, 1, 1), (p, n), rig.stream, shared)
    want = np.arange(3 * n).reshape(3, n)[:, ::-1].ravel()
    assert np.array_equal(rig.down(p, 3 * n, np.int32), want)


def test_more_shared_memory_than_there_is_is_refused_and_too_little_is_caught(fake_rig):
    p = fake_rig.up(np.arange(64, dtype=np.int32))
    k = fake_rig.device.load_kernel(KernelSpec("reverse", "pi", cuda_source=REVERSE))
    with pytest.raises(DeviceError) as caught:
        fake_rig.device.launch(k, (1, 1, 1), (64, 1, 1), (p, 64), fake_rig.stream, 300_000)
    assert caught.value.code == "bad-argument"
    with pytest.raises(DeviceError) as caught:
        fake_rig.device.launch(k, (1, 1, 1), (64, 1, 1), (p, 64), fake_rig.stream, 128)
        fake_rig.device.synchronize(fake_rig.stream)
    assert caught.value.code == "device-dead"
    assert "outside the block's 128 shared bytes" in fake_rig.driver.story[0]


def test_grids_and_blocks_of_three_dimensions(rig):
    grid, block = (2, 3, 2), (4, 2, 3)
    p = rig.up(np.zeros(12 * 24, np.int32))
    k = rig.device.load_kernel(KernelSpec("where", "p", cuda_source=WHERE))
    rig.device.launch(k, grid, block, (p,), rig.stream)
    got = rig.down(p, (12, 24), np.int32)
    assert np.array_equal(got, np.arange(12)[:, None] * 1000 + np.arange(24))


@pytest.mark.parametrize(
    ("i", "l", "f"), [(-(2**31), -(2**63), -2.5), (2**31 - 1, 2**63 - 1, 2.25), (0, 1, 3)]
)
# Named by the type they arrive as.
def test_every_kind_of_argument_arrives(rig, i, l, f):  # noqa: E741
    out, p = rig.up(np.zeros(4, np.int64)), rig.up(np.array([77], np.int32))
    k = rig.device.load_kernel(KernelSpec("types", "pilfp", cuda_source=TYPES))
    rig.device.launch(k, (1, 1, 1), (1, 1, 1), (out, i, l, f, p), rig.stream)
    assert rig.down(out, 4, np.int64).tolist() == [i, l, int(f * 4), 77]


@pytest.mark.parametrize(
    ("grid", "block"),
    [
        ((0, 1, 1), (1, 1, 1)),
        ((1, 65536, 1), (1, 1, 1)),
        ((1, 1, 1), (1025, 1, 1)),
        ((1, 1, 1), (32, 32, 2)),
        ((1, 1, 1), (0, 1, 1)),
        ((1 << 40, 1, 1), (1, 1, 1)),
        ((1, 1), (1, 1, 1)),
    ],
)
@pytest.mark.parametrize("checked", [True, False])
def test_bad_shapes_are_refused(cuda_machine, driver, grid, block, checked):
    device = cuda_machine.open(checked=checked)
    stream, p = device.create_stream(label="s"), device.alloc(1 << 16, label="p")
    k = device.load_kernel(KernelSpec("where", "p", cuda_source=WHERE))
    with pytest.raises(DeviceError) as caught:
        device.launch(k, grid, block, (p,), stream)
    assert caught.value.code == "bad-argument"
    device.synchronize(stream)
    device.free(p)
    device.destroy_stream(stream)
    device.close()


def test_threads_launch_one_kernel_on_streams_of_their_own(rig):
    k = rig.device.load_kernel(KernelSpec("where", "p", cuda_source=WHERE))
    targets = [rig.up(np.full(64, -1, np.int32)) for _ in range(4)]
    rig.device.synchronize(rig.stream)
    failures = []

    def work(p):
        try:
            own = rig.device.create_stream(label="own")
            for _ in range(20):
                rig.device.launch(k, (2, 1, 1), (32, 1, 1), (p,), own)
            rig.device.synchronize(own)
            rig.device.destroy_stream(own)
        except BaseException as error:  # a thread: the test sees it in the list
            failures.append(error)

    threads = [threading.Thread(target=work, args=(p,)) for p in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    want = [*range(32), *range(1000, 1032)]
    assert all(rig.down(p, 64, np.int32).tolist() == want for p in targets)
