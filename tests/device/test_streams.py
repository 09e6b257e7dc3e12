"""Streams, events, kernels and handles, on every backend."""

from __future__ import annotations

import pytest

from rota.errors import DeviceError
from rota.gpu.device import KernelSpec


def finish(query, limit=1000):
    """Ask until the answer is yes; a device that never says yes fails here."""
    for _ in range(limit):
        if query():
            return
    raise AssertionError("never done")


def test_work_on_one_stream_keeps_its_order(rig):
    a = rig.device.alloc(16, label="a")
    rig.device.memset(a, 1, 16, rig.stream)
    rig.launch_add(a, 16, 4)
    rig.device.memset(a, 9, 4, rig.stream)
    rig.launch_add(a, 8, 1)
    assert rig.read(a, 16) == bytes([10] * 4 + [6] * 4 + [5] * 8)


def test_query_says_done_in_the_end_and_a_pageable_source_may_change_at_once(rig):
    a = rig.device.alloc(4, label="a")
    source = bytearray(b"abcd")
    rig.write(a, bytes(source))
    source[:] = b"????"
    finish(lambda: rig.device.query(rig.stream))
    assert rig.read(a, 4) == b"abcd"


def test_events_order_two_streams(rig):
    d = rig.device
    other = d.create_stream(label="other")
    a = d.alloc(8, label="a")
    first, second = d.create_event(), d.create_event()
    d.memset(a, 1, 8, rig.stream)
    d.record_event(first, rig.stream)
    d.wait_event(first, other)
    rig.launch_add(a, 8, 2, other)
    d.record_event(second, other)
    d.wait_event(second, rig.stream)
    rig.launch_add(a, 8, 4)
    assert rig.read(a, 8) == bytes([7] * 8)
    d.synchronize_event(second)
    assert d.query_event(second)


def test_a_wait_stands_for_the_place_at_the_call(rig):
    d = rig.device
    other = d.create_stream()
    a = d.alloc(8, label="a")
    event = d.create_event()
    d.memset(a, 1, 8, rig.stream)
    d.record_event(event, rig.stream)
    d.wait_event(event, other)
    d.record_event(event, other)  # replaces the event's place, not the wait's
    d.destroy_event(event)
    rig.launch_add(a, 8, 2, other)
    assert rig.read(a, 8, other) == bytes([3] * 8)


def test_synchronising_an_event_finishes_the_work_before_it(rig):
    d = rig.device
    a = d.alloc(8, label="a")
    host = d.pinned_alloc(8, label="host")
    event = d.create_event()
    assert d.query_event(event)  # never recorded: done
    d.synchronize_event(event)
    d.wait_event(event, rig.stream)
    d.memset(a, 5, 8, rig.stream)
    d.copy_d2h(host, a, 8, rig.stream)
    d.record_event(event, rig.stream)
    d.synchronize_event(event)
    d.copy_h2d(a, host, 8, rig.stream)
    assert rig.read(a, 8) == bytes([5] * 8)
    d.record_event(event, rig.stream)
    finish(lambda: d.query_event(event))


def test_streams_may_wait_for_each_other_many_thousand_times(rig):
    d = rig.device
    other = d.create_stream()
    event = d.create_event()
    a = d.alloc(1, label="a")
    d.memset(a, 0, 1, rig.stream)
    here, there = rig.stream, other
    for _ in range(6000):
        d.record_event(event, here)
        d.wait_event(event, there)
        rig.launch_add(a, 1, 1, there)
        here, there = there, here
    assert rig.read(a, 1, here) == bytes([6000 % 256])


def test_destroying_a_stream_still_does_its_work(rig):
    d = rig.device
    other = d.create_stream()
    a = d.alloc(8, label="a")
    event = d.create_event()
    d.memset(a, 3, 8, other)
    d.record_event(event, other)
    d.destroy_stream(other)
    d.synchronize_event(event)
    assert rig.read(a, 8) == bytes([3] * 8)
    with rig.refuses("destroyed-handle", str(other)):
        d.synchronize(other)


def test_wrong_handles_are_told_from_destroyed_ones(rig):
    d = rig.device
    event = d.create_event()
    d.begin_capture(rig.stream)
    graph = d.end_capture(rig.stream)
    graph_exec = d.instantiate(graph)
    with rig.refuses("bad-handle"):
        d.synchronize(event)
    with rig.refuses("bad-handle"):
        d.synchronize(0)
    with rig.refuses("bad-handle"):
        d.synchronize_event(10_000)
    d.destroy_event(event)
    d.destroy_graph(graph)
    d.destroy_exec(graph_exec)
    a = d.alloc(8, label="a")
    destroyed = [
        lambda: d.record_event(event, rig.stream),
        lambda: d.wait_event(event, rig.stream),
        lambda: d.query_event(event),
        lambda: d.synchronize_event(event),
        lambda: d.destroy_event(event),
        lambda: d.instantiate(graph),
        lambda: d.destroy_graph(graph),
        lambda: d.upload(graph_exec, rig.stream),
        lambda: d.replay(graph_exec, rig.stream),
        lambda: d.destroy_exec(graph_exec),
    ]
    for call in destroyed:
        with rig.refuses("destroyed-handle"):
            call()
    d.destroy_stream(rig.stream)
    for call in (
        lambda: d.memset(a, 0, 1, rig.stream),
        lambda: rig.launch_add(a, 1, 1),
        lambda: d.begin_capture(rig.stream),
        lambda: d.destroy_stream(rig.stream),
    ):
        with rig.refuses("destroyed-handle", str(rig.stream)):
            call()


def test_handles_are_never_reused(rig):
    seen = {rig.stream}
    for _ in range(50):
        stream, event = rig.device.create_stream(), rig.device.create_event()
        assert stream not in seen and event not in seen and stream != event
        seen |= {stream, event}
        rig.device.destroy_stream(stream)
        rig.device.destroy_event(event)


def test_launch_arguments_are_copied_at_the_call(rig):
    a = rig.device.alloc(8, label="a")
    rig.device.memset(a, 0, 8, rig.stream)
    args = [a, 8, 1]
    rig.device.launch(rig.add, (1, 1, 1), (128, 1, 1), args, rig.stream)
    args[2] = 100
    assert rig.read(a, 8) == bytes([1] * 8)


def test_a_kernel_needs_a_form_for_the_device_and_known_letters(rig):
    with rig.refuses("bad-argument", "nothing"):
        rig.device.load_kernel(KernelSpec("nothing", "p"))
    with rig.refuses("bad-argument", "odd"):
        rig.device.load_kernel(KernelSpec("odd", "px", host=print, cuda_source="x"))
    with rig.refuses("bad-argument", "long"):
        rig.device.load_kernel(KernelSpec("long", "i" * 65, host=print, cuda_source="x"))
    with rig.refuses("bad-handle"):
        rig.device.launch(object(), (1, 1, 1), (1, 1, 1), (), rig.stream)


def test_a_raising_host_kernel_is_launch_failed_and_keeps_its_cause(host_rig):
    def broken(value):
        raise ZeroDivisionError(f"with {value}")

    kernel = host_rig.device.load_kernel(KernelSpec("broken", "i", host=broken))
    with host_rig.refuses("launch-failed", "broken"):
        host_rig.device.launch(kernel, (1, 1, 1), (1, 1, 1), (3,), host_rig.stream)
        host_rig.device.synchronize(host_rig.stream)
    try:
        host_rig.device.launch(kernel, (1, 1, 1), (1, 1, 1), (3,), host_rig.stream)
        host_rig.device.synchronize(host_rig.stream)
    except DeviceError as error:
        assert isinstance(error.__cause__, ZeroDivisionError)
    else:
        pytest.fail("the second launch did not fail")
    a = host_rig.device.alloc(4, label="a")
    host_rig.device.memset(a, 2, 4, host_rig.stream)
    assert host_rig.read(a, 4) == bytes([2] * 4)  # the stream lives on


def test_a_kernels_own_device_error_passes_unchanged(host_rig):
    def refusing():
        raise DeviceError("asked for", code="injected", subject="me")

    kernel = host_rig.device.load_kernel(KernelSpec("refusing", "", host=refusing))
    with host_rig.refuses("injected", "me"):
        host_rig.device.launch(kernel, (1, 1, 1), (1, 1, 1), (), host_rig.stream)
        host_rig.device.synchronize(host_rig.stream)
