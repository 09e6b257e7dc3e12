"""Version 2 with a secret, and somebody between who changes, repeats and makes up frames."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rota.errors import WireError
from rota.rdma import messages as m
from rota.rdma.frames2 import HEADER, MAGIC, Received, Times
from rota.rdma.wire2 import Wire2Client, Wire2Server

SECRET = b"s" * 16
ADAPTER = "0123456789abcdef" * 4
QUESTIONS = (m.ListIds(), m.Open("sql"), m.Read(ADAPTER, 0, "", 0, 40), m.Status())
TOLD = {m.ListIds: m.Ids(["a"]), m.Read: m.Data(), m.Status: m.Counters({"opens": 1})}
FORGED = (
    m.Challenge(bytes(32), False),
    m.Challenge(bytes(32), True),
    m.Welcome(bytes(32), True, 1),
    m.Ids(["evil"]),
    m.Refused("reject", "bad-config", "no", None, None, None, None),
    m.Prove(bytes(32)),
    m.Open("evil"),
)


def tampered(
    data: bytes,
    change: str,
    place: int,
    size: int,
    before: bytes,
    back: bytes,
    forged: tuple[m.Message, int],
) -> bytes:
    """What becomes of a flight on the way; ``before`` is the last one of the same end, ``back`` of
    the other."""
    place = min(place, len(data))
    head, tail = data[:place], data[place:]
    match change:
        case "flip":
            return head + bytes(byte ^ 1 << size % 8 for byte in tail[:1]) + tail[1:]
        case "drop":
            return head + tail[size:]
        case "double":
            return head + head[-size:] + tail
        case "cut":
            return head
        case "replay":
            return data + before
        case "reflect":
            return data + back
    number, body = m.NUMBERS[type(forged[0])], m.encode(forged[0])
    return head + HEADER.pack(MAGIC, m.VERSION, number, 0, forged[1], len(body), 0) + body + tail


@settings(max_examples=1000, deadline=None)
@given(
    asked=st.lists(st.tuples(st.integers(0, 3), st.sampled_from(QUESTIONS)), max_size=4),
    way=st.integers(0, 1),
    flight=st.integers(0, 3),
    place=st.sampled_from([0, 1 << 20]) | st.integers(0, 300),
    size=st.integers(1, 80),
    change=st.sampled_from(["flip", "drop", "double", "cut", "replay", "reflect", "forge"]),
    forged=st.tuples(st.sampled_from(FORGED), st.integers(0, 2)),
)
def test_between_two_who_know_the_secret_nobody_says_anything(
    asked: list[tuple[int, m.Message]],
    way: int,
    flight: int,
    place: int,
    size: int,
    change: str,
    forged: tuple[m.Message, int],
) -> None:
    """Whatever is done to a flight of either end, and whenever questions are asked: the peer hears
    some of them, the first ones in order, and the client some of the answers; nothing else. (Only a
    refusal of the whole connection may be made up before there are keys: it ends it.)"""
    client = Wire2Client(b"c" * 32, SECRET, "test", Times(), 0.0)
    server = Wire2Server(b"n" * 32, SECRET, Times(), 0.0)
    ends: tuple[Any, Any] = client, server
    said = [b"", b""]
    questions: list[Any] = []
    heard: list[Any] = []
    answers: list[Any] = []
    got: list[Any] = []
    broken: set[Any] = set()

    def pass_on(source: int, now: int) -> None:
        end, other = ends[source], ends[1 - source]
        data = b"" if end in broken else end.data_to_send()
        if (source, now) == (way, flight):
            data = tampered(data, change, place, size, said[source], said[1 - source], forged)
        said[source] = data or said[source]
        if not data or other in broken:
            return
        try:
            other.receive_data(data)
            for event in other.events(0.0):
                if not isinstance(event, Received):
                    continue
                (heard if other is server else got).append((event.request, event.message))
                if event == Received(0, forged[0]):  # a link hangs up
                    assert change == "forge" and not client.welcomed
                    broken.add(client)
                    return
        except WireError:
            broken.add(other)

    for now in range(4):
        for when, question in asked:
            if when == now and client not in broken:
                sink = memoryview(bytearray(40)) if isinstance(question, m.Read) else None
                questions.append((client.request(question, 0.0, sink), question))
        before = len(heard)
        pass_on(0, now)
        for number, question in heard[before:]:
            if server not in broken:
                answer = TOLD.get(type(question), m.Refused("request", "no", "", *[None] * 4))
                nbytes = 40 if isinstance(answer, m.Data) else 0
                server.reply(number, answer, 0.0, nbytes)
                server.payload_sent(nbytes, 0.0)
                server._out.append(bytes(nbytes))
                answers.append((number, answer))
        pass_on(1, now)
    assert heard == questions[: len(heard)]
    got = [one for one in got if type(one[1]) is not m.Welcome]
    if got and got[-1] == (0, forged[0]):
        got.pop()
    assert got == answers[: len(got)]
