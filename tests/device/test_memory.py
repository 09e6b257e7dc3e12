"""Allocation, bounds, limits and accounting, on every backend."""

from __future__ import annotations

import itertools
import logging
import threading

import pytest

from rota.errors import DeviceError
from rota.gpu.device import ALIGNMENT


def test_addresses_are_aligned_and_apart(rig):
    sizes = (1, 255, 256, 257, 5000)
    starts = [rig.device.alloc(n, label=f"a{n}") for n in sizes]
    assert all(start % ALIGNMENT == 0 for start in starts)
    spans = sorted(zip(starts, sizes, strict=True))
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(spans))


def test_bytes_come_back_as_written(rig):
    a = rig.device.alloc(1000, label="a")
    b = rig.device.alloc(1000, label="b")
    data = bytes(i % 251 for i in range(1000))
    rig.write(a, data)
    rig.device.copy_d2d(b, a, 1000, rig.stream)
    rig.device.memset(b + 10, 0xEE, 5, rig.stream)
    assert rig.read(b, 1000) == data[:10] + b"\xee" * 5 + data[15:]
    assert rig.read(a, 1000) == data


def test_copies_of_nothing_are_allowed_at_the_end(rig):
    a = rig.device.alloc(64, label="a")
    rig.device.memset(a + 64, 0, 0, rig.stream)
    with rig.refuses("out-of-bounds", "a"):
        rig.device.memset(a + 65, 0, 0, rig.stream)


@pytest.mark.parametrize("op", ["memset", "h2d", "d2h", "d2d-source", "d2d-target"])
def test_a_range_that_leaves_its_allocation_is_refused(rig, op):
    a = rig.device.alloc(100, label="short")
    b = rig.device.alloc(200, label="long")
    host = rig.device.pinned_alloc(200, label="host")
    d, s = rig.device, rig.stream
    calls = {
        "memset": lambda: d.memset(a + 1, 0, 100, s),
        "h2d": lambda: d.copy_h2d(a, host, 101, s),
        "d2h": lambda: d.copy_d2h(host, a + 50, 51, s),
        "d2d-source": lambda: d.copy_d2d(b, a, 101, s),
        "d2d-target": lambda: d.copy_d2d(a, b, 101, s),
    }
    with rig.refuses("out-of-bounds", "short"):
        calls[op]()


def test_a_pinned_range_that_leaves_its_allocation_is_refused(rig):
    a = rig.device.alloc(200, label="a")
    host = rig.device.pinned_alloc(100, label="host")
    with rig.refuses("out-of-bounds", "host"):
        rig.device.copy_h2d(a, host, 101, rig.stream)
    with rig.refuses("out-of-bounds", "host"):
        rig.device.copy_d2h(host + 1, a, 100, rig.stream)


def test_device_and_host_addresses_are_not_interchangeable(rig):
    a = rig.device.alloc(64, label="on-device")
    b = rig.device.alloc(64, label="other")
    host = rig.device.pinned_alloc(64, label="on-host")
    with rig.refuses("bad-address", "on-device"):
        rig.device.copy_h2d(b, a, 64, rig.stream)
    with rig.refuses("bad-address", "on-host"):
        rig.device.memset(host, 0, 64, rig.stream)
    with rig.refuses("bad-address", "on-host"):
        rig.device.free(host)
    with rig.refuses("bad-address", "on-device"):
        rig.device.pinned_free(a)
    with rig.refuses("bad-address"):
        rig.device.memset(4096, 0, 1, rig.stream)
    assert sorted(rig.device.live_labels()) == ["main", "on-device", "on-host", "other"]


@pytest.mark.parametrize("op", ["memset", "h2d", "d2h", "d2d"])
def test_use_after_free_names_the_allocation(rig, op):
    d, s = rig.device, rig.stream
    gone = d.alloc(64, label="gone")
    b = d.alloc(64, label="b")
    host = d.pinned_alloc(64, label="host")
    d.free(gone)
    calls = {
        "memset": lambda: d.memset(gone, 0, 64, s),
        "h2d": lambda: d.copy_h2d(gone, host, 64, s),
        "d2h": lambda: d.copy_d2h(host, gone + 8, 8, s),
        "d2d": lambda: d.copy_d2d(b, gone, 64, s),
    }
    with rig.refuses("use-after-free", "gone"):
        calls[op]()


def test_double_free_and_bad_free(rig):
    a = rig.device.alloc(64, label="a")
    host = rig.device.pinned_alloc(64, label="host")
    with rig.refuses("bad-address", "a"):
        rig.device.free(a + 8)
    with rig.refuses("bad-address"):
        rig.device.free(0)
    rig.device.free(a)
    rig.device.pinned_free(host)
    with rig.refuses("double-free", "a"):
        rig.device.free(a)
    with rig.refuses("double-free", "host"):
        rig.device.pinned_free(host)
    with rig.refuses("bad-address"):
        rig.device.pinned_free(a)  # it never was pinned memory
    assert rig.device.live_labels() == ("main",)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_an_allocation_has_a_size_and_a_label(rig, nbytes):
    with rig.refuses("bad-argument", "none"):
        rig.device.alloc(nbytes, label="none")
    with rig.refuses("bad-argument"):
        rig.device.pinned_alloc(64, label="")
    assert rig.device.live_labels() == ("main",)


def test_bad_bytes_sizes_and_overlaps_are_refused(rig):
    a = rig.device.alloc(64, label="a")
    b = rig.device.alloc(64, label="b")
    for byte in (-1, 256):
        with rig.refuses("bad-argument"):
            rig.device.memset(a, byte, 8, rig.stream)
    with rig.refuses("bad-argument", "a"):
        rig.device.copy_d2d(a + 4, a, 8, rig.stream)
    with rig.refuses("bad-argument"):
        rig.device.memset(a, 0, -1, rig.stream)
    with rig.refuses("bad-argument"):
        rig.device.copy_d2d(a, b, -8, rig.stream)
    with rig.refuses("bad-argument"):
        rig.device.copy_h2d(a, 0, 8, rig.stream)
    rig.device.copy_d2d(a + 8, a, 8, rig.stream)  # touching is not overlapping


def test_the_limit_is_held_and_given_back(make_device):
    device = make_device(memory_limit=4096)
    assert device.memory_info() == (4096, 4096)
    a = device.alloc(1000, label="a")
    assert device.memory_info() == (4096 - 1024, 4096)
    with pytest.raises(DeviceError) as caught:
        device.alloc(3073, label="too much")
    assert (caught.value.code, caught.value.subject) == ("out-of-memory", "too much")
    assert device.memory_info() == (4096 - 1024, 4096)
    b = device.alloc(3072, label="rest")
    assert device.memory_info() == (0, 4096)
    device.free(a)
    device.free(b)
    assert device.memory_info() == (4096, 4096)


def test_a_refusal_of_the_system_is_out_of_memory_and_costs_nothing(make_device):
    device = make_device(memory_limit=1 << 70)
    before = device.memory_info()
    with pytest.raises(DeviceError) as caught:
        device.alloc(1 << 60, label="vast")
    assert (caught.value.code, caught.value.subject) == ("out-of-memory", "vast")
    assert device.memory_info() == before
    assert device.live_labels() == ()


def test_a_thousand_cycles_leave_nothing_and_keep_the_limit(rig):
    free, total = rig.device.memory_info()
    for i in range(1000):
        addr = rig.device.alloc(1 << 16, label=f"cycle {i}")
        rig.device.memset(addr, i & 255, 1 << 16, rig.stream)
        rig.device.synchronize(rig.stream)
        rig.device.free(addr)
    assert rig.device.memory_info() == (free, total)
    assert rig.device.live_labels() == ("main",)


def test_close_is_idempotent_and_refuses_all_later_calls(rig):
    d, s = rig.device, rig.stream
    a = d.alloc(64, label="a")
    event = d.create_event()
    d.begin_capture(s)
    graph = d.end_capture(s)
    graph_exec = d.instantiate(graph)
    d.destroy_exec(graph_exec)
    d.destroy_graph(graph)
    d.destroy_event(event)
    d.free(a)
    d.destroy_stream(s)
    assert d.live_labels() == ()
    d.close()
    d.close()
    assert d.live_labels() == ()
    later = [
        lambda: d.alloc(1, label="x"),
        lambda: d.free(a),
        lambda: d.pinned_alloc(1, label="x"),
        lambda: d.pinned_free(a),
        lambda: d.memset(a, 0, 1, s),
        lambda: d.copy_h2d(a, 4096, 1, s),
        lambda: d.copy_d2h(4096, a, 1, s),
        lambda: d.copy_d2d(a, a + 1, 1, s),
        lambda: d.create_stream(),
        lambda: d.destroy_stream(s),
        lambda: d.synchronize(s),
        lambda: d.query(s),
        lambda: d.create_event(),
        lambda: d.record_event(event, s),
        lambda: d.wait_event(event, s),
        lambda: d.query_event(event),
        lambda: d.synchronize_event(event),
        lambda: d.destroy_event(event),
        lambda: d.load_kernel(rig.add.spec),
        lambda: rig.launch_add(a, 1, 1),
        lambda: d.begin_capture(s),
        lambda: d.end_capture(s),
        lambda: d.abort_capture_if_active(s),
        lambda: d.instantiate(graph),
        lambda: d.upload(graph_exec, s),
        lambda: d.replay(graph_exec, s),
        lambda: d.destroy_graph(graph),
        lambda: d.destroy_exec(graph_exec),
        lambda: d.memory_info(),
    ]
    for call in later:
        with rig.refuses("device-closed"):
            call()


def test_leaks_are_named_at_close_and_freed(rig, backend, caplog):
    d = rig.device
    d.alloc(64, label="pool")
    d.pinned_alloc(64, label="staging")
    d.create_event(label="step done")
    d.begin_capture(rig.stream)
    d.instantiate(d.end_capture(rig.stream))
    expected = d.live_labels()
    assert {"pool", "staging", "step done", "main"} < set(expected)
    assert len(expected) == 6
    if rig.checked:
        with rig.refuses("leak", ", ".join(expected)):
            d.close()
    else:
        with caplog.at_level(logging.WARNING, logger=backend.logger):
            d.close()
        assert [record.getMessage() for record in caplog.records] == [
            f"alive at close, freed now: {', '.join(expected)}"
        ]
    assert d.live_labels() == ()
    d.close()


def test_workers_allocate_and_copy_on_their_own_streams(rig):
    size, rounds, failures = 512, 40, []

    def work(number: int) -> None:
        try:
            stream = rig.device.create_stream(label=f"worker {number}")
            for i in range(rounds):
                host = rig.device.pinned_alloc(size, label="image")
                addr = rig.device.alloc(size, label="slot")
                rig.device.memset(addr, number, size, stream)
                rig.device.copy_d2h(host, addr, size, stream)
                rig.device.copy_h2d(addr, host, size, stream)
                assert rig.read(addr, size, stream) == bytes([number]) * size, i
                rig.device.free(addr)
                rig.device.pinned_free(host)
            rig.device.destroy_stream(stream)
        except BaseException as error:  # a thread: the test sees it in the list
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert rig.device.live_labels() == ("main",)
