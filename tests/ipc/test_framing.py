"""Frames and sessions without I/O: every cut, every byte, a named error and bounded memory."""

from __future__ import annotations

import itertools
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rota.errors import RotaError, WireError
from rota.sched.core.events import Failure
from rota.sched.ipc import wire
from rota.sched.ipc.framing import Framing
from rota.sched.ipc.limits import IpcLimits
from rota.sched.ipc.session import ClientSession, ServerSession, same_secret
from rota.sched.streams import GenerationEvent

LIMIT = 64


def frame(payload: bytes) -> bytes:
    return struct.pack("<I", len(payload)) + payload


def feed(framing: Framing, data: bytes, cuts: list[int]) -> list[bytes]:
    """Everything given out when ``data`` arrives in pieces."""
    out: list[bytes] = []
    edges = sorted({0, len(data), *(c % (len(data) + 1) for c in cuts)})
    for begin, end in itertools.pairwise(edges):
        framing.receive_data(data[begin:end])
        out.extend(framing.events())
        assert framing.buffered <= LIMIT + 4
    return out


@given(
    st.lists(st.binary(min_size=1, max_size=LIMIT), max_size=8),
    st.lists(st.integers(0, 1000), max_size=8),
)
def test_frames_survive_any_cut(payloads: list[bytes], cuts: list[int]) -> None:
    framing = Framing(LIMIT, LIMIT)
    assert feed(framing, b"".join(map(frame, payloads)), cuts) == payloads
    sender = Framing(LIMIT, LIMIT)
    for payload in payloads:
        sender.send(payload)
    assert sender.pending == sum(len(p) + 4 for p in payloads)
    assert sender.data_to_send() == b"".join(map(frame, payloads))
    assert (sender.pending, sender.data_to_send()) == (0, b"")


@given(st.binary(max_size=400), st.lists(st.integers(0, 1000), max_size=8))
@example(b"\x00\x00\x00\x00", [])
@example(b"\xff\xff\xff\xff", [])
def test_any_bytes_are_frames_or_a_named_error(data: bytes, cuts: list[int]) -> None:
    framing = Framing(LIMIT, LIMIT)
    try:
        feed(framing, data, cuts)
        framing.receive_data(b"")
        list(framing.events())
    except WireError as error:
        assert error.code in ("frame-too-large", "frame-empty", "frame-truncated")


def test_a_large_length_is_refused_before_its_payload_comes() -> None:
    framing = Framing(LIMIT, LIMIT)
    framing.receive_data(frame(b"ok") + struct.pack("<I", LIMIT + 1))
    got = []
    with pytest.raises(WireError) as caught:
        for payload in framing.events():
            got.append(payload)
    assert got == [b"ok"] and caught.value.code == "frame-too-large"
    with pytest.raises(WireError) as again:
        framing.receive_data(b"more")
    assert again.value is caught.value, "after an error nothing more is taken"


def test_nothing_is_taken_after_the_end_and_nothing_sent_after_close() -> None:
    framing = Framing(LIMIT, LIMIT)
    framing.receive_data(b"")
    assert list(framing.events()) == []
    with pytest.raises(WireError) as caught:
        framing.receive_data(b"x")
    assert caught.value.code == "wire-closed"
    other = Framing(LIMIT, LIMIT)
    other.send(b"last")
    other.close()
    other.send(b"late")
    assert other.data_to_send() == frame(b"last")
    with pytest.raises(WireError) as large:
        other.send(b"x" * (LIMIT + 1))
    assert large.value.code == "frame-too-large"


# sessions ---------------------------------------------------------------------------------------
LIMITS = IpcLimits(max_hello=256, max_frame=4096, max_reply=4096)
SCHEMA = "s" * 64


def pair(token: str | None = None, wants: str | None = None) -> tuple[ClientSession, ServerSession]:
    return ClientSession(SCHEMA, LIMITS, token), ServerSession(SCHEMA, LIMITS, wants)


def opened() -> ServerSession:
    client, server = pair()
    server.receive_data(client.data_to_send())
    (hello,) = server.events()
    assert isinstance(hello, wire.Hello) and server.ready
    return server


def test_good_handshake_with_token() -> None:
    client, server = pair("secret", "secret")
    server.receive_data(client.data_to_send())
    assert len(list(server.events())) == 1
    server.receive_data(frame(msgspec.msgpack.encode(wire.Ping(7))))
    assert list(server.events()) == [wire.Ping(7)]


@pytest.mark.parametrize(
    ("hello", "code"),
    [
        (wire.Hello("http", 1, SCHEMA), "wire-magic"),
        (wire.Hello(wire.MAGIC, 1, SCHEMA), "unauthorized"),
        (wire.Hello(wire.MAGIC, 1, SCHEMA, "wrong"), "unauthorized"),
        (wire.Hello(wire.MAGIC, 99, SCHEMA, "secret"), "version-mismatch"),
        (wire.Hello(wire.MAGIC, wire.VERSION, "other", "secret"), "schema-mismatch"),
        (wire.Ping(1), "wire-malformed"),
    ],
)
def test_a_bad_handshake_is_refused_by_name_on_both_ends(hello: Any, code: str) -> None:
    client, server = pair("secret", "secret")
    server.receive_data(frame(msgspec.msgpack.encode(hello)))
    with pytest.raises(WireError) as caught:
        list(server.events())
    assert caught.value.code == code
    client.receive_data(server.data_to_send())
    with pytest.raises(WireError) as there:
        list(client.events())
    assert there.value.code == code


def test_a_hello_of_a_later_version_with_more_fields_is_understood() -> None:
    server = ServerSession(SCHEMA, LIMITS, None)
    server.receive_data(frame(msgspec.msgpack.encode([1, wire.MAGIC, 2, SCHEMA, None, "new", {}])))
    with pytest.raises(WireError) as caught:
        list(server.events())
    assert caught.value.code == "version-mismatch"


def test_before_the_handshake_only_small_frames_are_taken() -> None:
    server = ServerSession(SCHEMA, LIMITS, None)
    server.receive_data(struct.pack("<I", 257))
    with pytest.raises(WireError) as caught:
        list(server.events())
    assert caught.value.code == "frame-too-large"
    ready = opened()
    ready.receive_data(struct.pack("<I", 4096))
    assert list(ready.events()) == []


def test_a_second_hello_is_refused() -> None:
    server = opened()
    hello = wire.Hello(wire.MAGIC, wire.VERSION, SCHEMA)
    server.receive_data(frame(msgspec.msgpack.encode(hello)))
    with pytest.raises(WireError) as caught:
        list(server.events())
    assert caught.value.code == "wire-order"


@given(st.binary(min_size=1, max_size=600))
@example(b"\x91" * 600)
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\xc6\xff\xff\xff\xff")
def test_any_payload_is_a_message_or_a_named_error(payload: bytes) -> None:
    for session in (opened(), ServerSession(SCHEMA, LIMITS, None)):
        session.receive_data(frame(payload))
        try:
            list(session.events())
        except WireError as error:
            assert error.code in ("wire-malformed", "wire-order", "wire-magic", "frame-too-large")
    client = ClientSession(SCHEMA, LIMITS, None)
    client.receive_data(frame(payload))
    try:
        list(client.events())
    except RotaError as error:
        assert error.code


_ints = st.integers(0, 2**63)
_json = st.recursive(
    st.none() | st.booleans() | _ints | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=12,
)


@given(st.lists(_json, min_size=1, max_size=6), st.sampled_from([4, 5, 10, 11, 12, 30, 31, 40, 41]))
def test_any_values_under_a_known_tag_are_a_message_or_a_named_error(body: Any, tag: int) -> None:
    session = opened()
    session.receive_data(frame(msgspec.msgpack.encode([tag, *body])))
    try:
        (message,) = session.events()
        assert isinstance(message, wire.ToServer)
    except WireError as error:
        assert error.code == "wire-malformed"


def test_the_schema_hash_is_stable_and_sees_changes() -> None:
    assert wire.schema_hash() == wire.schema_hash()
    assert len(wire.schema_hash()) == 64


def test_secrets_compare_by_content() -> None:
    assert same_secret("a", "a") and not same_secret("b", "a")
    assert not same_secret(None, "") and not same_secret(None, "a")
    assert same_secret("ä\udcff", "ä\udcff")


def test_messages_round_trip() -> None:
    messages: list[Any] = [
        wire.Tokens((3,), (GenerationEvent(1, "a", None, 2**64 - 1, 0, -0.5, ((1, -0.5),)),)),
        wire.Ended(3, Failure("capacity", "QUEUE_FULL", "m", retry_after_s=1.5)),
        wire.Result(4, wire.Outcome("done", "n", 1, 2, 2**64 - 1, None, None, 0.1)),
        wire.Result(5, wire.Nothing(), Failure("reject", "x", "y")),
    ]
    for message in messages:
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=wire.ToClient)
        assert again == message
