"""How a checked host device judges launches: argument ranges, addresses, footprints."""

from __future__ import annotations

import ctypes

import pytest

from rota.errors import DeviceError
from rota.gpu.device import KernelSpec
from rota.gpu.host_memory import FRESH_BYTE


def look(addr, n):
    """Bytes at an address right now, past every queue."""
    return ctypes.string_at(addr, n)


@pytest.mark.parametrize("how", ["start", "length", "freed", "elsewhere", "redzone"])
def test_a_launch_is_judged_by_its_footprint(checked_rig, how):
    d, s = checked_rig.device, checked_rig.stream
    a = d.alloc(8, label="a")
    args = {
        "start": (a + 9, 1, 1),
        "length": (a, 9, 1),
        "freed": (a, 8, 1),
        "elsewhere": (64, 8, 1),
        "redzone": (a - 1, 2, 1),
    }[how]
    codes = {"freed": ("use-after-free", "a"), "elsewhere": ("bad-address", None)}
    if how == "freed":
        d.free(a)
    with checked_rig.refuses(*codes.get(how, ("out-of-bounds", "a"))):
        d.launch(checked_rig.add, (1, 1, 1), (128, 1, 1), args, s)
        d.synchronize(s)
    if how != "freed":
        assert look(a, 8) == bytes([FRESH_BYTE]) * 8


def test_the_refusal_of_a_launch_names_the_kernel(checked_rig):
    a = checked_rig.device.alloc(8, label="a")
    with pytest.raises(DeviceError) as caught:
        checked_rig.launch_add(a, 9, 1)
        checked_rig.device.synchronize(checked_rig.stream)
    assert caught.value.__notes__ == ["in the arguments of kernel add_bytes"]


def test_a_footprint_may_read_a_table_that_queued_work_fills(checked_rig):
    d, s = checked_rig.device, checked_rig.stream
    table, target = d.alloc(8, label="table"), d.alloc(4, label="target")

    def through(table_addr):
        ctypes.memset(int.from_bytes(look(table_addr, 8), "little"), 5, 4)

    def footprint(args):
        yield (int(args[0]), 8, "r")
        yield (int.from_bytes(look(int(args[0]), 8), "little"), 4, "w")

    kernel = d.load_kernel(KernelSpec("through", "p", host=through, footprint=footprint))
    checked_rig.write(table, target.to_bytes(8, "little"))
    d.launch(kernel, (1, 1, 1), (1, 1, 1), (table,), s)
    assert checked_rig.read(target, 4) == bytes([5] * 4)
    checked_rig.write(table, (target + 1).to_bytes(8, "little"))
    with checked_rig.refuses("out-of-bounds", "target"):
        d.launch(kernel, (1, 1, 1), (1, 1, 1), (table,), s)
        d.synchronize(s)


def test_a_footprint_that_raises_is_launch_failed(checked_rig):
    kernel = checked_rig.device.load_kernel(
        KernelSpec("odd", "i", host=abs, footprint=lambda args: [(1 // int(args[0]), 1, "r")])
    )
    with checked_rig.refuses("launch-failed", "odd"):
        checked_rig.device.launch(kernel, (1, 1, 1), (1, 1, 1), (0,), checked_rig.stream)
        checked_rig.device.synchronize(checked_rig.stream)


def test_address_arguments_are_checked_without_a_footprint_and_null_is_allowed(checked_rig):
    d, s = checked_rig.device, checked_rig.stream
    seen = []
    kernel = d.load_kernel(KernelSpec("see", "pp", host=lambda *args: seen.append(args)))
    a = d.alloc(8, label="a")
    d.launch(kernel, (1, 1, 1), (1, 1, 1), (a + 4, 0), s)
    with checked_rig.refuses("bad-address"):
        d.launch(kernel, (1, 1, 1), (1, 1, 1), (a, 64), s)
    d.synchronize(s)
    assert seen == [(a + 4, 0)]


def test_foreign_addresses_pass_only_where_the_device_was_told_so(make_checked_rig):
    page = ctypes.create_string_buffer(8)
    rig = make_checked_rig(allow_foreign=True)
    rig.launch_add(ctypes.addressof(page), 8, 3)
    rig.device.synchronize(rig.stream)
    assert page.raw == bytes([3] * 8)
    a = rig.device.alloc(8, label="a")
    with rig.refuses("out-of-bounds", "a"):
        rig.launch_add(a, 9, 1)
        rig.device.synchronize(rig.stream)
    strict = make_checked_rig()
    with strict.refuses("bad-address"):
        strict.launch_add(ctypes.addressof(page), 8, 3)


BAD_LAUNCHES = {
    "too few": dict(args=(0, 0)),
    "too many": dict(args=(0, 0, 0, 0)),
    "int32 overflow": dict(args=(0, 2**31, 0)),
    "int32 underflow": dict(args=(0, 0, -(2**31) - 1)),
    "negative address": dict(args=(-1, 0, 0)),
    "float for int": dict(args=(0, 1.0, 0)),
    "empty grid": dict(grid=(0, 1, 1)),
    "grid y": dict(grid=(1, 65536, 1)),
    "two numbers": dict(grid=(1, 1)),
    "block z": dict(block=(1, 1, 65)),
    "threads": dict(block=(1024, 2, 1)),
    "shared": dict(shared_bytes=227 * 1024 + 1),
    "negative shared": dict(shared_bytes=-1),
}


@pytest.mark.parametrize("name", BAD_LAUNCHES)
def test_a_launch_the_driver_would_refuse_or_truncate_is_refused(checked_rig, name):
    words = {"grid": (1, 1, 1), "block": (1, 1, 1), "args": (0, 0, 0), "shared_bytes": 0}
    kernel = checked_rig.device.load_kernel(KernelSpec("none", "pii", host=lambda *args: None))

    def launch(words):
        checked_rig.device.launch(
            kernel,
            words["grid"],
            words["block"],
            words["args"],
            checked_rig.stream,
            words["shared_bytes"],
        )

    launch(words)
    with checked_rig.refuses("bad-argument", "none"):
        launch(words | BAD_LAUNCHES[name])


def test_int64_and_float_arguments_have_their_own_ranges(checked_rig):
    d, s = checked_rig.device, checked_rig.stream
    kernel = d.load_kernel(KernelSpec("wide", "lf", host=lambda *args: None))
    d.launch(kernel, (1, 1, 1), (1, 1, 1), (-(2**63), 1.5), s)
    with checked_rig.refuses("bad-argument"):
        d.launch(kernel, (1, 1, 1), (1, 1, 1), (2**63, 1.5), s)
    with checked_rig.refuses("bad-argument"):
        d.launch(kernel, (1, 1, 1), (1, 1, 1), (1, "1.5"), s)


def test_a_replayed_launch_is_judged_as_it_runs(checked_rig):
    d, s = checked_rig.device, checked_rig.stream
    count = d.alloc(8, label="count")
    a = d.alloc(8, label="a")

    def footprint(args):
        return [(int(args[0]), int.from_bytes(look(int(args[1]), 8), "little"), "w")]

    kernel = d.load_kernel(
        KernelSpec("counted", "pp", host=lambda *args: None, footprint=footprint)
    )
    d.begin_capture(s)
    d.launch(kernel, (1, 1, 1), (1, 1, 1), (a, count), s)
    graph_exec = d.instantiate(d.end_capture(s))
    checked_rig.write(count, (8).to_bytes(8, "little"))
    d.replay(graph_exec, s)
    d.synchronize(s)
    checked_rig.write(count, (9).to_bytes(8, "little"))
    d.replay(graph_exec, s)
    with checked_rig.refuses("out-of-bounds", "a"):
        d.synchronize(s)
