"""Graphs, on every backend: what a capture records, what a replay does, and what it may touch."""

from __future__ import annotations

import pytest

from rota.errors import DeviceError


def test_capture_records_and_does_not_run(rig):
    a = rig.device.alloc(8, label="a")
    rig.device.memset(a, 0, 8, rig.stream)
    graph = rig.capture_add(a)
    assert rig.read(a, 8) == bytes(8)
    graph_exec = rig.device.instantiate(graph)
    rig.device.upload(graph_exec, rig.stream)
    assert rig.read(a, 8) == bytes(8)
    for _ in range(3):
        rig.device.replay(graph_exec, rig.stream)
    assert rig.read(a, 8) == bytes([3] * 8)


def test_a_replay_keeps_its_place_in_the_stream_and_reads_memory_as_it_is_then(rig):
    a = rig.device.alloc(8, label="a")
    graph_exec = rig.device.instantiate(rig.capture_add(a))
    rig.device.memset(a, 10, 8, rig.stream)
    rig.device.replay(graph_exec, rig.stream)
    rig.device.memset(a, 20, 4, rig.stream)
    rig.device.replay(graph_exec, rig.stream)
    assert rig.read(a, 8) == bytes([21] * 4 + [12] * 4)


def test_a_graph_keeps_its_own_copy_of_the_arguments(rig):
    a = rig.device.alloc(8, label="a")
    rig.device.memset(a, 0, 8, rig.stream)
    args = [a, 8, 1]
    rig.device.begin_capture(rig.stream)
    rig.device.launch(rig.add, (1, 1, 1), (128, 1, 1), args, rig.stream)
    args[2] = 100
    graph_exec = rig.device.instantiate(rig.device.end_capture(rig.stream))
    rig.device.replay(graph_exec, rig.stream)
    assert rig.read(a, 8) == bytes([1] * 8)


def test_every_kind_of_work_replays_and_pinned_memory_is_read_at_replay(rig):
    d, s = rig.device, rig.stream
    a, b = d.alloc(8, label="a"), d.alloc(8, label="b")
    source, target = d.pinned_alloc(8, label="source"), d.pinned_alloc(8, label="target")
    d.begin_capture(s)
    d.copy_h2d(a, source, 8, s)
    d.copy_d2d(b, a, 8, s)
    d.memset(b, 0xEE, 2, s)
    d.copy_d2h(target, b, 8, s)
    graph_exec = d.instantiate(d.end_capture(s))
    for value in (3, 4):
        rig.write(b, bytes([value]) * 8)
        d.copy_d2h(source, b, 8, s)
        d.replay(graph_exec, s)
        d.copy_h2d(a, target, 8, s)
        assert rig.read(a, 8) == b"\xee\xee" + bytes([value]) * 6


def test_exec_outlives_its_graph_and_a_destroyed_exec_is_refused(rig):
    a = rig.device.alloc(8, label="a")
    rig.device.memset(a, 0, 8, rig.stream)
    graph = rig.capture_add(a)
    graph_exec = rig.device.instantiate(graph)
    rig.device.destroy_graph(graph)
    rig.device.replay(graph_exec, rig.stream)
    rig.device.destroy_exec(graph_exec)  # the queued replay is still done
    with rig.refuses("destroyed-handle"):
        rig.device.replay(graph_exec, rig.stream)
    assert rig.read(a, 8) == bytes([1] * 8)


@pytest.mark.parametrize("kind", ["launch", "memset", "copy", "pinned"])
def test_a_graph_that_touches_freed_memory_fails_at_replay_with_the_label(rig, kind):
    d, s = rig.device, rig.stream
    a, slot = d.alloc(8, label="a"), d.alloc(8, label="slot 3")
    host = d.pinned_alloc(8, label="rows")
    d.memset(a, 0, 8, s)
    d.begin_capture(s)
    d.memset(a, 9, 8, s)
    if kind == "launch":
        rig.launch_add(slot, 8, 1)
    elif kind == "memset":
        d.memset(slot, 0, 8, s)
    elif kind == "copy":
        d.copy_d2d(a, slot, 8, s)
    else:
        d.copy_h2d(a, host, 8, s)
    graph_exec = d.instantiate(d.end_capture(s))
    if kind == "pinned":
        d.pinned_free(host)
    else:
        d.free(slot)
    d.alloc(8, label="new owner of the range")
    d.pinned_alloc(8, label="another")
    for _ in range(2):  # also when asked again
        with rig.refuses("use-after-free", "rows" if kind == "pinned" else "slot 3"):
            d.replay(graph_exec, s)
    assert rig.read(a, 8) == bytes(8)  # nothing of the graph ran


def test_a_graph_that_ran_before_the_free_fails_after_it(rig):
    a = rig.device.alloc(8, label="a")
    rig.device.memset(a, 0, 8, rig.stream)
    graph_exec = rig.device.instantiate(rig.capture_add(a))
    rig.device.replay(graph_exec, rig.stream)
    assert rig.read(a, 8) == bytes([1] * 8)
    rig.device.free(a)
    with rig.refuses("use-after-free", "a"):
        rig.device.replay(graph_exec, rig.stream)


def test_a_free_elsewhere_does_not_hurt_a_graph(rig):
    a, b = rig.device.alloc(8, label="a"), rig.device.alloc(8, label="b")
    rig.device.memset(a, 0, 8, rig.stream)
    graph_exec = rig.device.instantiate(rig.capture_add(a))
    rig.device.replay(graph_exec, rig.stream)
    rig.device.free(b)
    rig.device.replay(graph_exec, rig.stream)
    assert rig.read(a, 8) == bytes([2] * 8)


def test_an_update_gives_an_exec_other_arguments(rig):
    d, s = rig.device, rig.stream
    a, b = d.alloc(8, label="a"), d.alloc(8, label="b")
    host = d.pinned_alloc(8, label="host")

    def capture(target, value, *more):
        d.begin_capture(s)
        d.memset(target, value, 8, s)
        d.launch(rig.add, (1, 1, 1), (128, 1, 1), (target, 8, 1), s)
        for work in more:
            work()
        return d.end_capture(s)

    first, second = capture(a, 10), capture(b, 20)
    longer = capture(b, 30, lambda: d.memset(b, 0, 8, s))
    d.begin_capture(s)
    d.copy_h2d(b, host, 8, s)
    d.launch(rig.add, (1, 1, 1), (128, 1, 1), (b, 8, 1), s)
    other = d.end_capture(s)
    d.memset(a, 0, 8, s)
    d.memset(b, 0, 8, s)
    made = d.instantiate(first)
    d.replay(made, s)  # this one may still wait in its stream when the exec changes
    d.update(made, second)
    assert (rig.read(a, 8), rig.read(b, 8)) == (bytes([11] * 8), bytes(8))
    d.memset(a, 0, 8, s)
    d.replay(made, s)
    assert (rig.read(a, 8), rig.read(b, 8)) == (bytes(8), bytes([21] * 8))
    for different in (longer, other):
        with pytest.raises(DeviceError) as caught:
            d.update(made, different)
        assert caught.value.code == "graph-mismatch"
    # A refusal leaves it as it was, and it needs none of the graphs.
    for graph in (first, second, longer, other):
        d.destroy_graph(graph)
    with pytest.raises(DeviceError) as caught:
        d.update(made, second)
    assert caught.value.code == "destroyed-handle"
    d.memset(b, 0, 8, s)
    d.replay(made, s)
    assert rig.read(b, 8) == bytes([21] * 8)
    # It touches what the second touched: the first's memory may go.
    d.free(a)
    d.replay(made, s)
    d.synchronize(s)
    d.free(b)
    with pytest.raises(DeviceError) as caught:
        d.replay(made, s)
        d.synchronize(s)
    assert (caught.value.code, caught.value.subject) == ("use-after-free", "b")
    d.destroy_exec(made)
    d.pinned_free(host)
