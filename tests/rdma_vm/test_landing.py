"""Adapters landed by one-sided reads are those on disk, to the last byte."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rota.errors import InternalError, RejectError, StagingError
from rota.gpu.lora.dims import ModelDims
from rota.gpu.lora.layout import Elem, SlotLayout
from rota.gpu.lora.source import DirectorySource
from rota.gpu.lora.stage import StagedAdapter, stage
from rota.rdma import messages as m
from rota.rdma.address import parse_address
from rota.rdma.client import Peer
from rota.rdma.hosts import VerbsClient
from rota.rdma.link import SocketStream
from rota.rdma.verbs import Device
from rota.rdma.wire1 import GotManifest, QueuePair1, Ready, ServerRails, Wire1Client

from .conftest import LARGE, PeerProcess

ROOT = Path(__file__).resolve().parents[2]


def llama(elem: Elem) -> SlotLayout:
    config = json.loads((ROOT / "tests/data/oracle/llama/base/config.json").read_bytes())
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head = config.get("head_dim") or hidden // heads
    dims = ModelDims(
        num_layers=config["num_hidden_layers"],
        hidden=hidden,
        q_out=heads * head,
        kv_out=config["num_key_value_heads"] * head,
        attn_in=heads * head,
        intermediate=config["intermediate_size"],
        vocab=config["vocab_size"],
        tied=config["tie_word_embeddings"],
    )
    return SlotLayout(dims, 24, elem, overlay_rows=8)


def hybrid(elem: Elem) -> SlotLayout:
    """Attention and feed-forward of the small hybrid model, as if every layer had both."""
    return SlotLayout(ModelDims(5, 48, 256, 64, 128, 80, 128), 64, elem, overlay_rows=16)


def same(landed: StagedAdapter, disk: StagedAdapter) -> None:
    a, b = landed.image, disk.image
    assert a.buffer.tobytes() == b.buffer.tobytes()
    assert (a.digest, a.fingerprint, a.present, a.ranks) == (
        b.digest,
        b.fingerprint,
        b.present,
        b.ranks,
    )
    np.testing.assert_array_equal(a.scales, b.scales)
    assert (a.embed_rows, a.head_rows) == (b.embed_rows, b.head_rows)
    for name in ("pairs", "tensors", "by_module", "ranks", "scales", "notes", "ignored"):
        assert getattr(landed.report, name) == getattr(disk.report, name)


@pytest.mark.parametrize("packed", ["always", "never"])
@pytest.mark.parametrize("elem", Elem)
def test_every_kind_lands_as_from_disk(
    folders: dict[str, Path], source: Callable[..., Peer], elem: Elem, packed: str
) -> None:
    landed = refused = 0
    layouts = {"llama": llama(elem), "qwen35": hybrid(elem)}
    for name, path in folders.items():
        layout = layouts.get(name.partition("-")[0])
        if layout is None:
            continue
        try:
            disk = stage(DirectorySource(path), layout)
        except RejectError as error:
            with pytest.raises(RejectError) as caught:
                stage(source(name, packed=packed), layout)
            assert (caught.value.code, caught.value.subject) == (error.code, error.subject)
            refused += 1
            continue
        same(stage(source(name, packed=packed), layout), disk)
        landed += 1
    assert landed >= 6 and refused >= 6, (landed, refused)


@pytest.mark.parametrize(
    ("name", "packed", "rails"),
    [("large", "always", 1), ("large", "never", 3)]
    + [("large-f32", "always", rails) for rails in (2, 8)],
)
def test_large_adapters_by_several_rails(
    on_disk: Callable[[str], StagedAdapter],
    source: Callable[..., Peer],
    name: str,
    packed: str,
    rails: int,
) -> None:
    seen: list[int] = []
    made = source(name, packed=packed, rails=rails, progress=lambda done, _: seen.append(done))
    same(stage(made, LARGE), on_disk(name))
    assert seen == sorted(seen) and seen[-1] > 0


class Cutting:
    """A transport that cuts the second cable once the queue pairs are joined."""

    def __init__(self, transport: VerbsClient) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def open(self, count: int) -> Any:
        rails = self._transport.open(count)
        read = rails.read

        def cut(*words: Any, **more: Any) -> None:
            subprocess.run(["ip", "link", "set", "vd", "down"], check=True)
            read(*words, **more)

        rails.read = cut  # type: ignore[method-assign]  # put in its place by the test
        return rails


def packets(device: str) -> int:
    """Packets the device has received so far."""
    path = Path(f"/sys/class/infiniband/{device}/ports/1/hw_counters/rcvd_pkts")
    return int(path.read_text())


@pytest.mark.parametrize("rails", [1, 3, 8])
def test_rails_over_two_devices(
    folders: dict[str, Path],
    secret: Path,
    on_disk: Callable[[str], StagedAdapter],
    source: Callable[..., Peer],
    rails: int,
) -> None:
    """Two cables carry one image; with one of them cut it fails by name, and mended it lands."""
    served = PeerProcess({"large": folders["large"]}, secret, devices="rxe1,rxe3")
    mine = VerbsClient([Device("rxe0"), Device("rxe2")], 64 << 20)
    made = source("large", address=served.address, transport=mine, rails=rails)
    before = [packets(name) for name in ("rxe0", "rxe2")]
    same(stage(made, LARGE), on_disk("large"))
    came = [packets(name) - was for name, was in zip(("rxe0", "rxe2"), before, strict=True)]
    # 17 MB in packets of at most 4 KiB, by halves or (three rails) two thirds and one.
    assert min(came) > LARGE.slot_bytes / 4096 / 4, came
    try:
        with pytest.raises(StagingError) as caught:
            stage(source("large", address=served.address, transport=Cutting(mine)), LARGE)
        assert caught.value.code in ("rdma-read-failed", "peer-timeout")
    finally:
        subprocess.run(["/run/rxevm/mend"], check=True)
    del caught
    gc.collect()
    same(stage(made, LARGE), on_disk("large"))
    gc.collect()
    mine.close()
    served.stop()


def test_bytes_went_by_verbs(peer: PeerProcess, source: Callable[..., Peer]) -> None:
    """The peer's sockets carry far fewer bytes than the image has."""

    def sent() -> float:
        return source("large").counters()["bytes_sent"]

    before = sent()
    landed = stage(source("large"), LARGE)
    assert sent() - before < landed.image.nbytes / 100


def test_a_callers_buffer_is_filled(
    on_disk: Callable[[str], StagedAdapter], source: Callable[..., Peer]
) -> None:
    buffer = bytearray(b"\xa5" * LARGE.slot_bytes)
    landed = stage(source("large"), LARGE, buffer=buffer)
    disk = on_disk("large")
    assert bytes(buffer) == disk.image.buffer.tobytes() == landed.image.buffer.tobytes()


def test_a_hundred_promotions_register_once(
    device: Device, source: Callable[..., Peer], folders: dict[str, Path]
) -> None:
    layout = llama(Elem.BF16)
    [name] = [n for n in folders if n.startswith("llama-")][:1]
    disk = stage(DirectorySource(folders[name]), layout).image.buffer.tobytes()
    before = device.registrations
    for _ in range(100):
        assert stage(source(name), layout).image.buffer.tobytes() == disk
    assert device.registrations == before == 1


def test_memory_is_not_freed_under_an_image(device: Device) -> None:
    mine = VerbsClient([Device("rxe0")], 1 << 20)
    block: Any = mine.allocate(5000)
    with pytest.raises(InternalError) as caught:
        mine.close()
    assert caught.value.code == "memory-in-use"
    block[:] = 7
    del block
    mine.close()


def test_a_read_only_file_cannot_be_registered(tmp_path: Path, device: Device) -> None:
    """Why shards are copied into shared memory; and what the refusal looks like."""
    import mmap

    from rota.errors import DeviceError
    from rota.rdma.region import Region

    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 16))
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
    region = Region(1 << 16)
    region.address = np.frombuffer(mapped, np.uint8).ctypes.data
    with pytest.raises(DeviceError) as caught:
        device.register(region)
    assert caught.value.code == "verbs-failed"
    region.close()


def test_version_1_clients_read_tensors(folders: dict[str, Path], device: Device) -> None:
    """The reference exchange, then one READ of each tensor."""
    from rota.gpu.lora.directory import read_directory
    from rota.gpu.lora.safefile import FileLimits, parse_shards

    served = PeerProcess({"large-f32": folders["large-f32"]}, None, "--version1")
    mine = VerbsClient([Device("rxe0")], 32 << 20)
    stream = SocketStream(parse_address(served.address), 5.0)
    rails = mine.open(2)
    proto, until = Wire1Client("some/where/large-f32"), mine._clock() + 60
    seen: dict[str, Any] = {}
    buffer = memoryview(bytearray(65536))
    while "Ready" not in seen:
        if data := proto.data_to_send():
            stream.send(data, until)
            continue
        proto.receive_data(bytes(buffer[: stream.receive(buffer, until)]))
        for event in proto.events():
            seen[type(event).__name__] = event
            if isinstance(event, GotManifest):
                proto.choose_rails(2)
            elif isinstance(event, ServerRails):
                own = [QueuePair1(r.qpn, r.psn, r.gid) for r in rails.rails]
                rails.connect(
                    [m.Rail(s.pair.qpn, s.pair.psn, s.pair.gid, 3, 16, 0) for s in event.rails]
                )
                proto.send_rails(own)
            else:
                assert isinstance(event, Ready)
    manifest = seen["GotManifest"].manifest
    _, shards = read_directory(folders["large-f32"], FileLimits())
    disk = {t.key: t.data.tobytes() for t in parse_shards(shards, FileLimits())}
    assert {t.name for t in manifest.tensors} == set(disk)
    target = mine.allocate(max(t.length for t in manifest.tensors))
    for tensor in manifest.tensors:
        base, rkey = seen["ServerRails"].rails[0].regions[tensor.shard]
        rails.read(
            target[: tensor.length], base + tensor.offset, [rkey], until, None, lambda _: None
        )
        assert target[: tensor.length].tobytes() == disk[tensor.name]
    rails.close()
    stream.close()
    del target
    mine.close()
    assert "peer stopped" in served.stop()


#: A process that may lock 64 KiB and has not the capability to lock more.
LIMITED = ("prlimit", "--memlock=65536:65536", "setpriv", "--bounding-set=-ipc_lock")


def test_a_peer_that_may_not_register_sends_by_tcp(
    folders: dict[str, Path],
    secret: Path,
    source: Callable[..., Peer],
    on_disk: Callable[[str], StagedAdapter],
) -> None:
    served = PeerProcess({"large": folders["large"]}, secret, prefix=LIMITED)
    try:
        assert "RDMA" in served.first_line
        same(stage(source("large", address=served.address), LARGE), on_disk("large"))
    finally:
        last = served.stop()
    found = re.search(r"'bytes_sent': (\d+)", last)
    assert found is not None and int(found[1]) > LARGE.slot_bytes, last


def test_an_engine_that_may_not_register_says_so_and_has_tcp() -> None:
    code = (
        "import logging; logging.basicConfig();"
        "from rota.rdma.verbs import open_client;"
        "small, large = open_client(4096), open_client(8 << 20);"
        "assert small is not None and large is None; small.close()"
    )
    ran = subprocess.run(
        [*LIMITED, sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("adapters come by TCP") == 1


def test_the_probe_for_device_memory(device: Device) -> None:
    """Soft-RoCE has no dmabuf support, and says so without a card."""
    assert device.takes_device_memory() is False
