"""The graph cache, on the host and on CUDA: keys, limits, aborts, drains; swaps under graphs."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from rota.errors import DeviceError
from rota.gpu.decorators import OPERATIONS, Fault, FaultyDevice
from rota.gpu.graphs import BUCKETS, GraphCache, GraphKey, bucket_of, case_of
from rota.gpu.host import HostDevice
from rota.gpu.kernels.tables_device import Columns, refresh_spec, refresh_tables

ONE = (1, 1, 1)
DECODE = GraphKey("decode", 4, "routed")


@pytest.fixture(params=["host", "cuda"])
def any_rig(request):
    """A rig on the host, then on CUDA."""
    return request.getfixturevalue("host_rig" if request.param == "host" else "rig")


def counter(rig):
    """A record function that adds one to a byte pattern, and a reader of it."""
    a = rig.up(np.zeros(8, np.uint8), "a")
    b = rig.up(np.arange(8, dtype=np.uint8), "b")

    def record():
        rig.device.copy_d2d(a, b, 8, rig.stream)

    def read():
        got = rig.down(a, 8, np.uint8)
        rig.device.memset(a, 0, 8, rig.stream)
        return got.tolist() == list(range(8))

    return record, read


def key(rows, case="routed", kind="decode", width=1):
    return GraphKey(kind, rows, case, width)


def test_a_key_is_captured_once_and_replayed_ever_after(any_rig):
    record, read = counter(any_rig)
    cache = GraphCache(any_rig.device)
    for times in range(5):
        cache.run(DECODE, any_rig.stream, record)
        assert read() and cache.captures == 1, times
    for other in (key(8), key(4, "none"), key(4, kind="verify", width=3), key(4, kind="fused")):
        cache.run(other, any_rig.stream, record)
        assert read()
    assert (cache.captures, len(cache), DECODE in cache) == (5, 5, True)
    assert cache.drain() == 0
    assert len(cache) == 0 and not any("exec" in x for x in any_rig.device.live_labels())
    cache.run(DECODE, any_rig.stream, record)
    assert read() and cache.captures == 6
    cache.drain()


def test_the_least_recently_used_goes_first_and_kinds_do_not_crowd_each_other(any_rig):
    record, _ = counter(any_rig)
    cache = GraphCache(any_rig.device, {"decode": 2, "verify": 1, "fused": 1})
    cache.run(key(1, kind="verify"), any_rig.stream, record)
    for rows in (1, 2, 1, 4):
        cache.run(key(rows), any_rig.stream, record)
    assert [key(rows) in cache for rows in (1, 2, 4)] == [True, False, True]
    assert key(1, kind="verify") in cache
    assert sum("exec" in label for label in any_rig.device.live_labels()) == 3
    for rows in range(1, 500):
        cache.run(key(rows), any_rig.stream, record)
    assert len(cache) == 3
    assert sum("exec" in label for label in any_rig.device.live_labels()) == 3
    cache.drain()


@pytest.mark.parametrize("error", [ValueError("from the step"), KeyboardInterrupt()])
def test_any_error_while_recording_aborts_the_capture(any_rig, error):
    record, read = counter(any_rig)
    cache = GraphCache(any_rig.device)

    def failing():
        record()
        raise error

    with pytest.raises(type(error)):
        cache.run(DECODE, any_rig.stream, failing)
    assert (len(cache), cache.captures) == (0, 0)
    assert not any_rig.device.abort_capture_if_active(any_rig.stream)
    record()
    assert read()  # the stream works outside a capture again
    cache.run(DECODE, any_rig.stream, record)
    assert read()
    cache.drain()


def test_a_violation_while_recording_is_raised_and_leaves_nothing(any_rig):
    cache = GraphCache(any_rig.device)
    before = any_rig.device.live_labels()
    for call in (
        lambda: any_rig.device.alloc(8, label="x"),
        lambda: any_rig.device.synchronize(any_rig.stream),
    ):
        with pytest.raises(DeviceError) as caught:
            cache.run(DECODE, any_rig.stream, call)
        assert caught.value.code == "capture-violation"
        assert any_rig.device.live_labels() == before


def test_a_violation_the_step_swallows_is_seen_at_the_end_of_the_capture(any_rig):
    cache = GraphCache(any_rig.device)

    def careless():
        with pytest.raises(DeviceError):
            any_rig.device.alloc(8, label="x")

    with pytest.raises(DeviceError) as caught:
        cache.run(DECODE, any_rig.stream, careless)
    assert caught.value.code == "capture-invalidated"
    assert len(cache) == 0


def test_a_graph_over_freed_memory_is_dropped_at_its_failed_replay(any_rig):
    d, s = any_rig.device, any_rig.stream
    a = d.alloc(8, label="old pool")
    cache = GraphCache(d)
    cache.run(DECODE, s, lambda: d.memset(a, 1, 8, s))
    d.synchronize(s)
    d.free(a)
    with pytest.raises(DeviceError) as caught:
        cache.run(DECODE, s, lambda: None)
    assert (caught.value.code, caught.value.subject) == ("use-after-free", "old pool")
    assert DECODE not in cache and not any("exec" in x for x in d.live_labels())


def test_drain_goes_on_after_failures_and_tries_those_handles_again():
    inner = HostDevice()
    device = FaultyDevice(inner, [Fault("destroy_exec", 2), Fault("destroy_graph", 1)])
    stream = device.create_stream(label="s")
    a = device.alloc(8, label="a")
    cache = GraphCache(device)
    for rows in (1, 2, 4):
        cache.run(key(rows), stream, lambda: device.memset(a, 1, 8, stream))
    assert (
        cache.drain() == 1
    )  # the graph that failed at its capture went this time, one exec did not
    assert inner.live_labels() == ("a", "s", "exec 5")
    assert cache.drain() == 0
    assert inner.live_labels() == ("a", "s")
    device.free(a)
    device.destroy_stream(stream)
    device.close()


CAPTURING = ("begin_capture", "memset", "end_capture", "instantiate", "upload", "replay")


@pytest.mark.parametrize("op", [*CAPTURING, "destroy_graph"])
def test_a_fault_at_any_call_of_a_capture_leaks_nothing_and_the_next_try_works(op):
    assert op in OPERATIONS
    inner = HostDevice()
    device = FaultyDevice(inner, [Fault(op, 1)])
    stream = inner.create_stream(label="s")
    a = inner.alloc(8, label="a")
    cache = GraphCache(device)
    try:
        cache.run(DECODE, stream, lambda: device.memset(a, 1, 8, stream))
    except DeviceError as error:
        assert error.code == "injected" and op != "destroy_graph"
        assert DECODE not in cache
        assert inner.live_labels() == ("a", "s")
    cache.run(DECODE, stream, lambda: device.memset(a, 1, 8, stream))
    assert cache.drain() == 0
    assert inner.live_labels() == ("a", "s")
    inner.free(a)
    inner.destroy_stream(stream)


def test_faults_of_the_driver_during_a_capture_leak_nothing(cuda_machine):
    from rota.gpu.fakecuda.driver import Fault as DriverFault

    if cuda_machine.fake is None:
        pytest.skip("faults are injected into the test driver")
    calls = (
        "cuStreamBeginCapture", "cuMemsetD8Async", "cuStreamEndCapture", "cuGraphDestroy",
        "cuGraphInstantiateWithFlags", "cuGraphUpload", "cuGraphLaunch", "cuGraphExecDestroy",
    )  # fmt: skip
    for name in calls:
        driver = cuda_machine.fake.reset(faults=[DriverFault(name, 1)])
        device = cuda_machine.open(checked=True)
        stream = device.create_stream(label="s")
        a = device.alloc(8, label="a")
        cache = GraphCache(device)

        def step(cache=cache, device=device, stream=stream, a=a):
            cache.run(DECODE, stream, lambda: device.memset(a, 1, 8, stream))

        try:
            step()
        except DeviceError as error:
            assert error.found == "CUDA_ERROR_UNKNOWN", name
        step()
        cache.drain()
        assert cache.drain() == 0
        assert [fault.function for fault in driver.fired] == [name]
        assert driver.live() == {"contexts": 1, "streams": 1, "device memory": 1}, name
        device.synchronize(stream)
        device.free(a)
        device.destroy_stream(stream)
        device.close()
        assert driver.live() == {}


def test_limits_buckets_and_cases():
    for limits in ({"decode": 0, "verify": 1, "fused": 1}, {"decode": 1}):
        with pytest.raises(DeviceError) as caught:
            GraphCache(HostDevice(), limits)
        assert caught.value.code == "bad-argument"
    assert [bucket_of(n) for n in (1, 2, 3, 9, 33, 128, 129)] == [1, 2, 4, 12, 48, 128, None]
    assert all(bucket_of(bucket) == bucket for bucket in BUCKETS)
    assert (case_of([-1, -1]), case_of([-1, 0]), case_of([])) == ("none", "routed", "none")


class Step:
    """Two layers: the second takes what the first wrote. Slots are regions of one pool."""

    def __init__(self, rig, problem, n=3, k_in=16, rank=8):
        self.rig = rig
        self.first = problem(n=n, k_in=k_in, rank=rank, widths=(k_in, 8), slots=[0] * n, seed=1)
        self.second = problem(n=n, k_in=k_in, rank=rank, widths=(24,), slots=[0] * n, seed=2)
        for p in (self.first, self.second):
            p.gap, p.columns = 8, [8] if len(p.widths) == 1 else [8, k_in + 16]
            p.out_stride = p.columns[-1] + p.widths[-1] + 8
            p.out_stride = -(-p.out_stride // 8) * 8
            p.out = np.zeros((n, p.out_stride), np.uint16)
            p.load(rig)
        self.second.x_addr = self.first.out_addr + 2 * 8
        self.second.x_stride = self.first.out_stride
        self.second.rows_addr = self.first.rows_addr

    def set_rows(self, slots):
        self.first.slots = self.second.slots = np.asarray(slots, np.int32)
        self.rig.write(self.first.rows_addr, self.first.slots)

    def record(self):
        """Clear both outputs, then both layers."""
        d, s = self.rig.device, self.rig.stream
        for p in (self.first, self.second):
            d.memset(p.out_addr, 0, p.out.nbytes, s)
        self.first.apply()
        self.second.apply()

    def expected(self):
        middle = self.first.expected()
        x = self.second.x
        self.second.x = middle[:, 8 : 8 + self.second.k_in]
        out = self.second.expected()
        self.second.x = x
        return out


def test_a_mixed_decode_step_replays_from_a_graph_and_equals_the_host(rig, host_rig, problem, bf16):
    results = []
    for one in (rig, host_rig):
        step = Step(one, problem)
        cache = GraphCache(one.device)
        got = []
        for slots in ([0, 1, 2], [-1, 2, 2], [1, -1, -1], [0, 0, 0]):
            step.set_rows(slots)
            cache.run(key(3), one.stream, step.record)
            out = step.second.result()
            assert np.array_equal(out, step.expected())
            got.append(out)
        assert cache.captures == 1
        cache.drain()
        results.append(got)
    assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True))


def test_a_thousand_swaps_between_replays_keep_outputs_right_and_leak_nothing(rig, problem, bf16):
    to_bits, _ = bf16
    p = problem(n=2, k_in=16, rank=8, widths=(8, 16), slots=[0, 2]).load(rig)
    cache = GraphCache(rig.device)
    cache.run(key(2), rig.stream, p.apply)
    labels = rig.device.live_labels()
    counts = rig.driver.live() if rig.driver else None
    rng = np.random.default_rng(0)
    for swap in range(1000):
        slot = swap % p.n_slots
        for j in range(2):
            p.a[j, slot] = to_bits(rng.integers(-1, 2, p.a[j, slot].shape))
            p.b[j][slot] = to_bits(rng.integers(-1, 2, p.b[j][slot].shape))
            rig.write(int(p.a_cells[j, slot]), p.a[j, slot])
            rig.write(int(p.b_cells[j, slot]), p.b[j][slot])
        if swap % 7 == 0:
            p.slots = np.array([slot, -1 if swap % 2 else (slot + 1) % 3], np.int32)
            rig.write(p.rows_addr, p.slots)
        rig.write(p.out_addr, p.out)
        cache.run(key(2), rig.stream, p.apply)
        assert np.array_equal(p.result(), p.expected()), swap
    assert cache.captures == 1
    assert rig.device.live_labels() == labels
    if rig.driver:
        assert rig.driver.live() == counts
    cache.drain()


def test_emptying_a_slot_by_the_table_kernel_under_a_graph_takes_its_delta_away(any_rig, problem):
    p = problem(n=2, k_in=16, rank=8, widths=(8, 8), slots=[0, 1]).load(any_rig)
    refresh = any_rig.device.load_kernel(refresh_spec())
    base = 0x1000
    offsets = [any_rig.up(cells - np.uint64(base), "offsets") for cells in (
        p.a_cells[:, 1].copy(), p.b_cells[:, 1].copy())]  # fmt: skip
    columns = Columns(p.a_table, p.b_table, p.scale_table, *offsets, 2, p.n_slots)
    cache = GraphCache(any_rig.device)

    def step():
        any_rig.write(p.out_addr, p.out)
        cache.run(key(2), any_rig.stream, p.apply)
        return p.result()

    full = p.expected()
    assert np.array_equal(step(), full)
    refresh_tables(any_rig.device, refresh, columns, 1, any_rig.stream)
    assert np.array_equal(step(), np.stack([full[0], p.out[1]]))
    cells = any_rig.down(p.a_table, (2, 3), np.uint64)
    assert np.array_equal(cells[:, 0], p.a_cells[:, 0]) and not cells[:, 1].any()
    present = any_rig.up(np.array([1, 0], np.uint8), "present")
    scales = any_rig.up(p.scales[:, 1].copy(), "new scales")
    refresh_tables(
        any_rig.device, refresh, columns, 1, any_rig.stream,
        base=base, present=present, scales=scales,
    )  # fmt: skip
    p.absent = {(1, 1)}
    assert np.array_equal(step(), p.expected())
    with pytest.raises(DeviceError):
        refresh_tables(any_rig.device, refresh, columns, 3, any_rig.stream)
    cache.drain()


def test_staging_on_another_thread_does_not_break_a_capture(rig, problem):
    p = problem(n=2, k_in=16, rank=8, widths=(8,), slots=[0, 1]).load(rig)
    cache = GraphCache(rig.device)
    problems = []

    def stage():
        try:
            d = rig.device
            own = d.create_stream(label="staging")
            host, event = d.pinned_alloc(64, label="image"), d.create_event(label="landed")
            target = d.alloc(64, label="slot image")
            d.copy_h2d(target, host, 64, own)
            d.record_event(event, own)
            d.synchronize_event(event)
            d.free(target)
            d.pinned_free(host)
            d.destroy_event(event)
            d.destroy_stream(own)
        except BaseException as error:  # a thread: the test sees it in the list
            problems.append(error)

    def record():
        p.apply()
        thread = threading.Thread(target=stage)
        thread.start()
        thread.join()

    cache.run(key(2), rig.stream, record)
    assert problems == []
    assert np.array_equal(p.result(), p.expected())
    cache.drain()
