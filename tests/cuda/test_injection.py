"""An error at every call of every driver function: nothing leaks, nothing hangs, close works."""

from __future__ import annotations

import ctypes
import re
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest

import rota.gpu
from rota.errors import DeviceError
from rota.gpu.device import KernelSpec
from rota.gpu.graphs import GraphCache, GraphKey
from rota.gpu.kernels.bgmv import LoraSlice
from rota.gpu.kernels.lora_device import DeviceLoraGroup, planes_bytes
from rota.gpu.lora.dims import ModelDims
from rota.gpu.lora.image import SlotImage
from rota.gpu.lora.layout import Elem, SlotLayout
from rota.gpu.lora.pool import LoraPool

ONE = (1, 1, 1)
SOURCE = """extern "C" __global__ void k(int* p, int v) { p[threadIdx.x] = v; }"""
EARLY = """extern "C" __global__ void k(int* p, int v) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    p[threadIdx.x] = v;
}"""
NEVER_CALLED = {
    "cuDriverGetVersion",
    "cuCtxGetCurrent",
    "cuCtxSynchronize",
    "cuDeviceTotalMem",
    "cuFuncGetAttribute",
    "cuGraphGetNodes",
    "cuStreamIsCapturing",
}
"""Functions the model has for its own tests, or that only a failure makes the device call."""


def give_back(call, *args):
    """Give back; once more where the driver refused, unless the device is lost or closed."""
    try:
        call(*args)
    except DeviceError as error:
        if error.code not in ("device-dead", "device-closed"):
            with suppress(DeviceError):
                call(*args)


def tour(device):
    """Every operation that reaches the driver, giving back all it takes whatever fails."""
    with ExitStack() as stack:

        def hold(take, back):
            taken = take()
            stack.callback(give_back, back, taken)
            return taken

        s = hold(lambda: device.create_stream(label="s"), device.destroy_stream)
        side = hold(lambda: device.create_stream(label="side"), device.destroy_stream)
        first = hold(lambda: device.create_event(label="first"), device.destroy_event)
        event = hold(lambda: device.create_event(label="e"), device.destroy_event)
        a = hold(lambda: device.alloc(256, label="a"), device.free)
        b = hold(lambda: device.alloc(256, label="b"), device.free)
        host = hold(lambda: device.pinned_alloc(256, label="host"), device.pinned_free)
        page = ctypes.create_string_buffer(256)
        k = device.load_kernel(KernelSpec("k", "pi", cuda_source=SOURCE))
        early = device.load_kernel(KernelSpec("k", "pi", cuda_source=EARLY, overlaps=True))
        device.memory_info()
        device.record_event(first, s)
        device.memset(a, 1, 256, s)
        device.copy_d2h(host, a, 256, s)
        device.copy_h2d(b, host, 256, s)
        device.copy_h2d(b, ctypes.addressof(page), 256, s)
        device.copy_d2d(b, a, 256, s)
        device.record_event(event, s)
        device.wait_event(event, side)
        device.query(side)
        device.query_event(event)
        device.synchronize_event(event)
        device.elapsed_ms(first, event)
        graphs = []
        for value in (1, 2):
            stack.callback(give_back, device.abort_capture_if_active, s)
            device.begin_capture(s)
            device.launch(k, ONE, (32, 1, 1), (b, value), s, 60_000)
            device.launch(early, ONE, (32, 1, 1), (b, value), s)
            graphs.append(hold(lambda: device.end_capture(s), device.destroy_graph))
        graph_exec = hold(lambda: device.instantiate(graphs[0]), device.destroy_exec)
        device.update(graph_exec, graphs[1])
        device.upload(graph_exec, s)
        device.replay(graph_exec, s)
        device.synchronize(s)
        device.query(s)


LAYOUT = SlotLayout(ModelDims(1, 16, 16, 8, 16, 32, 16), 8, Elem.BF16)
ROWS = 2


def serving(device):
    """What an engine asks of a device, small: a pool, kernels under graphs, swaps, another pool."""
    rng = np.random.default_rng(0)
    count = len(LAYOUT.pairs)
    with ExitStack() as stack:
        stream = device.create_stream(label="runner")
        stack.callback(give_back, device.destroy_stream, stream)
        cache = GraphCache(device)

        def alloc(nbytes, label):
            taken = device.alloc(nbytes, label=label)
            stack.callback(give_back, device.free, taken)
            return taken

        x, out = alloc(2 * ROWS * 16, "x"), alloc(2 * ROWS * 32, "out")
        rows = alloc(4 * ROWS, "rows")
        nbytes = planes_bytes(ROWS, 2, LAYOUT.stride, 16)
        planes = alloc(nbytes, "planes")
        slots = np.array([1, 0], np.int32)
        device.memset(x, 0, 2 * ROWS * 16, stream)
        device.memset(out, 0, 2 * ROWS * 32, stream)
        device.copy_h2d(rows, slots.ctypes.data, slots.nbytes, stream)
        for max_loras in (2, 3):
            pool = LoraPool(device, LAYOUT, max_loras, max_rows=ROWS, ahead=True)
            stack.callback(give_back, pool.close)
            slices = tuple(
                LoraSlice(*pool.pair_tables(at), LAYOUT.pairs[at].n_out, 16 * at) for at in (0, 1)
            )
            group = DeviceLoraGroup(
                device, slices, k_in=16, rank=LAYOUT.stride, max_loras=max_loras,
                planes=planes, planes_nbytes=nbytes,
            )  # fmt: skip
            stack.callback(give_back, cache.drain)
            stack.callback(give_back, device.synchronize, stream)

            def step(group=group):
                group.apply(x, 16, out, 32, rows, ROWS, stream)

            for seed in range(3):
                bits = rng.integers(0, 1 << 14, LAYOUT.slot_bytes // 2).astype(np.uint16)
                image = SlotImage(
                    bits.view(np.uint8), (True,) * count, np.ones(count, np.float32),
                    (8,) * count, str(seed), LAYOUT.fingerprint(),
                )  # fmt: skip
                if seed:
                    pool.land(image)  # or not: the commit copies from the host then
                pool.commit(seed % 2, image, stream)
                device.synchronize(stream)
                cache.run(GraphKey("decode", ROWS, "routed"), stream, step)
                got = np.empty((ROWS, 32), np.uint16)
                device.copy_d2h(got.ctypes.data, out, got.nbytes, stream)
            pool.retire(0, stream)
            device.synchronize(stream)
            cache.drain()


def run(machine, faults, tour=tour):
    """One life of a device under faults; (driver, the first error or ``None``)."""
    driver = machine.fake.reset(faults=faults)
    first = None
    device = None
    try:
        device = machine.open(timing=True)
        tour(device)
    except DeviceError as error:
        first = error
    if device is not None:
        if device._dead is None:
            assert device.live_labels() == () or first is not None
        with suppress(DeviceError):
            device.close()
        assert device.live_labels() == ()
        device.close()
    return driver, first


@pytest.fixture(scope="session")
def counts(cuda_machine):
    """Calls of each driver function in one clean life."""
    if cuda_machine.fake is None:
        pytest.skip("faults are injected into the test driver")
    driver, error = run(cuda_machine, [])
    assert error is None and driver.live() == {}
    return dict(driver.calls)


def test_the_tour_calls_every_function_of_the_model(cuda_machine, counts):
    assert set(cuda_machine.fake.functions) - set(counts) == NEVER_CALLED


def test_the_device_calls_nothing_the_tour_does_not(counts):
    """Every function the device names in its source, but what only a failure makes it call."""
    named = set()
    for path in Path(rota.gpu.__file__).parent.glob("cuda*.py"):
        if path.name != "cuda_probe.py":  # asks in another process
            named |= set(re.findall(r"\b(cu[A-Z]\w+)", path.read_text(encoding="utf-8")))
    named = {name for name in named if hasattr(driver_functions(), name)}
    if "cuGraphInstantiate" in named:  # what the bindings call it
        named.remove("cuGraphInstantiate")
        named.add("cuGraphInstantiateWithFlags")
    assert len(named) > 30
    assert named - set(counts) == {"cuStreamIsCapturing"}


def driver_functions():
    from cuda.bindings import driver

    return driver


@pytest.fixture(scope="session")
def serving_counts(cuda_machine):
    """Calls of each driver function while it serves."""
    if cuda_machine.fake is None:
        pytest.skip("faults are injected into the test driver")
    driver, error = run(cuda_machine, [], serving)
    assert error is None and driver.live() == {}
    return dict(driver.calls)


@pytest.mark.parametrize("result", [999, 700], ids=["unknown", "sticky"])
def test_an_error_at_any_call_while_it_serves_leaks_nothing(cuda_machine, serving_counts, result):
    from rota.gpu.fakecuda.driver import Fault

    calls = [(name, nth) for name, most in serving_counts.items() for nth in range(1, most + 1)]
    assert len(calls) > 100 and {"cuGraphLaunch", "cuLaunchKernelEx"} <= set(serving_counts)
    for function, nth in calls:
        fault = Fault(function, nth, result)
        driver, error = run(cuda_machine, [fault], serving)
        assert driver.fired == [fault], (function, nth)
        assert driver.live() == {}, (function, nth, driver.live())
        if result == 700 and error is not None and error.code != "cuda-unavailable":
            assert (error.code, error.found) == ("device-dead", "CUDA_ERROR_ILLEGAL_ADDRESS")


def test_errors_of_every_call_that_ends_a_broken_capture(cuda_machine, counts):
    """The capture's end fails, then what asks for its state, then the end again."""
    from rota.gpu.fakecuda.driver import Fault

    faults = [
        Fault("cuStreamEndCapture", 1),
        Fault("cuStreamEndCapture", 2),
        Fault("cuStreamIsCapturing", 1),
    ]
    driver, error = run(cuda_machine, faults)
    assert set(driver.fired) == set(faults)
    assert (error.found, driver.live()) == ("CUDA_ERROR_UNKNOWN", {})


def functions():
    from rota.gpu.fakecuda.api_device import ENTRIES as device
    from rota.gpu.fakecuda.api_graph import ENTRIES as graph
    from rota.gpu.fakecuda.api_work import ENTRIES as work

    return sorted({*device, *work, *graph} - NEVER_CALLED)


@pytest.mark.parametrize("result", [999, 2, 719], ids=["unknown", "out-of-memory", "sticky"])
@pytest.mark.parametrize("function", functions())
def test_an_error_at_any_call_leaks_nothing(cuda_machine, counts, function, result):
    from rota.gpu.fakecuda.driver import Fault

    for nth in range(1, counts[function] + 1):
        fault = Fault(function, nth, result)
        driver, error = run(cuda_machine, [fault])
        assert driver.fired == [fault]
        assert driver.live() == {}, (nth, driver.live())
        if error is not None and error.code not in ("cuda-unavailable", "device-dead"):
            assert error.found is not None and error.found.startswith("CUDA_ERROR_"), error
            assert function in error.message or function == "cuGraphInstantiateWithFlags"
        if result == 719 and error is not None and error.code != "cuda-unavailable":
            assert error.code == "device-dead"


def test_two_errors_in_a_row_while_a_capture_ends_leave_no_capture(cuda_machine, counts):
    from rota.gpu.fakecuda.driver import Fault

    faults = [Fault("cuStreamEndCapture", 1), Fault("cuStreamEndCapture", 2)]
    driver, error = run(cuda_machine, faults)
    assert (error.found, driver.fired, driver.live()) == ("CUDA_ERROR_UNKNOWN", faults, {})


def test_a_lost_device_says_why_to_every_call_and_still_closes(cuda_machine, counts):
    from rota.gpu.fakecuda.driver import Fault

    driver = cuda_machine.fake.reset(faults=[Fault("cuStreamSynchronize", 1, 700)])
    device = cuda_machine.open()
    s = device.create_stream(label="s")
    e = device.create_event(label="e")
    a = device.alloc(8, label="a")
    with pytest.raises(DeviceError) as caught:
        device.synchronize(s)
    assert (caught.value.code, caught.value.found) == ("device-dead", "CUDA_ERROR_ILLEGAL_ADDRESS")
    for call in (
        lambda: device.alloc(8, label="b"),
        lambda: device.memset(a, 0, 8, s),
        lambda: device.synchronize(s),
        lambda: device.query(s),
        lambda: device.begin_capture(s),
        lambda: device.record_event(e, s),
        lambda: device.memory_info(),
        lambda: device.create_stream(),
    ):
        with pytest.raises(DeviceError) as caught:
            call()
        assert caught.value.code == "device-dead"
        assert caught.value.found == "CUDA_ERROR_ILLEGAL_ADDRESS"
    device.free(a)
    device.destroy_event(e)
    device.destroy_stream(s)
    assert device.live_labels() == ()
    device.close()
    assert driver.live() == {}
