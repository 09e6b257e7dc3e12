"""Devices around a device: all passes through, faults fire where asked, traces are stable text."""

from __future__ import annotations

import ctypes
import inspect
from contextlib import ExitStack, suppress

import pytest

from rota.errors import DeviceError
from rota.gpu.decorators import (
    OPERATIONS,
    Fault,
    FaultyDevice,
    ForwardingDevice,
    TracingDevice,
)
from rota.gpu.device import Device, KernelSpec
from rota.gpu.host import HostDevice

ONE = (1, 1, 1)


def tour(device):
    """Every operation at least once, giving back all it takes, whatever fails on the way.

    A give-back that fails is asked once more: an injected fault has no effect on the inner device.
    """

    def give_back(call, *args):
        try:
            call(*args)
        except DeviceError as error:
            if error.code != "injected":
                raise
            call(*args)

    with ExitStack() as stack:

        def hold(take, back):
            taken = take()
            stack.callback(give_back, back, taken)
            return taken

        s = hold(lambda: device.create_stream(label="s"), device.destroy_stream)
        side = hold(lambda: device.create_stream(label="side"), device.destroy_stream)
        event = hold(lambda: device.create_event(label="e"), device.destroy_event)
        a = hold(lambda: device.alloc(64, label="a"), device.free)
        b = hold(lambda: device.alloc(64, label="b"), device.free)
        host = hold(lambda: device.pinned_alloc(64, label="host"), device.pinned_free)
        page = ctypes.create_string_buffer(64)
        kernel = device.load_kernel(KernelSpec("noop", "pi", host=lambda *args: None))
        device.memset(a, 1, 64, s)
        device.copy_d2h(host, a, 64, s)
        device.copy_h2d(b, host, 64, s)
        device.copy_h2d(b, ctypes.addressof(page), 64, s)
        device.copy_d2d(b + 32, a, 32, s)
        device.record_event(event, s)
        device.wait_event(event, side)
        device.query(side)
        device.query_event(event)
        device.synchronize_event(event)
        stack.callback(give_back, device.abort_capture_if_active, s)
        device.begin_capture(s)
        device.launch(kernel, ONE, ONE, (b + 8, 5), s)
        graph = hold(lambda: device.end_capture(s), device.destroy_graph)
        graph_exec = hold(lambda: device.instantiate(graph), device.destroy_exec)
        device.update(graph_exec, graph)
        device.upload(graph_exec, s)
        device.replay(graph_exec, s)
        device.synchronize(s)
        device.query(s)
    give_back(device.close)


def public(cls):
    return {name for name in vars(cls) if not name.startswith("_")}


def test_the_decorators_pass_on_the_whole_protocol():
    named = {"name", "host_addressable", "memory_info", "live_labels"}
    assert public(ForwardingDevice) == public(Device)
    assert public(Device) - named == set(OPERATIONS)
    for op in OPERATIONS:
        expected = inspect.signature(getattr(Device, op))
        assert inspect.signature(getattr(ForwardingDevice, op)) == expected, op


def test_the_tour_uses_every_operation():
    counting = FaultyDevice(HostDevice(checked=True), [])
    tour(counting)
    assert [op for op in OPERATIONS if not counting.calls(op)] == []
    assert counting.fired == []


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("op", OPERATIONS)
def test_a_fault_at_any_call_of_any_operation_leaks_nothing(op, checked):
    counting = FaultyDevice(HostDevice(checked=checked), [])
    tour(counting)
    for nth in range(1, counting.calls(op) + 1):
        inner = HostDevice(checked=checked)
        faulty = FaultyDevice(inner, [Fault(op, nth)])
        with suppress(DeviceError):
            tour(faulty)
        assert faulty.fired == [Fault(op, nth)]
        assert inner.live_labels() == ()
        inner.close()  # a checked device would raise for a leak


def test_a_fault_has_no_effect_on_the_inner_device_and_fires_once():
    inner = HostDevice()
    device = FaultyDevice(inner, [Fault("alloc", 2, "out-of-memory")])
    first = device.alloc(8, label="first")
    with pytest.raises(DeviceError) as caught:
        device.alloc(8, label="second")
    assert (caught.value.code, caught.value.subject) == ("out-of-memory", "alloc")
    assert device.live_labels() == ("first",)
    third = device.alloc(8, label="third")
    assert device.memory_info() == inner.memory_info()
    device.free(first)
    device.free(third)
    device.close()


@pytest.mark.parametrize("fault", [Fault("allocate", 1), Fault("alloc", 0)])
def test_a_fault_must_name_a_call_that_can_happen(fault):
    with pytest.raises(DeviceError) as caught:
        FaultyDevice(HostDevice(), [fault])
    assert caught.value.code == "bad-argument"


EXPECTED = """\
create_stream s -> 1
create_stream side -> 2
create_event e -> 3
alloc 64 a
alloc 64 b
pinned_alloc 64 host
load_kernel noop
memset a 1 64 1
copy_d2h host a 64 1
copy_h2d b host 64 1
copy_h2d b elsewhere 64 1
copy_d2d b+0x20 a 32 1
record_event 3 1
wait_event 3 2
query 2 -> False
query_event 3 -> False
synchronize_event 3
begin_capture 1 thread-local
launch noop (1,1,1) (1,1,1) b+0x8 5 1
end_capture 1 -> 4
instantiate 4 -> 5
update 5 4
upload 5 1
replay 5 1
synchronize 1
query 1 -> True
destroy_exec 5
destroy_graph 4
abort_capture_if_active 1 -> False
pinned_free host
free b
free a
destroy_event 3
destroy_stream 2
destroy_stream 1
close""".splitlines()


def test_a_trace_is_one_stable_line_a_call():
    for _ in range(2):
        lines = []
        tour(TracingDevice(HostDevice(checked=True), lines.append))
        assert lines == EXPECTED


def test_a_trace_shows_refusals_and_nests_with_faults():
    lines = []
    inner = FaultyDevice(HostDevice(), [Fault("free", 1)])
    device = TracingDevice(inner, lines.append)
    a = device.alloc(8, label="a")
    with pytest.raises(DeviceError):
        device.free(a)
    with pytest.raises(DeviceError):
        device.free(a + 1)
    device.free(a)
    with pytest.raises(DeviceError):
        device.free(a)
    device.close()
    assert lines == [
        "alloc 8 a",
        "free a ! injected",
        "free a+0x1 ! bad-address",
        "free a",
        "free elsewhere ! double-free",
        "close",
    ]
