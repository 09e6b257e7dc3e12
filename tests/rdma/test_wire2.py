"""Version 2: golden bytes, the handshake, tags, deadlines, and any bytes at all."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.errors import WireError
from rota.rdma import messages as m
from rota.rdma.desk import raised, refusal
from rota.rdma.frames2 import HEADER, MAGIC, PayloadDone, Received, Times
from rota.rdma.wire2 import Wire2Client, Wire2Server, prove

SECRET = b"s" * 16
TIMES = Times(handshake=5, reply=7, idle=11, stall=3)
ADAPTER = "0123456789abcdef" * 4


def ends(
    client_secret: bytes | None = SECRET, server_secret: bytes | None = SECRET, **more: Any
) -> tuple[Wire2Client, Wire2Server]:
    client = Wire2Client(b"c" * 32, client_secret, "test", TIMES, 0.0)
    return client, Wire2Server(b"n" * 32, server_secret, TIMES, 0.0, **more)


def move(source: Any, target: Any, now: float = 0.0) -> list[Any]:
    data = source.data_to_send()
    if not data:
        return []
    target.receive_data(data)
    return list(target.events(now))


def shaken(**more: Any) -> tuple[Wire2Client, Wire2Server]:
    client, server = ends(**more)
    for _ in range(2):
        assert move(client, server) == []
        events = move(server, client)
    assert [type(e.message) for e in events] == [m.Welcome]
    return client, server


def code(call: Any, *args: Any) -> str:
    with pytest.raises(WireError) as caught:
        call(*args)
    return caught.value.code


def test_golden_hello() -> None:
    """The first bytes of a connection, spelled out."""
    client, _ = ends()
    body = b"\x92\xc4\x20" + b"c" * 32 + b"\xa4test"
    assert client.data_to_send() == (
        b"rota\x02\x01\0\0" + b"\0\0\0\0" + bytes([len(body), 0, 0, 0]) + bytes(8) + body
    )


def test_golden_open() -> None:
    """A request with its tag: HMAC-SHA256 over direction, sequence number, header and body."""
    import hashlib
    import hmac

    client, _ = shaken()
    client.request(m.Open("sql"), 0.0)
    header = b"rota\x02\x07\0\0" + b"\x01\0\0\0" + b"\x05\0\0\0" + bytes(8)
    body = b"\x91\xa3sql"
    key = hmac.new(SECRET, b"rota-peer-2 key " + b"c" * 32 + b"n" * 32, hashlib.sha256).digest()
    tag = hmac.new(key, b"c" + bytes(8) + header + body, hashlib.sha256).digest()[:16]
    assert client.data_to_send() == header + tag + body


@pytest.mark.parametrize("secret", [SECRET, None])
def test_a_request_and_its_answer(secret: bytes | None) -> None:
    client, server = shaken(client_secret=secret, server_secret=secret)
    number = client.request(m.ListIds(), 1.0)
    assert move(client, server) == [Received(number, m.ListIds())]
    server.reply(number, m.Ids(["a"]), 1.0)
    assert move(server, client) == [Received(number, m.Ids(["a"]))]


@pytest.mark.parametrize("step", [1, 5, 1000])
def test_payload_lands_where_it_belongs(step: int) -> None:
    client, server = shaken()
    payload, sink = bytes(range(256)) * 8, bytearray(2048)
    ask = m.Read(ADAPTER, 0, "", 0, len(payload))
    number = client.request(ask, 0.0, memoryview(sink))
    move(client, server)
    server.reply(number, m.Data(), 0.0, len(payload))
    data = server.data_to_send() + payload
    server.payload_sent(len(payload), 0.0)
    events: list[Any] = []
    for start in range(0, len(data), step):
        client.receive_data(data[start : start + step])
        events += client.events(0.0)
        assert client.buffered <= 64
    assert events == [Received(number, m.Data(), len(payload)), PayloadDone(number)]
    assert sink == payload and client.landed_bytes == len(payload)


def test_payload_received_directly() -> None:
    client, server = shaken()
    sink = bytearray(10)
    number = client.request(m.Read(ADAPTER, 0, "", 0, 10), 0.0, memoryview(sink))
    move(client, server)
    server.reply(number, m.Data(), 0.0, 10)
    move(server, client)
    view = client.landing()
    assert view is not None and len(view) == 10
    view[:4] = b"0123"
    assert client.landed(4, 0.0) is None
    view = client.landing()
    assert view is not None
    view[:] = b"456789"
    assert client.landed(6, 0.0) == PayloadDone(number)
    assert sink == b"0123456789" and client.landing() is None


def test_secrets() -> None:
    client, server = ends(client_secret=b"other")
    move(client, server)
    move(server, client)
    assert code(move, client, server) == "wire-auth-failed"
    client, server = ends(client_secret=None)
    move(client, server)
    assert code(move, server, client) == "wire-auth-required"
    client, server = ends(server_secret=None)
    move(client, server)
    assert code(move, server, client) == "wire-auth-missing"  # an impostor asks for no proof
    client, server = ends()
    move(client, server)
    move(server, client)
    client.data_to_send()
    server._queue(0, m.Welcome(bytes(32), False, 1))
    assert code(move, server, client) == "wire-auth-failed"  # one that accepts any proof


def test_without_a_secret_one_flight_does_it_all() -> None:
    """What the client says needs nothing of the peer's: it is answered in one go, too."""
    client, server = ends(client_secret=None, server_secret=None)
    number = client.request(m.ListIds(), 1.0)
    assert client.timeout_at() == 5  # still the handshake's time
    assert move(client, server, 1.0) == [Received(number, m.ListIds())]
    server.reply(number, m.Ids(["a"]), 1.0)
    data = server.data_to_send()
    client.receive_data(data)
    welcome, answer = client.events(2.0)
    # An event of another kind fails here.
    assert type(welcome.message) is m.Welcome  # type: ignore[union-attr]
    assert answer == Received(number, m.Ids(["a"])) and client.timeout_at() is None
    # Byte for byte the same frames as one after the other.
    slow, _ = ends(client_secret=None, server_secret=None)
    fresh, peer = ends(client_secret=None, server_secret=None)
    said = b""
    for _ in range(2):
        part = fresh.data_to_send()
        said += part
        peer.receive_data(part)
        list(peer.events(0.0))
        move(peer, fresh)
    fresh.request(m.ListIds(), 1.0)
    slow.request(m.ListIds(), 1.0)
    assert slow.data_to_send() == said + fresh.data_to_send()


def test_ahead_of_the_welcome_nothing_is_believed() -> None:
    client, _ = ends(client_secret=None, server_secret=None)
    number = client.request(m.ListIds(), 0.0)
    client.receive_data(frame(6, m.encode(m.Ids(["a"])), request=number))
    assert code(list, client.events(0.0)) == "wire-unexpected"
    client, server = ends(client_secret=None)
    client.request(m.ListIds(), 0.0)
    assert code(move, client, server) == "wire-auth-failed"  # before the question is looked at
    assert code(move, server, client) == "wire-auth-required"
    client, _ = ends(client_secret=None, server_secret=None)
    client.request(m.ListIds(), 0.0)
    assert code(client.handle_timeout, 5.0) == "wire-timeout"


def test_with_a_secret_questions_go_with_the_proof() -> None:
    """Two flights, whenever they were asked; the tags count from the first of them."""
    client, server = ends()
    first = client.request(m.ListIds(), 0.0)  # before there is anything to prove
    assert client.timeout_at() == 5 and move(client, server) == []
    assert move(server, client) == []
    second = client.request(m.Status(), 0.0)  # after it
    assert move(client, server) == [Received(first, m.ListIds()), Received(second, m.Status())]
    server.reply(first, m.Ids(["a"]), 0.0)
    server.reply(second, m.Counters({"opens": 1}), 0.0)
    welcome, *answers = move(server, client)
    assert type(welcome.message) is m.Welcome
    assert answers == [Received(first, m.Ids(["a"])), Received(second, m.Counters({"opens": 1}))]
    # Asked after Welcome, they are the same bytes.
    slow, peer = ends()
    said = b""
    for _ in range(2):
        said += (part := slow.data_to_send())
        peer.receive_data(part)
        list(peer.events(0.0))
        move(peer, slow)
    slow.request(m.ListIds(), 0.0)
    slow.request(m.Status(), 0.0)
    fast, peer = ends()
    fast.request(m.ListIds(), 0.0)
    fast.request(m.Status(), 0.0)
    head = fast.data_to_send()
    peer.receive_data(head)
    list(peer.events(0.0))
    move(peer, fast)
    assert head + fast.data_to_send() == said + slow.data_to_send()


@pytest.mark.parametrize("lie", ["welcome", "answer", "refusal", "no tag"])
def test_who_does_not_know_the_secret_is_not_believed(lie: str) -> None:
    """It has heard the question, as anyone on the way might; its answers are worth nothing."""
    client, liar = ends()
    number = client.request(m.ListIds(), 0.0)
    move(client, liar)
    move(liar, client)
    client.data_to_send()
    if lie in ("welcome", "no tag"):
        mac = bytes(32) if lie == "welcome" else prove(SECRET, b"server", b"c" * 32, b"n" * 32)
        liar._queue(0, m.Welcome(mac, False, 1))
    refusal = m.Refused("reject", "bad-config", "no", None, None, None, None)
    liar._queue(number, refusal if lie == "refusal" else m.Ids(["a"]))
    liar._out.append(bytes(16))  # a frame more than complete, whoever counts its tag
    codes = {"welcome": "wire-auth-failed", "no tag": "wire-bad-tag"}
    assert code(move, liar, client) == codes.get(lie, "wire-unexpected")


def test_changed_and_replayed_frames() -> None:
    client, server = shaken()
    client.request(m.Open("sql"), 0.0)
    data = client.data_to_send()
    for place in range(len(data)):
        _, fresh = shaken()
        fresh.receive_data(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(WireError):
            list(fresh.events(0.0))
            fresh.receive_data(b"")  # a length that now waits for more
            list(fresh.events(0.0))
    server.receive_data(data)
    list(server.events(0.0))
    server.receive_data(data)
    assert code(list, server.events(0.0)) == "wire-bad-tag"


def frame(number: int, body: bytes = b"\x90", **more: int) -> bytes:
    return HEADER.pack(
        more.get("magic", MAGIC),
        more.get("version", 2),
        number,
        more.get("flags", 0),
        more.get("request", 1),
        more.get("length", len(body)),
        more.get("payload", 0),
    ) + body  # fmt: skip


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"GET / HTTP/1.1\r\n", "wire-bad-magic"),
        (b"\x05\0\0\0model", "wire-bad-magic"),  # a version-1 client
        (frame(5, version=3), "wire-bad-version"),
        (frame(0), "wire-unknown-kind"),
        (frame(255), "wire-unknown-kind"),
        (frame(6), "wire-unknown-kind"),  # an answer, from a client
        (frame(5, flags=1), "wire-bad-flags"),
        (frame(5, length=17), "wire-body-too-large"),
        (frame(7, length=1 << 31), "wire-body-too-large"),
        (frame(5, payload=1), "wire-payload-length"),
        (frame(7, b"\x91\xa0"), "wire-bad-body"),  # an empty id
        (frame(7, b"\x91\xc0"), "wire-bad-body"),
        (frame(7, b"\xff" * 9), "wire-bad-body"),
        (frame(5, b"\x90", request=0), "wire-unexpected"),
        (frame(1, b"\x92\xc4\x20" + bytes(32) + b"\xa0"), "wire-unexpected"),  # Hello again
    ],
)
def test_refusals_by_name(data: bytes, expected: str) -> None:
    _, server = shaken(client_secret=None, server_secret=None)
    server.receive_data(data)
    assert code(list, server.events(0.0)) == expected
    assert code(server.receive_data, b"x") == expected  # the same ever after
    assert server.buffered == 0


def test_requests_are_counted() -> None:
    client, server = shaken(max_requests=2)
    for _ in range(3):
        client.request(m.ListIds(), 0.0)
    assert code(move, client, server) == "wire-too-many-requests"


def test_answers_nobody_asked_for() -> None:
    client, server = shaken()
    number = client.request(m.ListIds(), 0.0)
    move(client, server)
    assert code(server.reply, number + 1, m.Ids([]), 0.0) == "wire-unexpected"
    server._queue(number, m.Released())
    assert code(move, server, client) == "wire-unexpected"
    client, server = shaken()
    number = client.request(m.Read(ADAPTER, 0, "", 0, 4), 0.0, memoryview(bytearray(4)))
    server._queue(number, m.Data(), 5)
    assert code(move, server, client) == "wire-payload-length"  # too long: nothing is overrun


def test_deadlines() -> None:
    client, server = ends()
    assert client.timeout_at() == server.timeout_at() == 5
    client.handle_timeout(4.9)
    assert code(client.handle_timeout, 5.0) == "wire-timeout"
    client, server = shaken()
    assert client.timeout_at() is None and server.timeout_at() == 11
    number = client.request(m.ListIds(), 20.0)
    assert client.timeout_at() == 27
    move(client, server, 20.0)
    assert server.timeout_at() is None  # it is the peer's turn
    server.reply(number, m.Ids([]), 21.0)
    assert server.timeout_at() == 32
    move(server, client, 21.0)
    assert client.timeout_at() is None
    number = client.request(m.Read(ADAPTER, 0, "", 0, 9), 30.0, memoryview(bytearray(9)))
    move(client, server, 30.0)
    server.reply(number, m.Data(), 30.0, 9)
    move(server, client, 31.0)
    assert client.timeout_at() == 34  # the payload must move


def test_the_end() -> None:
    client, _ = shaken()
    client.request(m.ListIds(), 0.0)
    client.receive_data(b"")
    assert code(list, client.events(0.0)) == "wire-truncated"
    client, server = shaken()
    server.receive_data(b"")
    assert list(server.events(0.0)) == [] and server.ended
    client.close()
    assert code(client.request, m.ListIds(), 0.0) == "wire-closed"
    client, _ = ends()
    client.close()
    assert code(client.request, m.ListIds(), 0.0) == "wire-closed"


def test_errors_travel_whole() -> None:
    from rota.errors import CapacityError, RejectError

    for error in (
        RejectError("no", code="bad-thing", subject="k", expected=1, found=2),
        CapacityError("full", code="peer-busy", retry_after_s=0.5),
    ):
        # Any error can be told.
        back = raised(m.DECODERS[19].decode(m.encode(refusal(error))))  # type: ignore[arg-type]
        assert type(back) is type(error) and str(back) == str(error)


FRAMES = st.builds(
    frame,
    st.integers(0, 22),
    st.binary(max_size=60),
    request=st.integers(0, 3),
    flags=st.sampled_from([0, 0, 0, 1]),
    payload=st.sampled_from([0, 0, 0, 8, 1 << 40]),
    version=st.sampled_from([2, 2, 2, 1]),
)
CODES = {
    "wire-auth-failed",
    "wire-auth-missing",
    "wire-auth-required",
    "wire-bad-body",
    "wire-bad-flags",
    "wire-bad-magic",
    "wire-bad-tag",
    "wire-bad-version",
    "wire-body-too-large",
    "wire-payload-length",
    "wire-too-many-requests",
    "wire-truncated",
    "wire-unexpected",
    "wire-unknown-kind",
}


@settings(max_examples=500, deadline=None)
@given(
    who=st.sampled_from(["client", "server"]),
    ready=st.booleans(),
    secret=st.sampled_from([None, SECRET]),
    parts=st.lists(st.one_of(st.binary(max_size=80), FRAMES), max_size=6),
    end=st.booleans(),
)
def test_any_bytes(
    who: str, ready: bool, secret: bytes | None, parts: list[bytes], end: bool
) -> None:
    """Events or one named error that stays, and a buffer no larger than one frame."""
    client, server = (shaken if ready else ends)(client_secret=secret, server_secret=secret)
    subject: Any = client if who == "client" else server
    if ready and who == "client":
        client.request(m.Read(ADAPTER, 0, "", 0, 8), 0.0, memoryview(bytearray(8)))
        client.request(m.ListIds(), 0.0)
    try:
        for part in [*parts, b""] if end else parts:
            if not part and not end:
                continue
            subject.receive_data(part)
            list(subject.events(0.0))
            assert subject.buffered <= HEADER.size + 16 + (16 << 20)
    except WireError as error:
        assert error.code in CODES | {"wire-closed"}
        if error.code != "wire-closed":
            assert code(subject.receive_data, b"x") == error.code
            assert subject.buffered == 0


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(m.KINDS)), st.binary(max_size=200))
def test_any_body(number: int, body: bytes) -> None:
    """Whatever decodes is within the bounds of its kind, and travels back unchanged."""
    import msgspec

    try:
        message = m.DECODERS[number].decode(body)
    except msgspec.MsgspecError:
        return
    assert m.DECODERS[number].decode(m.encode(message)) == message
