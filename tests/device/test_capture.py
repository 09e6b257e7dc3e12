"""The rules of stream capture, on every backend: the driver's own, and what breaks them."""

from __future__ import annotations

import ctypes

import pytest

VIOLATIONS = {
    "alloc": lambda r, o: r.device.alloc(8, label="x"),
    "free": lambda r, o: r.device.free(o["mem"]),
    "pinned_alloc": lambda r, o: r.device.pinned_alloc(8, label="x"),
    "pinned_free": lambda r, o: r.device.pinned_free(o["host"]),
    "load_kernel": lambda r, o: r.device.load_kernel(r.add.spec),
    "synchronize": lambda r, o: r.device.synchronize(r.stream),
    "query": lambda r, o: r.device.query(r.stream),
    "synchronize-other": lambda r, o: r.device.synchronize(o["other"]),
    "query-other": lambda r, o: r.device.query(o["other"]),
    "synchronize_event": lambda r, o: r.device.synchronize_event(o["event"]),
    "query_event": lambda r, o: r.device.query_event(o["event"]),
    "destroy_stream": lambda r, o: r.device.destroy_stream(r.stream),
    "replay": lambda r, o: r.device.replay(o["exec"], r.stream),
    "upload": lambda r, o: r.device.upload(o["exec"], r.stream),
    "wait-outside": lambda r, o: r.device.wait_event(o["event"], r.stream),
    "pageable-h2d": lambda r, o: r.device.copy_h2d(o["mem"], o["page"], 8, r.stream),
    "pageable-d2h": lambda r, o: r.device.copy_d2h(o["page"], o["mem"], 8, r.stream),
    "captured-sync": lambda r, o: r.device.synchronize_event(o["inside"]),
    "captured-query": lambda r, o: r.device.query_event(o["inside"]),
}
ON_THE_STREAM = {"synchronize", "query", "destroy_stream"}
UNSAFE = {
    "alloc",
    "free",
    "pinned_alloc",
    "pinned_free",
    "load_kernel",
    "synchronize-other",
    "query-other",
    "synchronize_event",
    "query_event",
}


class Stage:
    """A capture in progress and the things violations need."""

    def __init__(self, rig, mode):
        d = rig.device
        self.page = ctypes.create_string_buffer(8)
        self.things = {
            "mem": d.alloc(8, label="mem"),
            "host": d.pinned_alloc(8, label="host"),
            "other": d.create_stream(label="other"),
            "event": d.create_event(label="event"),
            "inside": d.create_event(label="inside"),
            "page": ctypes.addressof(self.page),
        }
        d.record_event(self.things["event"], rig.stream)
        self.things["exec"] = d.instantiate(rig.capture_add(self.things["mem"]))
        d.begin_capture(rig.stream, mode)
        d.record_event(self.things["inside"], rig.stream)


@pytest.mark.parametrize("mode", ["global", "thread-local"])
@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_violation_is_refused_and_invalidates_the_capture(rig, mode, name):
    stage = Stage(rig, mode)
    before = rig.device.live_labels()
    with rig.refuses("capture-violation"):
        VIOLATIONS[name](rig, stage.things)
    assert rig.device.live_labels() == before
    with rig.refuses("capture-invalidated"):
        rig.device.memset(stage.things["mem"], 0, 8, rig.stream)
    with rig.refuses("capture-invalidated"):
        rig.device.end_capture(rig.stream)
    assert rig.device.live_labels() == before
    rig.device.synchronize(rig.stream)  # the capture is over
    with rig.refuses("not-capturing"):
        rig.device.end_capture(rig.stream)


@pytest.mark.parametrize("name", sorted(UNSAFE | ON_THE_STREAM))
def test_another_threads_calls_count_in_global_mode_only(rig, name):
    stage = Stage(rig, "global")
    assert rig.elsewhere(lambda: VIOLATIONS[name](rig, stage.things)) == "capture-violation"
    with rig.refuses("capture-invalidated"):
        rig.device.end_capture(rig.stream)
    rig.device.begin_capture(rig.stream, "thread-local")
    if name in ON_THE_STREAM:
        found = rig.elsewhere(lambda: VIOLATIONS[name](rig, stage.things))
        assert found == "capture-violation"
        with rig.refuses("capture-invalidated"):
            rig.device.end_capture(rig.stream)
    else:
        assert rig.elsewhere(lambda: VIOLATIONS[name](rig, stage.things)) is None
        rig.device.destroy_graph(rig.device.end_capture(rig.stream))


def test_a_worker_copies_on_its_own_stream_while_another_thread_captures(rig):
    d = rig.device
    own = d.create_stream(label="own")
    a, b = d.alloc(8, label="a"), d.alloc(8, label="b")
    d.memset(a, 0, 8, rig.stream)
    d.begin_capture(rig.stream)
    rig.launch_add(a, 8, 1)

    def worker():
        rig.write(b, b"12345678", own)
        d.synchronize(own)

    assert rig.elsewhere(worker) is None
    graph_exec = d.instantiate(d.end_capture(rig.stream))
    assert rig.read(b, 8) == b"12345678"
    d.memset(b, 0, 8, rig.stream)
    d.replay(graph_exec, rig.stream)
    assert (rig.read(a, 8), rig.read(b, 8)) == (bytes([1] * 8), bytes(8))


def test_a_second_capture_is_refused_and_the_first_goes_on(rig):
    a = rig.device.alloc(8, label="a")
    other = rig.device.create_stream()
    rig.device.begin_capture(rig.stream)
    for stream in (rig.stream, other):
        with rig.refuses("capture-violation"):
            rig.device.begin_capture(stream)
    rig.launch_add(a, 8, 1)
    rig.device.instantiate(rig.device.end_capture(rig.stream))


def test_end_capture_belongs_to_the_origin_stream_and_its_thread(rig):
    d = rig.device
    other = d.create_stream()
    with rig.refuses("not-capturing", "main"):
        d.end_capture(rig.stream)
    d.begin_capture(rig.stream)
    with rig.refuses("not-capturing"):
        d.end_capture(other)
    d.destroy_graph(d.end_capture(rig.stream))
    d.begin_capture(rig.stream)
    assert rig.elsewhere(lambda: d.end_capture(rig.stream)) == "capture-violation"
    with rig.refuses("capture-invalidated", "main"):
        d.end_capture(rig.stream)


def test_an_unknown_mode_is_refused(rig):
    with rig.refuses("bad-argument"):
        rig.device.begin_capture(rig.stream, "relaxed")
    assert not rig.device.abort_capture_if_active(rig.stream)


def test_abort_drops_the_capture_whatever_its_state(rig):
    d = rig.device
    a = d.alloc(8, label="a")
    d.memset(a, 0, 8, rig.stream)
    assert not d.abort_capture_if_active(rig.stream)
    d.begin_capture(rig.stream)
    rig.launch_add(a, 8, 1)
    assert d.abort_capture_if_active(rig.stream)
    assert not d.abort_capture_if_active(rig.stream)
    d.begin_capture(rig.stream)
    with rig.refuses("capture-violation"):
        d.alloc(8, label="x")
    assert d.abort_capture_if_active(rig.stream)
    rig.launch_add(a, 8, 2)
    assert rig.read(a, 8) == bytes([2] * 8)
    assert d.live_labels() == ("a", "main")


def test_work_forked_by_an_event_joins_the_capture_and_must_come_back(rig):
    d = rig.device
    side = d.create_stream(label="side")
    a, b = d.alloc(8, label="a"), d.alloc(8, label="b")
    fork, join = d.create_event(), d.create_event()
    d.memset(a, 1, 8, rig.stream)
    d.memset(b, 1, 8, rig.stream)
    d.synchronize(rig.stream)

    def capture(with_join, late_work=False):
        d.begin_capture(rig.stream)
        rig.launch_add(a, 8, 1)
        d.record_event(fork, rig.stream)
        d.wait_event(fork, side)
        d.copy_d2d(b, a, 8, side)
        d.record_event(join, side)
        if late_work:
            d.memset(b, 0, 8, side)
        if with_join:
            d.wait_event(join, rig.stream)
        rig.launch_add(a, 8, 1)
        return d.end_capture(rig.stream)

    for arguments in ((False,), (True, True)):
        with rig.refuses("capture-unjoined", "side"):
            capture(*arguments)
        d.synchronize(side)  # the side stream is free again
    graph_exec = d.instantiate(capture(True))
    assert (rig.read(a, 8), rig.read(b, 8)) == (bytes([1] * 8), bytes([1] * 8))
    d.replay(graph_exec, rig.stream)
    assert (rig.read(a, 8), rig.read(b, 8)) == (bytes([3] * 8), bytes([2] * 8))


def test_a_forked_stream_is_in_the_capture(rig):
    d = rig.device
    side = d.create_stream(label="side")
    fork = d.create_event()
    d.begin_capture(rig.stream)
    d.record_event(fork, rig.stream)
    d.wait_event(fork, side)
    assert rig.elsewhere(lambda: d.synchronize(side)) == "capture-violation"
    with rig.refuses("capture-invalidated"):
        d.wait_event(fork, side)
    assert d.abort_capture_if_active(side)
    d.synchronize(side)


def test_no_stream_joins_a_broken_capture(rig):
    d = rig.device
    side = d.create_stream(label="side")
    fork = d.create_event()
    d.begin_capture(rig.stream)
    d.record_event(fork, rig.stream)
    with rig.refuses("capture-violation"):
        d.synchronize(rig.stream)
    with rig.refuses("capture-invalidated", "main"):
        d.wait_event(fork, side)
    assert not d.abort_capture_if_active(side)
    assert d.abort_capture_if_active(rig.stream)


def test_an_event_recorded_in_a_capture_is_useless_outside_until_recorded_again(rig):
    d = rig.device
    event = d.create_event(label="inside")
    d.begin_capture(rig.stream)
    d.record_event(event, rig.stream)
    d.destroy_graph(d.end_capture(rig.stream))
    for call in (
        lambda: d.synchronize_event(event),
        lambda: d.query_event(event),
        lambda: d.wait_event(event, rig.stream),
    ):
        with rig.refuses("capture-violation", "inside"):
            call()
    d.record_event(event, rig.stream)
    d.wait_event(event, rig.stream)
    d.synchronize_event(event)


def test_an_event_recorded_outside_again_leaves_the_capture(rig):
    d = rig.device
    other = d.create_stream()
    event = d.create_event(label="moved")
    d.begin_capture(rig.stream)
    d.record_event(event, rig.stream)
    d.record_event(event, other)
    with rig.refuses("capture-violation", "moved"):
        d.wait_event(event, rig.stream)
    assert d.abort_capture_if_active(rig.stream)


def test_bad_work_is_refused_at_capture_already(rig):
    a = rig.device.alloc(8, label="a")
    rig.device.begin_capture(rig.stream)
    with rig.refuses("out-of-bounds", "a"):
        rig.device.memset(a, 0, 9, rig.stream)
    rig.device.destroy_graph(rig.device.end_capture(rig.stream))


def test_closing_during_a_capture_ends_it(rig):
    rig.device.begin_capture(rig.stream)
    rig.device.create_event(label="left")
    if rig.checked:
        with rig.refuses("leak"):
            rig.device.close()
    else:
        rig.device.close()
    with rig.refuses("device-closed"):
        rig.device.end_capture(rig.stream)


def test_a_capture_has_a_size_limit(rig, monkeypatch):
    monkeypatch.setattr("rota.gpu.host_capture.MAX_NODES", 3)
    a = rig.device.alloc(8, label="a")
    rig.device.begin_capture(rig.stream)
    for _ in range(3):
        rig.launch_add(a, 8, 1)
    with rig.refuses("capture-too-large"):
        rig.launch_add(a, 8, 1)
    with rig.refuses("capture-invalidated"):
        rig.device.end_capture(rig.stream)
