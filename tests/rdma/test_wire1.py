"""Version 1: golden bytes, the order of the exchange, and any bytes at all."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.errors import WireError
from rota.rdma.manifest1 import Manifest1, Tensor1, parse_manifest
from rota.rdma.wire1 import (
    Asked,
    ClientRails,
    GotManifest,
    QueuePair1,
    RailsWanted,
    Ready,
    ServerRail1,
    ServerRails,
    Wire1Client,
    Wire1Server,
)

MANIFEST = Manifest1("a", ("s",), (100,), (Tensor1("t", "BF16", (2, 3), 40, 12, 0),))
JSON = (
    b'{"version":1,"model_id":"a","shard_files":["s"],"shard_lens":[100],"tensors":[{"name":"t",'
    b'"dtype":"BF16","shape":[2,3],"offset_in_shard":40,"len":12,"shard_index":0,"extra":false}]}'
)
CLIENT_PAIR = QueuePair1(0x11, 0x222, bytes(range(16)))
SERVER_RAIL = ServerRail1(QueuePair1(0x33, 0x444, bytes(range(16, 32))), ((0x5555, 0x66),))
GOLDEN = {
    "id": bytes.fromhex("01000000") + b"a",
    "manifest": struct.pack("<I", len(JSON)) + JSON,
    "mode": b"\x01\x01",
    "server rails": b"\x01"
    + bytes.fromhex("33000000 44040000 101112131415161718191a1b1c1d1e1f 01000000")
    + bytes.fromhex("5555000000000000 66000000"),
    "client rails": b"\x01" + bytes.fromhex("11000000 22020000 000102030405060708090a0b0c0d0e0f"),
    "status": b"\x00",
}


def feed(end: Wire1Client | Wire1Server, data: bytes, size: int = 1 << 20) -> list[Any]:
    found: list[Any] = []
    for start in range(0, len(data), size):
        end.receive_data(data[start : start + size])
        found += end.events()
    return found


@pytest.mark.parametrize("size", [1, 3, 1 << 20])
def test_golden_exchange(size: int) -> None:
    client, server = Wire1Client("a"), Wire1Server()
    assert client.data_to_send() == GOLDEN["id"]
    assert feed(server, GOLDEN["id"], size) == [Asked("a")]
    server.send_manifest(MANIFEST)
    assert server.data_to_send() == GOLDEN["manifest"]
    assert feed(client, GOLDEN["manifest"], size) == [GotManifest(MANIFEST)]
    client.choose_rails(1)
    assert client.data_to_send() == GOLDEN["mode"]
    assert feed(server, GOLDEN["mode"], size) == [RailsWanted(1)]
    server.send_rails([SERVER_RAIL])
    assert server.data_to_send() == GOLDEN["server rails"]
    assert feed(client, GOLDEN["server rails"], size) == [ServerRails((SERVER_RAIL,))]
    client.send_rails([CLIENT_PAIR])
    assert client.data_to_send() == GOLDEN["client rails"]
    assert feed(server, GOLDEN["client rails"], size) == [ClientRails((CLIENT_PAIR,))]
    server.send_status(True)
    assert server.data_to_send() == GOLDEN["status"]
    assert feed(client, GOLDEN["status"], size) == [Ready()]
    client.receive_data(b"")
    assert list(client.events()) == []


def code(call: Any, *args: Any) -> str:
    with pytest.raises(WireError) as caught:
        call(*args)
    return caught.value.code


def test_refusals_by_name() -> None:
    assert code(Wire1Client, "") == "wire1-bad-id"
    assert code(feed, Wire1Server(), struct.pack("<I", 8193)) == "wire1-bad-length"
    assert code(feed, Wire1Server(), b"\x01\0\0\0\xff") == "wire1-bad-id"
    client = Wire1Client("a")
    assert code(feed, client, struct.pack("<I", (16 << 20) + 1)) == "wire1-bad-length"
    assert code(client.receive_data, b"x") == "wire1-bad-length"  # the same ever after
    server = Wire1Server()
    feed(server, GOLDEN["id"])
    assert code(feed, server, b"early") == "wire1-unexpected"
    server = Wire1Server()
    feed(server, GOLDEN["id"])
    server.send_manifest(MANIFEST)
    assert code(feed, server, b"\x00\x01") == "wire1-bad-mode"
    client = Wire1Client("a")
    feed(client, GOLDEN["manifest"])
    client.choose_rails(1)
    two_regions = GOLDEN["server rails"][:25] + struct.pack("<I", 2)
    assert code(feed, client, two_regions) == "wire1-bad-rails"  # before anything more is sent
    client = Wire1Client("a")
    client.receive_data(b"")
    assert code(list, client.events()) == "wire1-truncated"


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"version": True},
        {"shard_lens": [100, 1]},
        {"shard_lens": [51]},
        {"tensors": [{}]},
        {"tensors": 3},
        {"model_id": 7},
    ],
)
def test_manifests_are_checked(change: dict[str, Any]) -> None:
    assert code(parse_manifest, json.dumps(json.loads(JSON) | change).encode()) == (
        "wire1-bad-manifest"
    )


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_bytes_to_either_end(data: st.DataObject) -> None:
    """Events or one named error, and a bounded buffer."""
    ends: list[Wire1Client | Wire1Server] = [Wire1Client("a", max_manifest=4096), Wire1Server()]
    end = data.draw(st.sampled_from(ends))
    script = [GOLDEN[k] for k in ("manifest", "server rails", "status", "id", "mode")]
    parts = st.one_of(st.binary(max_size=200), st.sampled_from(script))
    try:
        for part in data.draw(st.lists(parts, max_size=8)):
            end.receive_data(part)
            for event in end.events():
                answer(end, event)
            assert end.buffered <= 4096 + 4 + len(part)
    except WireError as error:
        assert error.code.startswith("wire1-")
        assert code(end.receive_data, b"x") == error.code


def answer(end: Any, event: Any) -> None:
    match event:
        case Asked():
            end.send_manifest(MANIFEST)
        case GotManifest():
            end.choose_rails(1)
        case RailsWanted(count):
            end.send_rails([SERVER_RAIL] * count)
        case ServerRails():
            end.send_rails([CLIENT_PAIR])
        case ClientRails():
            end.send_status(True)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_any_manifest(raw: bytes) -> None:
    try:
        parse_manifest(raw)
    except WireError as error:
        assert error.code == "wire1-bad-manifest"
