"""What a connection that ends has heard: an answer to this question, or only to one before it."""

from __future__ import annotations

import pytest

from rota.errors import StagingError
from rota.rdma import messages as m
from rota.rdma.frames2 import Received, Times
from rota.rdma.link import Link, Spare
from rota.rdma.wire2 import Wire2Server


class Wire:
    """A peer that answers a release with its next words, and of another answer says ``part`` bytes
    before it hangs up."""

    def __init__(self, part: int) -> None:
        self._part, self._inbox = part, bytearray()
        self._server = Wire2Server(bytes(32), None, Times(), 0.0)

    def send(self, data: bytes, deadline: float, *, later: bool = False) -> None:
        self._server.receive_data(data)
        for event in self._server.events(0.0):
            assert isinstance(event, Received)
            released = isinstance(event.message, m.Release)
            said = self._server.data_to_send()
            answer = m.Released() if released else m.Ids(["one", "two"])
            self._server.reply(event.request, answer, 0.0)
            answered = self._server.data_to_send()
            self._inbox += said + (answered if released else answered[: self._part])
        self._inbox += self._server.data_to_send()

    def receive(
        self, view: memoryview, deadline: float, *, fill: bool = False, spare: Spare | None = None
    ) -> int:
        count = min(len(view), len(self._inbox))
        view[:count] = self._inbox[:count]
        del self._inbox[:count]
        return count

    def close(self) -> None:
        pass


@pytest.mark.parametrize("part", [0, 1, 20])
def test_an_answer_to_what_was_said_before_is_not_one(part: int) -> None:
    link = Link(Wire(part), bytes(32), None, Times(), 60.0, lambda: 0.0)
    link.heard = False
    link.say(m.Release("0" * 64))
    with pytest.raises(StagingError) as caught:
        link.call(m.ListIds())
    assert caught.value.code == "peer-lost"
    assert link.heard == (part > 0)
