"""What only a checked host device does: defers, poisons, guards, and judges launches."""

from __future__ import annotations

import ctypes
import itertools

import pytest

from rota.errors import DeviceError
from rota.gpu.device import KernelSpec
from rota.gpu.host import HostDevice
from rota.gpu.host_memory import FREED_BYTE, FRESH_BYTE
from rota.gpu.host_streams import PENDING_LIMIT, QUERIES_BEFORE_DONE


def look(addr, n):
    """Bytes at an address right now, past every queue."""
    return ctypes.string_at(addr, n)


def poke(addr, data):
    ctypes.memmove(addr, data, len(data))


def test_fresh_memory_is_poisoned(checked_rig):
    d = checked_rig.device
    assert look(d.alloc(300, label="a"), 300) == bytes([FRESH_BYTE]) * 300
    assert look(d.pinned_alloc(5, label="b"), 5) == bytes([FRESH_BYTE]) * 5


def test_freed_memory_is_poisoned_and_its_range_never_comes_back(checked_rig):
    d = checked_rig.device
    spans = []
    for i in range(200):
        addr = d.alloc(4096, label=f"n{i}")
        d.free(addr)
        assert look(addr, 4096) == bytes([FREED_BYTE]) * 4096
        spans.append((addr, addr + 4096))
    spans.sort()
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


def test_quarantine_is_bounded_and_later_use_is_still_named(make_checked_rig):
    rig = make_checked_rig(quarantine_bytes=10_000)
    addrs = [rig.device.alloc(4096, label=f"n{i}") for i in range(4)]
    for addr in addrs:
        rig.device.free(addr)
    assert look(addrs[0], 1) == b"\0"  # its pages went back to the system
    assert look(addrs[3], 1) == bytes([FREED_BYTE])
    for i, addr in enumerate(addrs):
        with rig.refuses("use-after-free", f"n{i}"):
            rig.device.memset(addr, 0, 1, rig.stream)


@pytest.mark.parametrize(("offset", "side"), [(-1, "before"), (-256, "before"), (100, "after")])
@pytest.mark.parametrize("when", ["free", "close"])
def test_a_write_just_outside_is_found(make_checked_rig, offset, side, when):
    rig = make_checked_rig()
    addr = rig.device.alloc(100, label="hurt")
    poke(addr + offset, b"\0")
    with pytest.raises(DeviceError, match=side) as caught:
        rig.device.free(addr) if when == "free" else rig.device.close()
    assert (caught.value.code, caught.value.subject) == ("redzone-broken", "hurt")
    assert "hurt" not in rig.device.live_labels()


def test_work_waits_until_synchronisation(checked_rig):
    a = checked_rig.device.alloc(8, label="a")
    checked_rig.device.memset(a, 1, 8, checked_rig.stream)
    checked_rig.launch_add(a, 8, 1)
    assert look(a, 8) == bytes([FRESH_BYTE]) * 8
    checked_rig.device.synchronize(checked_rig.stream)
    assert look(a, 8) == bytes([2] * 8)


def test_an_unfinished_pinned_copy_shows_a_source_changed_too_early(checked_rig):
    d, s = checked_rig.device, checked_rig.stream
    a = d.alloc(4, label="a")
    host = d.pinned_alloc(4, label="host")
    poke(host, b"good")
    d.copy_h2d(a, host, 4, s)
    poke(host, b"evil")
    assert checked_rig.read(a, 4) == b"evil"


def test_a_pinned_target_is_not_complete_before_synchronisation(checked_rig):
    d, s = checked_rig.device, checked_rig.stream
    a = d.alloc(4, label="a")
    host = d.pinned_alloc(4, label="host")
    d.memset(a, 7, 4, s)
    d.copy_d2h(host, a, 4, s)
    assert look(host, 4) == bytes([FRESH_BYTE]) * 4
    d.synchronize(s)
    assert look(host, 4) == bytes([7] * 4)


def test_a_pageable_source_is_taken_at_the_call(checked_rig):
    d, s = checked_rig.device, checked_rig.stream
    a = d.alloc(4, label="a")
    page = ctypes.create_string_buffer(b"good", 4)
    d.copy_h2d(a, ctypes.addressof(page), 4, s)
    page.raw = b"evil"
    assert checked_rig.read(a, 4) == b"good"


def test_a_missing_event_shows_and_the_event_cures_it(checked_rig):
    d = checked_rig.device
    other = d.create_stream()
    a, b = d.alloc(4, label="a"), d.alloc(4, label="b")
    d.memset(a, 1, 4, checked_rig.stream)
    d.copy_d2d(b, a, 4, other)
    assert checked_rig.read(b, 4, other) == bytes([FRESH_BYTE]) * 4
    event = d.create_event()
    d.record_event(event, checked_rig.stream)
    d.wait_event(event, other)
    d.copy_d2d(b, a, 4, other)
    assert checked_rig.read(b, 4, other) == bytes([1] * 4)


def test_destroying_a_stream_runs_what_it_held(checked_rig):
    d = checked_rig.device
    other = d.create_stream()
    a = d.alloc(4, label="a")
    d.memset(a, 1, 4, other)
    d.destroy_stream(other)
    assert look(a, 4) == bytes([1] * 4)


def test_a_wait_runs_no_more_of_the_other_stream_than_it_must(checked_rig):
    d = checked_rig.device
    other = d.create_stream()
    event = d.create_event()
    a = d.alloc(4, label="a")
    d.memset(a, 1, 4, checked_rig.stream)
    d.record_event(event, checked_rig.stream)
    d.memset(a, 2, 4, checked_rig.stream)
    d.wait_event(event, other)
    d.synchronize(other)
    assert look(a, 4) == bytes([1] * 4)


def test_queries_find_work_unfinished_first(checked_rig):
    d, s = checked_rig.device, checked_rig.stream
    a = d.alloc(4, label="a")
    event = d.create_event()
    for query in (lambda: d.query(s), lambda: d.query_event(event)):
        for _ in range(2):  # the count starts again with new work
            d.memset(a, 1, 4, s)
            d.record_event(event, s)
            found = [query() for _ in range(QUERIES_BEFORE_DONE + 2)]
            assert found == [False] * QUERIES_BEFORE_DONE + [True, True]


def test_queries_of_work_that_is_done_do_not_count_for_later_work(checked_rig):
    d, s = checked_rig.device, checked_rig.stream
    a = d.alloc(4, label="a")
    event = d.create_event()
    for query in (lambda: d.query(s), lambda: d.query_event(event)):
        for _ in range(2):
            d.memset(a, 1, 4, s)
            d.record_event(event, s)
            assert [query() for _ in range(QUERIES_BEFORE_DONE)] == [False] * QUERIES_BEFORE_DONE
            d.synchronize(s)


def test_a_stream_holds_a_bounded_amount_of_work(checked_rig):
    d, s = checked_rig.device, checked_rig.stream
    a = d.alloc(1, label="a")
    d.memset(a, 7, 1, s)
    for _ in range(PENDING_LIMIT - 1):
        d.memset(a, 8, 1, s)
    assert look(a, 1) == bytes([FRESH_BYTE])
    d.memset(a, 9, 1, s)
    assert look(a, 1) == b"\7"
    d.synchronize(s)
    assert look(a, 1) == b"\t"


@pytest.mark.parametrize("kind", ["memset", "copy", "pinned", "launch"])
def test_freeing_under_queued_work_fails_when_the_work_runs(checked_rig, kind):
    d, s = checked_rig.device, checked_rig.stream
    a, b = d.alloc(8, label="a"), d.alloc(8, label="b")
    host = d.pinned_alloc(8, label="b")
    if kind == "memset":
        d.memset(b, 0, 8, s)
    elif kind == "copy":
        d.copy_d2d(a, b, 8, s)
    elif kind == "launch":
        checked_rig.launch_add(b, 8, 1)
    else:
        d.copy_h2d(a, host, 8, s)
    d.pinned_free(host) if kind == "pinned" else d.free(b)
    with checked_rig.refuses("use-after-free", "b"):
        d.synchronize(s)
    d.synchronize(s)  # the failed work is gone


def test_a_failure_drops_what_was_queued_behind_it_and_nobody_hangs(checked_rig):
    d, s = checked_rig.device, checked_rig.stream
    other = d.create_stream()
    a, b = d.alloc(8, label="a"), d.alloc(8, label="b")
    event = d.create_event()
    d.memset(b, 0, 8, s)
    d.memset(a, 1, 8, s)
    d.record_event(event, s)
    d.wait_event(event, other)
    d.memset(a, 2, 8, other)
    d.free(b)
    with checked_rig.refuses("use-after-free", "b"):
        d.synchronize(other)
    assert look(a, 8) == bytes([FRESH_BYTE]) * 8
    assert d.query_event(event)
    d.synchronize(other)
    assert look(a, 8) == bytes([2] * 8)


def test_close_runs_what_was_queued(checked_rig):
    seen = []
    d = checked_rig.device
    kernel = d.load_kernel(KernelSpec("see", "i", host=seen.append))
    d.launch(kernel, (1, 1, 1), (1, 1, 1), (4,), checked_rig.stream)
    with checked_rig.refuses("leak", "main"):
        d.close()
    assert seen == [4]


def test_close_tells_of_failed_work_and_leaks_and_still_frees_all():
    device = HostDevice(checked=True)
    stream = device.create_stream(label="s")
    a, b = device.alloc(8, label="a"), device.alloc(8, label="kept")
    device.memset(a, 0, 8, stream)
    device.memset(b, 0, 8, stream)
    device.free(a)
    with pytest.raises(DeviceError) as caught:
        device.close()
    assert (caught.value.code, caught.value.subject) == ("use-after-free", "a")
    assert "leak" in caught.value.__notes__[0] and "kept, s" in caught.value.__notes__[0]
    assert device.live_labels() == ()
    device.close()


def test_interrupted_work_at_close_still_frees_all():
    device = HostDevice(checked=True)
    stream = device.create_stream()

    def interrupt():
        raise KeyboardInterrupt

    kernel = device.load_kernel(KernelSpec("interrupt", "", host=interrupt))
    device.alloc(8, label="a")
    device.launch(kernel, (1, 1, 1), (1, 1, 1), (), stream)
    with pytest.raises(KeyboardInterrupt):
        device.close()
    assert device.live_labels() == ()
    device.close()
