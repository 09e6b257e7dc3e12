"""One pass over a connection's requests: credit, order, ends, and a full output buffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from rota.errors import RequestError, WireError
from rota.sched.ipc import wire
from rota.sched.ipc.limits import IpcLimits
from rota.sched.ipc.outflow import Outflow
from rota.sched.ipc.session import ClientSession
from rota.sched.sim.engine import sim_text
from rota.sched.streams import GenerationEvent, Outlet, Stream

pytestmark = pytest.mark.anyio


class Source:
    """A generation as the engine's: some streams behind one outlet."""

    def __init__(self, samples: int = 1) -> None:
        self.outlet = Outlet()
        self.streams = [Stream(i, None, lambda _: None, self.outlet, i) for i in range(samples)]
        self.cancelled = 0
        self.poll, self.on_ready = self.outlet.poll, self.outlet.on_ready

    @property
    def over(self) -> bool:
        return self.outlet.over

    def cancel(self) -> None:
        """As a shell does: the end is there before the call returns."""
        self.cancelled += 1
        for stream in self.streams:
            if not stream.ended:
                stream.push_end("cancelled", 0, None)

    def push(self, *tokens: int, sample: int = 0) -> None:
        for token in tokens:
            self.streams[sample].push_token(token, 0, None, ())
            self.streams[sample].flush()


class Desk:
    """An outflow and what it sent."""

    def __init__(
        self, *, high_water: int = 1000, max_credit: int = 4096, most: int = 1 << 20
    ) -> None:
        self.most = most  # events of one frame
        self.sent: list[Any] = []
        self.bytes = 0
        self.flow = Outflow(self._send, lambda: self.bytes, high_water, max_credit)

    def _send(self, message: Any) -> None:
        if isinstance(message, wire.Tokens):
            if len(message.events) > self.most:
                raise WireError("too large", code="frame-too-large")
            self.bytes += 10 * len(message.events)
        self.sent.append(message)

    def begin(self, ident: int, credit: int, source: Source | None = None) -> Source:
        source = source or Source()
        self.flow.begin(self.flow.add(ident, credit), source)
        return source

    def collect(self) -> list[Any]:
        """What one pass sends, tokens as (request, token or reason) pairs."""
        self.sent, self.bytes = [], 0
        self.flow.collect()
        return [
            [(r, e.finish_reason or e.token_id) for r, e in zip(m.requests, m.events, strict=True)]
            if isinstance(m, wire.Tokens)
            else m
            for m in self.sent
        ]


def test_a_step_of_many_requests_is_one_message() -> None:
    desk = Desk()
    sources = [desk.begin(ident, 10) for ident in (7, 8, 9)]
    for turn in range(3):
        for source in reversed(sources):
            source.push(turn)
        assert desk.collect() == [[(9, turn), (8, turn), (7, turn)]], "in the order of the step"
    assert desk.collect() == []


def test_a_request_without_credit_waits_alone() -> None:
    desk = Desk()
    slow, quick = desk.begin(1, 2), desk.begin(2, 100)
    slow.push(1, 2, 3, 4, 5)
    quick.push(1, 2, 3)
    assert desk.collect() == [[(1, 1), (1, 2), (2, 1), (2, 2), (2, 3)]]
    quick.push(4)
    assert desk.collect() == [[(2, 4)]], "a slow one never stops the pass"
    desk.flow.credit(1, 2)
    assert desk.collect() == [[(1, 3), (1, 4)]]
    desk.flow.credit(1, 50)
    slow.push(6)
    slow.streams[0].push_end("length", 0, None)
    assert desk.collect() == [[(1, 5), (1, 6), (1, "length")], wire.Ended(1)]
    assert len(desk.flow) == 1


def test_credit_is_held_at_its_limit_and_cannot_be_negative() -> None:
    desk = Desk(max_credit=3)
    source = desk.begin(1, 100)
    desk.flow.credit(1, 100)
    source.push(*range(10))
    assert desk.collect() == [[(1, 0), (1, 1), (1, 2)]]
    desk.flow.credit(1, 0)
    assert desk.collect() == []
    with pytest.raises(WireError) as caught:
        desk.flow.credit(1, -1)
    assert caught.value.code == "wire-malformed"
    desk.flow.credit(99, -1)  # ended already: nobody's


def test_more_than_a_batch_takes_turns() -> None:
    desk = Desk(high_water=1 << 20)
    greedy, other = desk.begin(1, 4096), desk.begin(2, 10)
    greedy.push(*range(300))
    other.push(7)
    first, second = desk.collect()
    assert (first[0], len(first), second) == ((1, 0), 256, [(2, 7)])
    (rest,) = desk.collect()
    assert [token for _, token in rest] == list(range(256, 300))


def test_above_high_water_a_pass_ends_and_the_next_goes_on_where_it_stopped() -> None:
    desk = Desk(high_water=1000)
    sources = [desk.begin(ident, 4096) for ident in range(4)]
    for source in sources:
        source.push(*range(200))
    assert [len(m) for m in desk.collect()] == [400], "two requests, and the buffer is full"
    sources[0].push(200)
    (rest,) = desk.collect()
    assert [r for r, _ in rest] == [2] * 200 + [3] * 200, "who waited comes first"
    assert desk.collect() == [[(0, 200)]]


def test_what_is_too_large_for_one_frame_goes_in_several() -> None:
    desk = Desk(most=3)
    sources = [desk.begin(ident, 10) for ident in range(7)]
    for source in sources:
        source.push(1)
    sources[0].streams[0].push_end("stop", 0, None)
    *tokens, ended = desk.collect()
    assert all(len(m) <= 3 for m in tokens) and ended == wire.Ended(0)
    got = [pair for m in tokens for pair in m]
    assert got == [(0, 1), (0, "stop"), *((ident, 1) for ident in range(1, 7))]
    desk.most = 0
    sources[1].push(2)
    with pytest.raises(WireError) as caught:
        desk.collect()
    assert caught.value.code == "frame-too-large"


def test_ends_come_after_the_tokens_and_once() -> None:
    desk = Desk()
    sources = [desk.begin(ident, 10) for ident in (1, 2, 3)]
    for source in sources:
        source.push(5)
    for source in sources[:2]:
        source.streams[0].push_end("stop", 0, None)
    tokens, *ends = desk.collect()
    assert tokens == [(1, 5), (1, "stop"), (2, 5), (2, "stop"), (3, 5)]
    assert ends == [wire.Ended(1), wire.Ended(2)]
    assert desk.collect() == []


def test_an_error_of_one_sample_follows_the_events_before_it_and_ends_the_others() -> None:
    desk = Desk()
    source = desk.begin(1, 10, Source(samples=2))
    source.push(1)
    source.push(2, sample=1)
    source.streams[0].push_end("error", 0, RequestError("no", code="bad-token"))
    assert desk.collect() == [[(1, 1), (1, 2)]]
    (ended,) = desk.collect()
    assert ended.failure.code == "bad-token" and source.cancelled == 1
    assert desk.collect() == [] and len(desk.flow) == 0


def test_an_error_needs_no_credit() -> None:
    desk = Desk()
    source = desk.begin(1, 0)
    source.streams[0].push_end("error", 0, RequestError("no", code="bad-token"))
    (ended,) = desk.collect()
    assert ended.failure.code == "bad-token"


def test_a_cancelled_request_sends_its_last_event_only_whatever_its_credit() -> None:
    desk = Desk()
    source = desk.begin(1, 0)
    source.push(1, 2, 3)
    assert desk.collect() == []
    desk.flow.cancel(1)
    desk.flow.cancel(2)  # nobody's
    assert desk.collect() == [[(1, "cancelled")], wire.Ended(1)]


def test_ids_in_use_are_refused_and_free_again_after_the_end() -> None:
    desk = Desk()
    source = desk.begin(1, 10)
    with pytest.raises(WireError) as caught:
        desk.flow.add(1, 10)
    assert caught.value.code == "wire-order"
    source.streams[0].push_end("stop", 0, None)
    desk.collect()
    desk.begin(1, 10)


def test_events_of_an_older_request_of_the_same_id_are_not_the_newer_ones() -> None:
    desk = Desk()
    first = desk.flow.add(1, 10)
    desk.flow.end(first, None)
    stale = Source()
    desk.flow.begin(first, stale)  # it has ended meanwhile
    newer = desk.begin(1, 10)
    newer.push(2)
    stale.push(1)
    assert desk.collect() == []
    newer.push(3)
    assert desk.collect() == [[(1, 2), (1, 3)]]


def test_a_frontend_that_dies_has_everything_cancelled_and_nothing_is_sent() -> None:
    desk = Desk()
    sources = [desk.begin(ident, 10) for ident in range(5)]
    waiting = desk.flow.add(9, 10)  # its prompt is still being tokenized
    for source in sources:
        source.push(1)
    desk.flow.close()
    assert [source.cancelled for source in sources] == [1] * 5
    assert desk.collect() == [] and len(desk.flow) == 0 and waiting.generation is None
    desk.flow.close()
    assert [source.cancelled for source in sources] == [1] * 5


class Meddler(Source):
    """Does something when it is polled, as a turn of the engine inside a pass may."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self.poll = self._poll
        self._act = act

    def _poll(self, limit: int) -> list[GenerationEvent]:
        self._act()
        return self.outlet.poll(limit)


def test_what_others_push_inside_a_pass_is_neither_lost_nor_sent_twice() -> None:
    desk = Desk()
    earlier, later = Source(), Source()

    def act() -> None:
        earlier.push(9)
        later.push(8)

    meddler = Meddler(act)
    for ident, source in enumerate((earlier, meddler, later)):
        desk.begin(ident, 10, source)
        source.push(1)
    assert desk.collect() == [[(0, 1), (1, 1), (2, 1), (2, 8)]]
    assert desk.collect() == [[(0, 9)]]
    assert desk.collect() == []


def test_a_frontend_that_dies_inside_a_pass_gets_nothing_more() -> None:
    desk = Desk()
    meddler = Meddler(lambda: desk.flow.close())
    sources = [Source(), meddler, Source()]
    for ident, source in enumerate(sources):
        desk.begin(ident, 10, source)
        source.push(1)
    desk.collect()
    assert [source.cancelled for source in sources] == [1, 1, 1]
    assert desk.collect() == [] and len(desk.flow) == 0


async def test_the_bell_rings_once_something_is_there(anyio_backend: str) -> None:
    desk = Desk()
    source = desk.begin(1, 10)
    async with anyio.create_task_group() as tasks:

        async def pushes() -> None:
            source.push(1)

        tasks.start_soon(pushes)
        with anyio.fail_after(20):
            await desk.flow.bell.wait()
    assert desk.collect() == [[(1, 1)]]


async def test_a_frontend_that_reads_nothing_and_dies_leaves_nothing(serving: Any) -> None:
    """It has credit, so the engine's end fills the socket and waits in the middle of a send."""
    limits = IpcLimits(high_water=1)
    async with serving(limits=limits) as world:
        stream = await anyio.connect_unix(world.address.path)
        session = ClientSession(wire.schema_hash(), limits, None)
        await stream.send(session.data_to_send())
        while not session.ready:
            session.receive_data(await stream.receive())
            list(session.events())
        sampling = wire.SamplingParams(max_tokens=1500)
        for ident in range(64):
            session.send(wire.Generate(ident, (1,), None, False, sampling, 0, None, 4096))
        await stream.send(session.data_to_send())
        async with world.connect() as other:
            text = await other.complete([1, 2], None, wire.SamplingParams(max_tokens=1000))
            assert text == sim_text("base", 2, 1000), "nobody else waits for it"
        await stream.aclose()
        await world.alone()
        await world.settled()
