"""Adapters over real sockets: whatever lands from a peer is what is read from disk."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rota.errors import RejectError
from rota.gpu.lora.dims import ModelDims
from rota.gpu.lora.layout import Elem, SlotLayout
from rota.gpu.lora.safefile import FileLimits
from rota.gpu.lora.source import DirectorySource
from rota.gpu.lora.stage import StageLimits, stage
from rota.gpu.model.config import load_config
from rota.rdma import desk, hashes, landing
from rota.rdma.client import Peer
from rota.rdma.peer import PeerLimits
from rota.rdma.store import StoreLimits
from rota.sched.core.spread import PHASES

from .exchange import refusal, same

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


@pytest.mark.parametrize("secret", [b"one", None])
@pytest.mark.parametrize("packed", ["always", "never", "auto"])
@pytest.mark.parametrize("elem", Elem)
def test_the_corpus_lands_as_from_disk(
    kit: Any, serve: Any, elem: Elem, packed: Any, secret: bytes | None
) -> None:
    root = kit.root / "tests/data/oracle/qwen35/adapters"
    folders = {path.name: path for path in sorted(root.iterdir())}
    running = serve(folders, secret=secret)
    landed = refused = 0
    for name, path in folders.items():
        layout = SlotLayout(HYBRID, 64, elem, overlay_rows=128 if name.startswith("mts") else 16)
        # A parameter of the test.
        source = Peer(running.address, name, secret=secret, packed=packed)
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


@pytest.mark.parametrize("name", hashes.KNOWN)
def test_both_ends_agree_on_a_hash(
    kit: Any, serve: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    running = serve({"one": folder}, secret=None)
    source = Peer(running.address, "one", packed="always")
    # A hash only one end knows is passed over; with none in common nothing is packed.
    for names in ([name], ["new", name]):
        monkeypatch.setattr(landing, "offered", lambda sure, names=names: names)
        same(stage(source, kit.small), stage(DirectorySource(folder), kit.small))
    monkeypatch.setattr(landing, "offered", lambda sure: ["new"])
    assert refusal(lambda: stage(source, kit.small)).code == "no-common-hash"


QUICK = "xxh3-128"


@pytest.mark.parametrize("secret", [b"one", None])
def test_where_digests_are_authentic_nobody_may_forge_their_bytes(
    kit: Any, serve: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, secret: bytes | None
) -> None:
    """A hash that one can find other bytes for is neither offered nor taken by whoever has a
    secret, whatever the other end would do."""
    running = serve({"one": folder}, secret=secret)
    source, taken = Peer(running.address, "one", secret=secret, packed="always"), list[str]()
    check = landing.check_packed

    def checked(packed: Any, *rest: Any) -> Any:
        taken.append(packed.hash)
        return check(packed, *rest)

    monkeypatch.setattr(landing, "check_packed", checked)
    same(stage(source, kit.small), stage(DirectorySource(folder), kit.small))
    assert taken == ["blake3" if secret else QUICK]
    if secret is None:
        return
    with monkeypatch.context() as other:
        other.setattr(landing, "offered", lambda sure: [QUICK])
        assert refusal(lambda: stage(source, kit.small)).code == "no-common-hash"
    with monkeypatch.context() as other:
        other.setattr(desk, "choose", lambda names, sure: QUICK)
        refused = refusal(lambda: stage(source, kit.small))
        assert (refused.code, refused.subject) == ("packed-mismatch", "hash")


def test_without_faster_hashes_there_is_sha256(monkeypatch: pytest.MonkeyPatch) -> None:
    told, sure = ["blake3-told", "sha256-told"], ["blake3", "sha256"]
    assert hashes.offered(sure=False) == list(hashes.KNOWN) == [QUICK, *told, *sure]
    assert hashes.offered(sure=True) == sure
    assert [name for name, one in hashes.KNOWN.items() if not one.sure] == [QUICK]
    assert [name for name, one in hashes.KNOWN.items() if one.told] == [QUICK, *told]
    for missing, left in (("xxhash", [*told, *sure]), ("blake3", ["sha256-told", "sha256"])):
        monkeypatch.setitem(sys.modules, missing, None)
        assert list(hashes._known()) == left
    image = np.arange(1 << 20, dtype=np.uint32).view(np.uint8)
    wanted = [
        hashlib.sha256(image[at : at + (1 << 20)]).digest() for at in range(0, 4 << 20, 1 << 20)
    ]
    assert hashes.chunk_digests(image, "sha256") == b"".join(wanted)


def test_digests_are_those_of_the_published_hashes() -> None:
    """Of nothing, as the authors of each give them; both ends must mean the same by a name."""
    empty = np.empty(0, np.uint8)
    found = {name: one.of(empty).hex() for name, one in hashes.KNOWN.items()}
    assert {(name.removesuffix("-told"), digest) for name, digest in found.items()} == {
        (QUICK, "99aa06d3014798d86001c324468d497f"),
        ("blake3", "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"),
        ("sha256", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
    }


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
        source = Peer(running.address, "one", secret=kit.secret, packed=packed)
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
            packed=packed,
            progress=lambda done, total, seen=seen: seen.append((done, total)),
        )
        staged = stage(source, kit.large)
        assert set(staged.report.seconds) == names <= set(PHASES), "all have a metric"
        assert seen == sorted(seen) and seen[-1][0] == seen[-1][1] and len(seen) > 1


def test_small_pieces(kit: Any, serve: Any, proxy: Any, folder: Path) -> None:
    running = serve({"one": folder})
    slow = proxy(running.address, piece=7)
    staged = stage(Peer(slow.address, "one", secret=kit.secret), kit.small)
    same(staged, stage(DirectorySource(folder), kit.small))


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
        source = Peer(running.address, "parts", secret=kit.secret, packed=packed)
        same(stage(source, kit.small), disk)
