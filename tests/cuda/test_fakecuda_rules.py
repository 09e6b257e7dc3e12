"""The test driver keeps the driver's rules: results a real one gives, asked by plain bindings."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest

KERNEL = b"""
extern "C" __global__ void fill(int* p, int n, int value) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) p[i] = value;
}
"""
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2


@pytest.fixture
def api(cuda_machine, driver):
    """(cuda.bindings.driver, test driver, a call that expects success) with a current context."""
    if driver is None:
        pytest.skip("asks the test driver about itself")
    from cuda.bindings import driver as d

    def ok(result):
        assert int(result[0]) == 0, (result, driver.story)
        return result[1] if len(result) > 1 else None

    ok(d.cuInit(0))
    ok(d.cuCtxSetCurrent(ok(d.cuDevicePrimaryCtxRetain(0))))
    yield d, driver, ok
    d.cuDevicePrimaryCtxRelease(0)


def code(result):
    return int(result[0])


def stream_of(d, ok):
    return ok(d.cuStreamCreate(1))


def mode(d, number):
    return d.CUstreamCaptureMode(number)


def compiled(cuda_machine, source=KERNEL, name="fill"):
    from rota.gpu.cuda_nvrtc import Compiler

    return Compiler((9, 0), form="ptx").compile(source.decode(), name).code


def test_work_runs_only_when_something_waits(api):
    d, _, ok = api
    stream, p = stream_of(d, ok), ok(d.cuMemAlloc(8))
    ok(d.cuMemsetD8Async(p, 7, 8, stream))
    assert ctypes.string_at(int(p), 8) == b"\xff" * 8
    assert [code(d.cuStreamQuery(stream)) for _ in range(3)] == [600, 600, 0]
    assert ctypes.string_at(int(p), 8) == b"\x07" * 8


def test_pageable_sources_are_read_at_the_call_and_pinned_ones_when_the_copy_runs(api):
    d, _, ok = api
    stream, p, q = stream_of(d, ok), ok(d.cuMemAlloc(4)), ok(d.cuMemAlloc(4))
    page = ctypes.create_string_buffer(b"page", 4)
    pinned = ok(d.cuMemHostAlloc(4, 0))
    ctypes.memmove(pinned, b"pins", 4)
    ok(d.cuMemcpyHtoDAsync(p, ctypes.addressof(page), 4, stream))
    ok(d.cuMemcpyHtoDAsync(q, pinned, 4, stream))
    page.raw = b"late"
    ctypes.memmove(pinned, b"late", 4)
    ok(d.cuStreamSynchronize(stream))
    assert (ctypes.string_at(int(p), 4), ctypes.string_at(int(q), 4)) == (b"page", b"late")


def test_a_pageable_target_is_complete_at_return_and_a_pinned_one_is_not(api):
    d, _, ok = api
    stream, p = stream_of(d, ok), ok(d.cuMemAlloc(4))
    page, pinned = ctypes.create_string_buffer(4), ok(d.cuMemHostAlloc(4, 0))
    ok(d.cuMemsetD8Async(p, 1, 4, stream))
    ok(d.cuMemcpyDtoHAsync(pinned, p, 4, stream))
    assert ctypes.string_at(pinned, 4) == b"\xff" * 4
    ok(d.cuMemcpyDtoHAsync(ctypes.addressof(page), p, 4, stream))
    assert (page.raw, ctypes.string_at(pinned, 4)) == (b"\1" * 4, b"\1" * 4)


@pytest.mark.parametrize("name", ["alloc", "free", "host-alloc", "context-sync", "module"])
@pytest.mark.parametrize("how", [GLOBAL, THREAD_LOCAL, RELAXED])
@pytest.mark.parametrize("other_thread", [False, True])
def test_unsafe_calls_break_captures_by_mode_and_thread(api, name, how, other_thread):
    d, _, ok = api
    stream, spare = stream_of(d, ok), ok(d.cuMemAlloc(8))
    calls = {
        "alloc": lambda: d.cuMemAlloc(8),
        "free": lambda: d.cuMemFree(spare),
        "host-alloc": lambda: d.cuMemHostAlloc(8, 0),
        "context-sync": lambda: d.cuCtxSynchronize(),
        "module": lambda: d.cuModuleLoadData(b".visible .entry k()\n{\nret;\n}\n\0"),
    }
    ok(d.cuStreamBeginCapture(stream, mode(d, how)))
    results = []

    def call():
        d.cuCtxSetCurrent(0xC0)
        results.append(code(calls[name]()))

    if other_thread:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    else:
        call()
    banned = how == GLOBAL or (how == THREAD_LOCAL and not other_thread)
    assert results == [900 if banned else 0]
    assert code(d.cuStreamEndCapture(stream)) == (901 if banned else 0)


def test_the_capture_codes(api):
    d, _, ok = api
    main, side = stream_of(d, ok), stream_of(d, ok)
    p = ok(d.cuMemAlloc(8))
    outside, inside = ok(d.cuEventCreate(2)), ok(d.cuEventCreate(2))
    assert code(d.cuStreamEndCapture(main)) == 401  # nothing to end
    ok(d.cuEventRecord(outside, main))

    ok(d.cuStreamBeginCapture(main, mode(d, GLOBAL)))
    assert code(d.cuStreamBeginCapture(main, mode(d, GLOBAL))) == 401
    assert code(d.cuStreamSynchronize(main)) == 900
    assert code(d.cuMemsetD8Async(p, 0, 8, main)) == 901
    assert code(d.cuStreamEndCapture(main)) == 901

    ok(d.cuStreamBeginCapture(main, mode(d, GLOBAL)))
    assert code(d.cuStreamWaitEvent(main, outside, 0)) == 905
    assert code(d.cuStreamEndCapture(main)) == 901

    ok(d.cuStreamBeginCapture(main, mode(d, GLOBAL)))
    ok(d.cuEventRecord(inside, main))
    ok(d.cuStreamWaitEvent(side, inside, 0))
    ok(d.cuMemsetD8Async(p, 0, 8, side))
    assert code(d.cuStreamEndCapture(main)) == 904

    ok(d.cuStreamBeginCapture(main, mode(d, GLOBAL)))
    ok(d.cuEventRecord(inside, main))
    ok(d.cuStreamWaitEvent(side, inside, 0))
    assert code(d.cuStreamEndCapture(side)) == 903
    assert code(d.cuStreamEndCapture(main)) == 901
    assert code(d.cuEventSynchronize(inside)) == 907
    assert code(d.cuStreamWaitEvent(side, inside, 0)) == 907

    ok(d.cuStreamBeginCapture(main, mode(d, GLOBAL)))
    codes = []

    def end():
        d.cuCtxSetCurrent(0xC0)
        codes.append(code(d.cuStreamEndCapture(main)))

    thread = threading.Thread(target=end)
    thread.start()
    thread.join()
    assert codes == [908]
    assert code(d.cuStreamEndCapture(main)) == 901


def test_a_graph_is_independent_of_its_exec_and_a_destroyed_one_is_refused(cuda_machine, api):
    d, driver, ok = api
    stream, p = stream_of(d, ok), ok(d.cuMemAlloc(16))
    module = ok(d.cuModuleLoadData(compiled(cuda_machine)))
    fill = ok(d.cuModuleGetFunction(module, b"fill"))

    def record(value, count=1):
        ok(d.cuStreamBeginCapture(stream, mode(d, GLOBAL)))
        args = ((int(p), 4, value), (ctypes.c_void_p, ctypes.c_int, ctypes.c_int))
        for _ in range(count):
            ok(d.cuLaunchKernel(fill, 1, 1, 1, 32, 1, 1, 0, stream, args, 0))
        return ok(d.cuStreamEndCapture(stream))

    def values():
        ok(d.cuStreamSynchronize(stream))
        return np.frombuffer(ctypes.string_at(int(p), 16), np.int32).tolist()

    graph = record(5)
    graph_exec = ok(d.cuGraphInstantiate(graph, 0))
    ok(d.cuGraphDestroy(graph))
    ok(d.cuGraphLaunch(graph_exec, stream))
    assert values() == [5] * 4
    other, longer = record(9), record(9, 2)
    ok(d.cuGraphExecUpdate(graph_exec, other))
    ok(d.cuGraphLaunch(graph_exec, stream))
    assert values() == [9] * 4
    assert code(d.cuGraphExecUpdate(graph_exec, longer)) == 910
    for one in (other, longer):
        ok(d.cuGraphDestroy(one))
    ok(d.cuGraphExecDestroy(graph_exec))
    assert code(d.cuGraphLaunch(graph_exec, stream)) == 400
    assert driver.live() == {"contexts": 1, "device memory": 1, "modules": 1, "streams": 1}


def test_a_lost_context_answers_everything_with_the_first_error(api):
    d, driver, ok = api
    stream, p = stream_of(d, ok), ok(d.cuMemAlloc(8))
    ok(d.cuMemsetD8Async(p, 0, 8, stream))
    ok(d.cuMemFree(p))
    assert code(d.cuStreamSynchronize(stream)) == 700
    assert "used after free" in driver.story[0]
    for result in (d.cuMemAlloc(8), d.cuStreamCreate(1), d.cuStreamSynchronize(stream)):
        assert code(result) == 700


def test_a_thread_needs_a_current_context(api):
    d, _, _ = api
    codes = []
    thread = threading.Thread(target=lambda: codes.append(code(d.cuMemAlloc(8))))
    thread.start()
    thread.join()
    assert codes == [201]


def test_bad_modules_functions_and_ranges(cuda_machine, api):
    d, driver, ok = api
    stream, p = stream_of(d, ok), ok(d.cuMemAlloc(8))
    assert code(d.cuModuleLoadData(b"\x7fELF" + bytes(60))) == 209
    assert code(d.cuModuleLoadData(b"nonsense\0")) == 218
    module = ok(d.cuModuleLoadData(compiled(cuda_machine)))
    assert code(d.cuModuleGetFunction(module, b"absent")) == 500
    assert code(d.cuMemsetD8Async(int(p) + 1, 0, 8, stream)) == 1
    assert code(d.cuMemFree(int(p) + 1)) == 1
    assert code(d.cuMemAlloc(1 << 50)) == 2
    ok(d.cuMemFree(p))
    assert code(d.cuMemFree(p)) == 1
    assert ok(d.cuCtxGetCurrent()) is not None
    ok(d.cuCtxSynchronize())
    ok(d.cuModuleUnload(module))
    assert driver.live() == {"contexts": 1, "streams": 1}


def test_injected_results_come_once_at_the_nth_call_and_do_nothing(cuda_machine):
    from rota.gpu.fakecuda.driver import Fault

    if cuda_machine.fake is None:
        pytest.skip("asks the test driver about itself")
    from cuda.bindings import driver as d

    fault = Fault("cuMemAlloc", 2, 2)
    fake = cuda_machine.fake.reset(faults=[fault])
    d.cuCtxSetCurrent(d.cuDevicePrimaryCtxRetain(0)[1])
    assert [code(d.cuMemAlloc(8)) for _ in range(3)] == [0, 2, 0]
    assert (fake.fired, fake.live()["device memory"]) == ([fault], 2)
    d.cuDevicePrimaryCtxRelease(0)
    assert fake.live() == {}


def test_no_device_is_said_by_cuinit(cuda_machine):
    from rota.gpu.cuda_probe import why_unavailable

    if cuda_machine.fake is None:
        pytest.skip("asks the test driver about itself")
    cuda_machine.fake.reset(devices=0)
    assert why_unavailable(test_driver=True) == ("the driver said CUDA_ERROR_NO_DEVICE to cuInit")
    cuda_machine.fake.reset()
