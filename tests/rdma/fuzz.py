"""Whole conversations of both versions, damaged by seed (``fuzz.py --seconds 600``).

Each seed makes a true conversation, damages what one end receives (bytes changed, dropped,
doubled, cut off, made up), and plays it. Any outcome but events or one named error is a finding,
and is printed with its seed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from typing import Any

from rota.errors import RotaError, WireError
from rota.gpu.lora.report import LoadReport
from rota.rdma import messages as m
from rota.rdma.frames2 import HEADER, Received, Times
from rota.rdma.manifest1 import Manifest1, Tensor1
from rota.rdma.wire1 import (
    Asked,
    ClientRails,
    GotManifest,
    QueuePair1,
    RailsWanted,
    ServerRail1,
    ServerRails,
    Wire1Client,
    Wire1Server,
)
from rota.rdma.wire2 import Wire2Client, Wire2Server

DIGEST = "0123456789abcdef" * 4
MANIFEST1 = Manifest1("a", ("s",), (100,), (Tensor1("t", "BF16", (2, 3), 40, 12, 0),))
PAIR = QueuePair1(1, 2, bytes(16))
REPORT = LoadReport(
    2, 1, {"q_proj": 1}, (), ("n",), ((4, 1),), ((2.0, 1),), {"F32": 2}, 0, 0, {}, 64, 32, {}
)
MANIFEST2 = m.Manifest("a", 1, DIGEST, b"{}", [10, 20], [m.Region(bytes(8), [1, 2])] * 2)
PACKED = m.Packed(
    DIGEST, DIGEST, 64, "sha256", bytes(32), bytes(4), bytes(2), b"", 0, 0, REPORT, None
)
LAYOUT = m.LayoutSpec({"num_layers": 1, "kinds": ["full"]}, 8, "bf16", 0, False)
REQUESTS: tuple[tuple[m.Message, m.Message], ...] = (
    (m.ListIds(), m.Ids(["a", "b" * 255])),
    (m.Open("a"), MANIFEST2),
    (m.Open("zz"), m.Refused("request", "unknown-adapter", "no", "zz", None, None, 0.5)),
    (m.Read(DIGEST, 0, "", 0, 40), m.Data()),
    (m.Release(DIGEST), m.Released()),
    (m.Pack(DIGEST, DIGEST, LAYOUT, ["sha256"]), PACKED),
    (m.Fetch("a", DIGEST, ["sha256"], 0, 64), m.Fetched(MANIFEST2, PACKED)),
    (m.Fetch("a", DIGEST, ["sha256"], 0, 0), m.Fetched(MANIFEST2, None)),
    (
        m.Connect([m.Rail(1, 2, bytes(16), 3, 16, 1)] * 2),
        m.Connected([m.Rail(3, 4, bytes(16), 3, 16, 1)] * 2),
    ),
    (m.Status(), m.Counters({"opens": 3, "bytes": 1.5})),
)


def damaged(rng: random.Random, data: bytes) -> bytes:
    """``data`` after up to three accidents."""
    out = bytearray(data)
    for _ in range(rng.randint(0, 3)):
        place, size = rng.randint(0, len(out)), rng.choice((1, 1, 2, 4, 8, 40))
        match rng.randrange(7):
            case 0:
                for at in range(place, min(place + size, len(out))):
                    out[at] = rng.randrange(256)
            case 1:
                del out[place : place + size]
            case 2:
                out[place:place] = out[place : place + size]
            case 3:
                out[place:place] = rng.randbytes(size)
            case 4:
                del out[place:]
            case 5:
                out[place:place] = out[: rng.randint(0, len(out))]
            case 6 if len(out) >= 4:
                at = rng.randint(0, len(out) - 4)
                out[at : at + 4] = rng.choice((b"\xff" * 4, bytes(4), b"\0\0\0\x80", b"\1\0\0\0"))
    return bytes(out)


def fed(end: Any, rng: random.Random, data: bytes, react: Any, limit: int) -> None:
    """Feed in pieces; a `WireError` ends it, must stay, and must leave nothing buffered."""
    place = 0
    try:
        while place < len(data):
            size = rng.choice((1, 7, 64, 1000))
            end.receive_data(data[place : place + size])
            place += size
            react()
            assert end.buffered <= limit + size, f"{end.buffered} bytes buffered"
        end.receive_data(b"")
        react()
    except WireError as error:
        assert error.code.startswith("wire"), error
        if not error.code.endswith("-closed"):
            assert end.buffered == 0
            try:
                end.receive_data(b"x")
            except WireError as again:
                assert again.code == error.code
            else:
                raise AssertionError("an error that does not stay") from None


def version2(rng: random.Random) -> None:
    """One conversation; then one end hears a damaged copy of what the other said."""
    secret = rng.choice((None, b"s" * 16))
    times = Times()
    nonces = rng.randbytes(32), rng.randbytes(32)
    plan = [rng.choice(REQUESTS) for _ in range(rng.randint(0, 4))]
    ahead = rng.random() < 0.5

    def pair() -> tuple[Wire2Client, Wire2Server]:
        client = Wire2Client(nonces[0], secret, "fuzz", times, 0.0)
        return client, Wire2Server(nonces[1], secret, times, 0.0)

    def play(client: Wire2Client, server: Wire2Server) -> tuple[bytes, bytes]:
        said = [b"", b""]
        left, due = list(plan), dict[int, tuple[m.Message, int]]()

        def put() -> None:
            ask, answer = left.pop(0)
            size = {m.Read: "nbytes", m.Fetch: "room"}.get(type(ask))
            room = 0 if size is None else getattr(ask, size)
            sink = memoryview(bytearray(room)) if room else None
            due[client.request(ask, 0.0, sink)] = answer, room

        if ahead and left:
            put()
        while data := client.data_to_send():
            said[0] += data
            server.receive_data(data)
            data = b""
            for event in server.events(0.0):
                answer, payload = due.pop(event.request)
                server.reply(event.request, answer, 0.0, payload)
                data += server.data_to_send() + bytes(payload)
                server.payload_sent(payload, 0.0)
            data += server.data_to_send()
            said[1] += data
            client.receive_data(data)
            list(client.events(0.0))
            if client.welcomed and left:
                put()
        assert client.welcomed and not left and not due
        return said[0], said[1]

    from_client, from_server = play(*pair())
    client, server = pair()
    if rng.random() < 0.5:

        def serve() -> None:
            for event in server.events(0.0):
                assert isinstance(event, Received)
                server.reply(
                    event.request, m.Refused("wire", "no", "", None, None, None, None), 0.0
                )

        fed(server, rng, damaged(rng, from_client), serve, HEADER.size + 16 + (128 << 10))
        return
    waiting = [ask for ask, _ in plan]

    def put() -> None:
        message = waiting.pop(0)
        sink = memoryview(bytearray(40)) if isinstance(message, m.Read) else None
        client.request(message, 0.0, sink)

    def ask() -> None:
        for _ in client.events(0.0):
            if waiting and client.welcomed:
                put()

    if ahead and waiting:
        put()

    fed(client, rng, damaged(rng, from_server), ask, HEADER.size + 16 + (16 << 20))


def version1(rng: random.Random) -> None:
    """The same for version 1."""
    rails = rng.randint(1, 8)
    served = [ServerRail1(PAIR, ((7, 8),))] * rails

    def react(end: Any) -> None:
        for event in end.events():
            match event:
                case Asked():
                    end.send_manifest(MANIFEST1)
                case GotManifest(manifest):
                    assert all(t.offset + t.length <= 1 << 49 for t in manifest.tensors)
                    end.choose_rails(rails)
                case RailsWanted(count):
                    end.send_rails([ServerRail1(PAIR, ((7, 8),))] * count)
                case ServerRails(found):
                    end.send_rails([PAIR] * len(found))
                case ClientRails():
                    end.send_status(True)

    client, server = Wire1Client("a"), Wire1Server()
    said = [b"", b""]
    for _ in range(3):
        data = client.data_to_send()
        said[0] += data
        server.receive_data(data)
        react(server)
        data = server.data_to_send()
        said[1] += data
        client.receive_data(data)
        react(client)
    assert served and said[1].endswith(b"\0")
    which = rng.randrange(2)
    end = (Wire1Client("a"), Wire1Server())[1 - which]
    fed(end, rng, damaged(rng, said[which]), lambda: react(end), 16 << 20)


def one(seed: int) -> None:
    """One seed. Raises on a finding."""
    rng = random.Random(seed)
    (version2 if rng.random() < 0.7 else version1)(rng)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    args = parser.parse_args()
    seed, end = args.seed, time.monotonic() + args.seconds
    while time.monotonic() < end:
        try:
            one(seed)
        except (RotaError, Exception) as error:
            print(f"seed {seed}: {type(error).__name__}: {error}")
            return 1
        seed += 1
    print(f"seeds {args.seed}..{seed - 1}: nothing found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
