"""The daemon over real sockets: landing, refusals, hostile and broken clients, stopping."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio.lowlevel
import numpy as np
import pytest

from rota.errors import CapacityError, RejectError, RequestError, RotaError, StagingError, WireError
from rota.gpu.lora.dims import ModelDims
from rota.gpu.lora.layout import Elem, SlotLayout
from rota.gpu.lora.safefile import FileLimits
from rota.gpu.lora.source import DirectorySource
from rota.gpu.lora.stage import StagedAdapter, StageLimits, stage
from rota.gpu.model.config import load_config
from rota.rdma import hashes, landing
from rota.rdma import messages as m
from rota.rdma.address import parse_address, parse_peer_url
from rota.rdma.client import Peer
from rota.rdma.frames2 import Times
from rota.rdma.hosts import VerbsPeer
from rota.rdma.link import Link, SocketStream
from rota.rdma.peer import PeerLimits
from rota.rdma.store import StoreLimits
from rota.rdma.wire1 import GotManifest, QueuePair1, Ready, ServerRails, Wire1Client
from rota.sched.core.spread import PHASES

from .fabric import Fabric, FakeDevice
from .proxy import Proxy

HYBRID = ModelDims(5, 48, 256, 64, 128, 80, 128)


class Ones:
    """A base model whose matrices are all ones."""

    def embed(self) -> np.ndarray:
        return np.ones((128, 48), np.float32)

    head = embed

    def rows(self, layer: int, module: Any, start: int, stop: int, expert: int = 0) -> np.ndarray:
        width = {"o_proj": 64, "down_proj": 80}.get(module.leaf, 48)
        return np.ones((stop - start, width), np.float32)

    def bias(self, layer: int, module: Any) -> None:
        return None


def same(landed: StagedAdapter, disk: StagedAdapter) -> None:
    a, b = landed.image, disk.image
    assert a.buffer.tobytes() == b.buffer.tobytes()
    for name in ("digest", "fingerprint", "present", "ranks", "embed_rows", "head_rows", "affine"):
        assert getattr(a, name) == getattr(b, name)
    np.testing.assert_array_equal(a.scales, b.scales)
    assert not a.scales.flags.writeable
    for name in ("pairs", "tensors", "by_module", "ranks", "scales", "notes", "ignored", "dtypes"):
        assert getattr(landed.report, name) == getattr(disk.report, name)


def refusal(call: Callable[[], Any]) -> RotaError:
    with pytest.raises(RotaError) as caught:
        call()
    return caught.value


@pytest.fixture
def proxy() -> Iterator[Callable[..., Proxy]]:
    made: list[Proxy] = []

    def make(*args: Any, **more: Any) -> Proxy:
        made.append(Proxy(*args, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("packed", ["always", "never", "auto"])
@pytest.mark.parametrize("elem", Elem)
def test_the_corpus_lands_as_from_disk(kit: Any, serve: Any, elem: Elem, packed: str) -> None:
    root = kit.root / "tests/data/oracle/qwen35/adapters"
    folders = {path.name: path for path in sorted(root.iterdir())}
    running = serve(folders)
    landed = refused = 0
    for name, path in folders.items():
        layout = SlotLayout(HYBRID, 64, elem, overlay_rows=128 if name.startswith("mts") else 16)
        # A parameter of the test.
        source = Peer(running.address, name, secret=kit.secret, packed=packed)  # type: ignore[arg-type]
        try:
            disk = stage(DirectorySource(path), layout, base_rows=Ones())
        except RejectError as error:
            other = refusal(lambda s=source, y=layout: stage(s, y, base_rows=Ones()))
            assert type(other) is RejectError
            assert str(other) == str(error)
            refused += 1
            continue
        same(stage(source, layout, base_rows=Ones()), disk)
        landed += 1
    assert landed >= 5 and refused >= 5


@pytest.mark.parametrize("along", [True, False])
def test_annexes_land_as_from_disk_or_are_refused_as_from_disk(
    kit: Any, serve: Any, along: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images of several sizes for one layout, with and without an answer that brings them."""
    if not along:
        monkeypatch.setattr(landing, "_ANNEX_ALONG", 0)
    root = kit.root / "tests/data/oracle/qwen35_moe"
    names = ("experts", "experts_down_only", "experts_router_attn", "router")
    running = serve({name: root / "adapters" / name for name in names})
    dims = load_config(root / "base").to_lora_dims(expert_adapters=True)
    layout = SlotLayout(dims, 8, Elem.F32, affine=True)
    sizes = set()
    for name in names:
        disk = stage(DirectorySource(root / "adapters" / name), layout)
        source = Peer(running.address, name, secret=kit.secret, packed="always")
        for _ in range(2):  # packed when it is asked for, then there already
            found = stage(source, layout)
            same(found, disk)
            assert "audit" not in found.report.seconds
        memory = bytearray(disk.image.nbytes + 1000)
        lent = stage(source, layout, buffer=memory).image
        assert lent.lent and bytes(memory[: lent.nbytes]) == disk.image.buffer.tobytes()
        annex = disk.image.annex_bytes
        assert found.image.annex_bytes == found.report.annex_bytes == annex
        sizes.add(annex)
        if annex:
            limits = StageLimits(annex_bytes=annex - 1)
            error = refusal(lambda s=source, y=limits: stage(s, layout, y))
            folder = DirectorySource(root / "adapters" / name)
            assert error.code == "annex-exceeds-arena"
            assert str(error) == str(refusal(lambda f=folder, y=limits: stage(f, layout, y)))
    assert len(sizes) == 3 and 0 in sizes


def test_whole_matrices_need_the_engines_base(kit: Any, serve: Any) -> None:
    """The peer cannot pack them; the files come instead, over the same connection."""
    folder = kit.root / "tests/data/oracle/qwen35/adapters/mts_embed_head"
    running = serve({"mts": folder})
    layout = SlotLayout(HYBRID, 64, overlay_rows=128)
    source = Peer(running.address, "mts", secret=kit.secret, packed="always")
    landed = stage(source, layout, base_rows=Ones())
    same(landed, stage(DirectorySource(folder), layout, base_rows=Ones()))
    assert landed.image.embed_rows and "transfer" in landed.report.seconds
    assert refusal(lambda: stage(source, layout)).code == "overlay-no-base"
    assert running.peer.counters()["connections"] == 2


def test_factors_and_offsets_land_as_from_disk(kit: Any, serve: Any) -> None:
    """Offsets of B need nothing of the base: the peer packs them. Norms do: the files come."""
    root = kit.root / "tests/data/oracle"
    folders = {"bias": root / "qwen35/adapters/lora_bias", "dora": root / "qwen3/adapters/dora"}
    running = serve(folders)
    dense = ModelDims(2, 48, 64, 32, 64, 80, 128, tied=True)
    for name, dims, phase in (("bias", HYBRID, "verify"), ("dora", dense, "audit")):
        layout = SlotLayout(dims, 8, affine=True)
        source = Peer(running.address, name, secret=kit.secret, packed="always")
        landed = stage(source, layout, base_rows=Ones())
        same(landed, stage(DirectorySource(folders[name]), layout, base_rows=Ones()))
        assert any(landed.image.affine) and phase in landed.report.seconds


@pytest.mark.parametrize("name", ["sha256", "blake3"])
def test_both_ends_agree_on_a_hash(
    kit: Any, serve: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    running = serve({"one": folder})
    monkeypatch.setattr(landing, "KNOWN", {name: hashes.KNOWN[name]})
    source = Peer(running.address, "one", secret=kit.secret, packed="always")
    same(stage(source, kit.small), stage(DirectorySource(folder), kit.small))
    # A hash only one end knows is passed over; with none in common nothing is packed.
    monkeypatch.setattr(landing, "KNOWN", {"new": hashes.KNOWN[name], name: hashes.KNOWN[name]})
    same(stage(source, kit.small), stage(DirectorySource(folder), kit.small))
    monkeypatch.setattr(landing, "KNOWN", {"new": hashes.KNOWN[name]})
    assert refusal(lambda: stage(source, kit.small)).code == "no-common-hash"


def test_without_the_fast_hash_there_is_sha256(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(hashes.KNOWN) == ["blake3", "sha256"]
    monkeypatch.setitem(sys.modules, "blake3", None)
    assert list(hashes._known()) == ["sha256"]
    image = np.arange(1 << 20, dtype=np.uint32).view(np.uint8)
    wanted = [
        hashlib.sha256(image[at : at + (1 << 20)]).digest() for at in range(0, 4 << 20, 1 << 20)
    ]
    assert hashes.chunk_digests(image, "sha256") == b"".join(wanted)


def test_read_gives_the_files(kit: Any, serve: Any, folder: Path) -> None:
    running = serve({"one": folder})
    limits = FileLimits()
    raw = Peer(running.address, "one", secret=kit.secret).read(limits)
    disk = DirectorySource(folder).read(limits)
    assert raw.config == disk.config and raw.digest() == disk.digest()
    assert [s.tobytes() for s in raw.shards] == [s.tobytes() for s in disk.shards]


def test_a_callers_buffer(kit: Any, serve: Any, folder: Path) -> None:
    running = serve({"one": folder})
    disk = stage(DirectorySource(folder), kit.small).image.buffer.tobytes()
    for packed in ("always", "never"):
        buffer = bytearray(b"\xa5" * kit.small.slot_bytes)
        # A parameter of the test.
        source = Peer(running.address, "one", secret=kit.secret, packed=packed)  # type: ignore[arg-type]
        assert stage(source, kit.small, buffer=buffer).image.lent
        assert bytes(buffer) == disk


def test_progress_and_phases(kit: Any, serve: Any, tmp_path: Path) -> None:
    running = serve({"big": kit.write(tmp_path / "big", kit.large, 100)})
    for packed, names in (
        ("always", {"resolve", "pack", "transfer", "verify"}),
        ("never", {"resolve", "transfer", "read", "digest", "audit", "pack"}),
    ):
        seen: list[tuple[int, int]] = []
        source = Peer(
            running.address,
            "big",
            secret=kit.secret,
            packed=packed,  # type: ignore[arg-type]  # a parameter of the test
            progress=lambda done, total, seen=seen: seen.append((done, total)),
        )
        staged = stage(source, kit.large)
        assert set(staged.report.seconds) == names <= set(PHASES), "all have a metric"
        assert seen == sorted(seen) and seen[-1][0] == seen[-1][1] and len(seen) > 1


@pytest.mark.parametrize("packed", ["always", "never"])
def test_anybody_with_the_secret_may_read_the_counters(
    kit: Any, serve: Any, folder: Path, packed: Any
) -> None:
    running = serve({"one": folder})
    one = Peer(running.address, "one", secret=kit.secret, packed=packed)
    before = one.counters()
    assert before["opens"] == before["packs"] == before["errors"] == 0
    landed = stage(one, kit.small).image
    with pytest.raises(RequestError):
        stage(dataclasses.replace(one, adapter="nothing"), kit.small)
    after = one.counters()
    assert after["packs"] == (packed == "always") and after["opens"] >= 1
    assert after["region_bytes"] >= landed.nbytes > 0 and after["connections_now"] >= 1
    assert after["bytes_sent"] - before["bytes_sent"] >= landed.nbytes
    assert refusal(dataclasses.replace(one, secret=b"guess").counters).code == "wire-auth-failed"


def test_refusals_over_the_wire(kit: Any, serve: Any, folder: Path) -> None:
    running = serve({"one": folder})

    def one(**more: Any) -> Any:
        fields = {"address": running.address, "adapter": "one", "secret": kit.secret} | more
        return lambda: stage(Peer(**fields), kit.small)

    error = refusal(one(adapter="two"))
    assert (type(error), error.code, error.subject) == (RequestError, "unknown-adapter", "two")
    assert refusal(one(secret=b"guess")).code == "wire-auth-failed"
    assert refusal(one(secret=None)).code == "wire-auth-required"
    small = StageLimits(FileLimits(file_bytes=1000))
    error = refusal(
        lambda: stage(Peer(running.address, "one", secret=kit.secret), kit.small, small)
    )
    assert (type(error), error.code) == (RejectError, "file-too-large")
    narrow = SlotLayout(kit.small.dims, 2)
    for packed in ("always", "never"):
        # A parameter of the test.
        source = Peer(running.address, "one", secret=kit.secret, packed=packed)  # type: ignore[arg-type]
        assert refusal(lambda s=source: stage(s, narrow)).code == "rank-exceeds-pool"
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
    assert refusal(one(address=address)).code == "peer-unreachable"
    for address in ("host", "host:", ":1", "host:70000", "host:1x"):
        assert refusal(lambda a=address: Peer(a, "one")).code == "bad-address"
    assert parse_peer_url("peer://[::1]:5/a%2Fb") == ("[::1]:5", "a/b")
    assert parse_address("[::1]:5") == ("::1", 5)
    for adapter in ("", "x" * 256):
        assert refusal(lambda a=adapter: Peer("h:1", a)).code == "bad-adapter-id"
    assert refusal(lambda: Peer("h:1", "a", rails=9)).code == "bad-rails"
    assert "secret of" not in repr(Peer("h:1", "a", secret=kit.secret))


def test_a_secret_is_kept_by_both(kit: Any, serve: Any, folder: Path) -> None:
    running = serve({"one": folder}, secret=None)
    stage(Peer(running.address, "one"), kit.small)
    error = refusal(lambda: stage(Peer(running.address, "one", secret=kit.secret), kit.small))
    assert (type(error), error.code) == (WireError, "wire-auth-missing")


def connected(running: Any, kit: Any, times: Times | None = None) -> Link:
    times = Times() if times is None else times
    stream = SocketStream(parse_address(running.address), 5.0)
    return Link(stream, bytes(32), kit.secret, times, stream._clock() + 60)


def test_limits_of_a_client(kit: Any, serve: Any, folder: Path) -> None:
    running = serve({"one": folder}, limits=PeerLimits(max_open=2))
    link = connected(running, kit)
    first = link.call(m.Open("one"))
    assert isinstance(first, m.Manifest)
    link.call(m.Open("one"))
    error = refusal(lambda: link.call(m.Open("one")))
    assert (type(error), error.code) == (CapacityError, "too-many-open")
    link.call(m.Release(first.digest))
    link.call(m.Open("one"))
    assert refusal(lambda: link.call(m.Release("0" * 64))).code == "not-open"

    def read(**more: Any) -> Any:
        fields = {"shard": 0, "fingerprint": "", "offset": 0, "nbytes": 4} | more
        ask = m.Read(first.digest, **fields)
        return lambda: link.call(ask, memoryview(bytearray(ask.nbytes)))

    assert refusal(read(offset=first.shards[0] - 3)).code == "read-out-of-range"
    assert refusal(read(offset=1 << 48)).code == "read-out-of-range"
    assert refusal(read(shard=1)).code == "not-open"
    assert refusal(read(shard=-1, fingerprint="0" * 64)).code == "not-open"
    rail = m.Rail(1, 1, bytes(16), 3, 1, 0)
    assert refusal(lambda: link.call(m.Connect([rail]))).code == "no-verbs"
    read()()  # refusals cost nothing
    status = link.call(m.Status())
    assert isinstance(status, m.Counters)
    assert status.values["leases"] == 2 and status.values["connections_now"] == 1
    ids = link.call(m.ListIds())
    assert ids == m.Ids(["one"])
    link.close()


def test_connections_are_limited(kit: Any, serve: Any, folder: Path) -> None:
    running = serve({"one": folder}, limits=PeerLimits(connections=1))
    link = connected(running, kit)
    error = refusal(lambda: stage(Peer(running.address, "one", secret=kit.secret), kit.small))
    assert (type(error), error.code) == (CapacityError, "peer-busy") and error.retry_after_s
    link.close()


def test_a_client_costs_one_thread_at_most(kit: Any, serve: Any, folder: Path) -> None:
    """Idle ones wait for the next client; a few stay when many have gone."""
    running = serve({"one": folder})

    def threads() -> int:
        return sum(t.name == "rota-peer" for t in threading.enumerate())

    def settled(most: int) -> None:
        until = time.monotonic() + 30
        while running.peer.counters()["connections_now"] or threads() > most:
            assert time.monotonic() < until
            threading.Event().wait(0.01)

    source = Peer(running.address, "one", secret=kit.secret)
    for _ in range(8):
        stage(source, kit.small)
    settled(4)
    links = [connected(running, kit) for _ in range(12)]
    assert 12 < threads() <= 16
    for link in links:
        link.close()
    settled(4)
    running.stop()
    assert threads() == 0


def test_a_version_1_client_is_served_too(kit: Any, serve: Any, folder: Path) -> None:
    """The whole exchange over a real socket, up to the status, and everything given back."""
    fabric = Fabric()
    verbs = VerbsPeer([FakeDevice(fabric)])
    running = serve({"one": folder}, secret=None, verbs=verbs, version1=True)
    device, proto, events = FakeDevice(fabric), Wire1Client("one"), list[Any]()
    with socket.create_connection(parse_address(running.address)) as client:
        client.settimeout(30)
        while not events or not isinstance(events[-1], Ready):
            client.sendall(proto.data_to_send())
            proto.receive_data(client.recv(1 << 16))
            for event in proto.events():
                events.append(event)
                if isinstance(event, GotManifest):
                    proto.choose_rails(2)
                elif isinstance(event, ServerRails):
                    proto.send_rails([QueuePair1(1, 2, device.gid)] * 2)
        assert running.peer.store.counters()["leases"] == 1 and fabric.open == 2
    manifest = events[0].manifest
    assert sum(manifest.shard_lens) == (folder / "adapter_model.safetensors").stat().st_size
    stage(Peer(running.address, "one"), kit.small)  # and version 2 beside it
    until = time.monotonic() + 30
    while running.peer.counters()["connections_now"]:
        assert time.monotonic() < until
        threading.Event().wait(0.01)
    assert running.peer.store.counters()["leases"] == 0 and fabric.open == 0


def test_the_loop_waits_for_no_lock_of_the_store(kit: Any, serve: Any, folder: Path) -> None:
    """Whatever a client asks while a thread holds it: here, giving a lease back."""
    running = serve({"one": folder})
    link = connected(running, kit)
    manifest = link.call(m.Open("one"))
    assert isinstance(manifest, m.Manifest)
    with running.peer.store._lock:
        for message in (m.Release(manifest.digest), m.Fetch("one", "0" * 64, ["sha256"], 0, 0)):
            link._proto.request(message, link._clock())
        link._flush()
        for _ in range(3):
            running.portal.start_task_soon(anyio.lowlevel.checkpoint).result(30)
        other = connected(running, kit)  # nor does the next client
        other.close()
    assert isinstance(link.call(m.Open("one")), m.Manifest)
    link.close()


def test_many_at_once(kit: Any, serve: Any, tmp_path: Path) -> None:
    folders = {f"a{i}": kit.write(tmp_path / f"a{i}", kit.small, seed=i) for i in range(4)}
    running = serve(folders)
    failures: list[BaseException] = []

    def work(name: str) -> None:
        try:
            for _ in range(3):
                staged = stage(Peer(running.address, name, secret=kit.secret), kit.small)
                same(staged, stage(DirectorySource(folders[name]), kit.small))
        except BaseException as error:  # a thread: the test sees it in the list
            failures.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in folders for _ in "12"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert running.peer.store.counters()["packs"] <= 4


@pytest.mark.parametrize(
    "junk",
    [b"", b"r", b"GET / HTTP/1.1\r\n\r\n", b"rota\x02", b"rota" + b"\xff" * 60, b"\x05\0\0\0model"],
)
def test_strangers_cost_only_themselves(kit: Any, serve: Any, folder: Path, junk: bytes) -> None:
    times = Times(handshake=0.2)
    running = serve({"one": folder}, limits=PeerLimits(times=times))
    with socket.create_connection(parse_address(running.address)) as stranger:
        stranger.sendall(junk)
        while stranger.recv(4096):  # told why, or not; hung up in any case
            pass
    stage(Peer(running.address, "one", secret=kit.secret), kit.small)


def test_a_client_that_does_not_read(kit: Any, serve: Any, tmp_path: Path) -> None:
    """The payload of a stalled client does not keep its lease for ever."""
    folder = kit.write(tmp_path / "big", kit.large, 100)
    running = serve({"big": folder}, limits=PeerLimits(times=Times(stall=0.2)))
    link = connected(running, kit)
    manifest = link.call(m.Open("big"))
    assert isinstance(manifest, m.Manifest)
    for _ in range(4):
        nbytes = manifest.shards[0]
        ask = m.Read(manifest.digest, 0, "", 0, nbytes)
        link._proto.request(ask, link._clock(), memoryview(bytearray(nbytes)))
    link._flush()
    stage(Peer(running.address, "big", secret=kit.secret), kit.large)  # others are served
    until = link._clock() + 20
    counters, store = running.peer.counters, running.peer.store
    while counters()["connections_now"] or store.counters()["leases"]:
        assert link._clock() < until, "the stalled client, or its lease, is still there"
        threading.Event().wait(0.01)
    assert running.peer.counters()["errors"] == 1
    assert running.peer.store.counters()["leases"] == 0
    link.close()


@pytest.mark.parametrize("packed", ["always", "never"])
@pytest.mark.parametrize("limit", [0, 30, 100, 2000, 1_000_000, 4_000_000])
def test_cut_in_the_middle(
    kit: Any, serve: Any, proxy: Any, tmp_path: Path, limit: int, packed: str
) -> None:
    folder = kit.write(tmp_path / "big", kit.large, 100)
    running = serve({"big": folder})
    fields: dict[str, Any] = {"secret": kit.secret, "packed": packed}
    broken = proxy(running.address, "cut", limit)
    error = refusal(lambda: stage(Peer(broken.address, "big", **fields), kit.large))
    assert (type(error), error.code) == (StagingError, "peer-lost")
    staged = stage(Peer(running.address, "big", **fields), kit.large)
    same(staged, stage(DirectorySource(folder), kit.large))


@pytest.mark.parametrize("limit", [0, 100, 2000, 1_000_000])
def test_half_open(kit: Any, serve: Any, proxy: Any, tmp_path: Path, limit: int) -> None:
    """Silence ends at the client's own deadline, whatever TCP thinks."""
    running = serve({"big": kit.write(tmp_path / "big", kit.large, 100)})
    silent = proxy(running.address, "half-open", limit)
    times = Times(handshake=0.3, reply=0.3, stall=0.3)
    source = Peer(silent.address, "big", secret=kit.secret, packed="never", times=times)
    assert refusal(lambda: stage(source, kit.large)).code == "peer-timeout"
    source = Peer(silent.address, "big", secret=kit.secret, deadline_s=0.3)
    assert refusal(lambda: stage(source, kit.large)).code == "peer-timeout"


def test_cancelled_while_nothing_comes(kit: Any, serve: Any, proxy: Any, folder: Path) -> None:
    running = serve({"one": folder})
    silent = proxy(running.address, "half-open", 0)
    flag = threading.Event()
    threading.Timer(0.1, flag.set).start()
    source = Peer(silent.address, "one", secret=kit.secret)
    error = refusal(lambda: stage(source, kit.small, cancelled=flag.is_set))
    assert error.code == "stage-cancelled"


def test_small_pieces(kit: Any, serve: Any, proxy: Any, folder: Path) -> None:
    running = serve({"one": folder})
    slow = proxy(running.address, piece=7)
    staged = stage(Peer(slow.address, "one", secret=kit.secret), kit.small)
    same(staged, stage(DirectorySource(folder), kit.small))


def test_stopping(kit: Any, serve: Any, tmp_path: Path) -> None:
    folder = kit.write(tmp_path / "big", kit.large, 100)
    running = serve({"big": folder})
    idle = connected(running, kit)
    idle.call(m.Open("big"))
    running.stop()
    error = refusal(lambda: idle.call(m.ListIds()))
    assert (type(error), error.code) == (StagingError, "peer-lost")
    idle.close()
    assert refusal(lambda: connected(running, kit)).code in ("peer-unreachable", "peer-lost")


def test_stopping_lets_a_transfer_end(kit: Any, serve: Any, tmp_path: Path) -> None:
    folder = kit.write(tmp_path / "big", kit.large, 100)
    running = serve({"big": folder})
    stopped = threading.Event()

    def stop(done: int, total: int) -> None:
        if not stopped.is_set():
            stopped.set()
            running.portal.call(running.peer.stop)

    source = Peer(running.address, "big", secret=kit.secret, packed="always", progress=stop)
    same(stage(source, kit.large), stage(DirectorySource(folder), kit.large))
    assert stopped.is_set()


def test_full_memory_sends_files_or_says_so(kit: Any, serve: Any, tmp_path: Path) -> None:
    folder = kit.write(tmp_path / "big", kit.large, 8)
    size = (folder / "adapter_model.safetensors").stat().st_size
    assert size < kit.large.slot_bytes
    tight = PeerLimits(store=StoreLimits(budget=size + 1000))
    running = serve({"big": folder}, limits=tight)
    source = Peer(running.address, "big", secret=kit.secret, packed="always")
    error = refusal(lambda: stage(source, kit.large))
    assert error.code == "bad-layout"  # a slot that can never fit
    roomy = PeerLimits(store=StoreLimits(budget=kit.large.slot_bytes + 1000))
    running = serve({"big": folder}, limits=roomy)
    source = Peer(running.address, "big", secret=kit.secret, packed="always")
    landed = stage(source, kit.large)
    same(landed, stage(DirectorySource(folder), kit.large))
    assert "audit" in landed.report.seconds  # packed here, not there


def test_sharded_adapters(kit: Any, serve: Any, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    whole = kit.write(tmp_path / "whole", kit.small)
    parts = tmp_path / "parts"
    parts.mkdir()
    (parts / "adapter_config.json").write_bytes((whole / "adapter_config.json").read_bytes())
    tensors = load_file(whole / "adapter_model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for index in range(3):
        file = f"adapter_model-{index + 1:05}-of-00003.safetensors"
        save_file({n: tensors[n] for n in names[index::3]}, parts / file)
        weight_map |= dict.fromkeys(names[index::3], file)
    index_file = parts / "adapter_model.safetensors.index.json"
    index_file.write_text(json.dumps({"weight_map": weight_map}))
    running = serve({"parts": parts})
    disk = stage(DirectorySource(parts), kit.small)
    for packed in ("always", "never"):
        # A parameter of the test.
        source = Peer(running.address, "parts", secret=kit.secret, packed=packed)  # type: ignore[arg-type]
        same(stage(source, kit.small), disk)
