"""Reading files: hostile bytes, hostile directories, and that nothing is copied."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.errors import RejectError, RotaError, StagingError
from rota.gpu.lora import directory
from rota.gpu.lora.safefile import FileLimits, parse_shards
from rota.gpu.lora.source import BytesSource, DirectorySource

LIMITS = FileLimits()
ONE = b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'


def parse(raw: bytes, limits: FileLimits = LIMITS) -> list[Any]:
    return parse_shards((np.frombuffer(raw, np.uint8),), limits)


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> bytes:
    return json.dumps({"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()


def refused(raw: bytes, limits: FileLimits = LIMITS) -> str:
    with pytest.raises(RejectError) as caught:
        parse(raw, limits)
    return caught.value.code


def test_a_good_file_is_viewed_not_copied(kit: Any) -> None:
    raw = np.frombuffer(kit.file({"a": kit.tensor((3, 2)), "b": kit.tensor((4,), "F16")}), np.uint8)
    tensors = parse_shards((raw,), LIMITS)
    assert [(t.key, t.dtype, t.shape) for t in tensors] == [
        ("a", "F32", (3, 2)),
        ("b", "F16", (4,)),
    ]
    assert all(np.shares_memory(t.data, raw) for t in tensors)


def test_metadata_is_allowed_if_it_is_strings(kit: Any) -> None:
    assert parse(kit.file({"a": kit.tensor((2,))}, {"format": "pt", "note": "\\"}))
    assert refused(kit.file({"a": kit.tensor((2,))}, {"format": 1})) == "bad-safetensors"
    assert refused(kit.file({"a": kit.tensor((2,))}, ["x"])) == "bad-safetensors"


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (b"[]", b""),
        (b"{", b""),
        (b" {}", b""),
        (b"\xff{}", b""),
        (b'{"a": 3}', b""),
        (b'{"a": {}}', b""),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], "x": 1}}', bytes(8)),
        (entry(shape="2"), bytes(8)),
        (entry(shape=[-2]), bytes(8)),
        (entry(shape=[2.0]), bytes(8)),
        (entry(shape=[True, 2]), bytes(8)),
        (entry(shape=[3]), bytes(8)),
        (entry(shape=[2**62, 2**62]), bytes(8)),
        (entry(shape=[10**4000, 10**4000]), bytes(8)),
        (entry(shape=[0, 10**4000], offsets=[0, 0]), b""),
        (entry(offsets=[0, 10**4000]), bytes(8)),
        (entry(shape=[1] * 9 + [2]), bytes(8)),
        (entry(dtype=3), bytes(8)),
        (entry(offsets=[0]), bytes(8)),
        (entry(offsets=[0, 8, 8]), bytes(8)),
        (entry(offsets=[8, 0]), bytes(8)),
        (entry(offsets=[-8, 0]), bytes(8)),
        (entry(offsets=["0", 8]), bytes(8)),
        (entry(offsets=[0, 8]), bytes(7)),
        (entry(offsets=[0, 8]), bytes(9)),
        (entry(offsets=[4, 12]), bytes(12)),
        (
            b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},'
            b'"b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}',
            bytes(12),
        ),
        (
            b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},'
            b'"b": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
            bytes(8),
        ),
        (b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}", b""),
        (b'{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 8]}}', bytes(8)),
    ],
    ids=lambda v: repr(v)[:60] if v else "-",
)
def test_malformed_headers(kit: Any, header: bytes, data: bytes) -> None:
    assert refused(kit.raw_file(header, data)) == "bad-safetensors"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        bytes(7),
        bytes(64),
        b"\x01" + bytes(63),
        b"\xff" * 64,
        (2**63).to_bytes(8, "little") + b"{}",
        (17 << 20).to_bytes(8, "little") + bytes(64),
        (1000).to_bytes(8, "little") + b"{}",
    ],
)
def test_header_length_lies(raw: bytes) -> None:
    assert refused(raw) == "bad-safetensors"


def test_truncated_anywhere(kit: Any) -> None:
    whole = kit.file({"a": kit.tensor((3,)), "b": kit.tensor((2, 2), "BF16")})
    for length in range(len(whole)):
        assert refused(whole[:length]) == "bad-safetensors"


def test_duplicate_keys_in_the_header(kit: Any) -> None:
    doubled = ONE[:-1] + b", " + ONE[1:]
    assert refused(kit.raw_file(doubled, bytes(8))) == "duplicate-json-key"
    escaped = ONE[:-1] + b", " + ONE[1:].replace(b'"a"', b'"\\u0061"')
    assert refused(kit.raw_file(escaped, bytes(8))) == "duplicate-json-key"


@pytest.mark.parametrize("dtype", ["F64", "I64", "F8_E4M3", "BOOL", "f32", "X" * 500])
def test_dtypes_that_are_not_served(kit: Any, dtype: str) -> None:
    assert refused(kit.raw_file(entry(dtype=dtype), bytes(8))) == "unsupported-dtype"


def test_limits(kit: Any) -> None:
    raw = kit.file({f"t{n}": kit.tensor((1,)) for n in range(3)})
    assert refused(raw, FileLimits(tensors=2)) == "too-many-tensors"
    assert refused(raw, FileLimits(key_chars=1)) == "key-too-long"
    assert refused(raw, FileLimits(header_bytes=10)) == "bad-safetensors"
    for limits, code in (
        (FileLimits(file_bytes=len(raw) - 1), "file-too-large"),
        (FileLimits(config_bytes=1), "config-too-large"),
    ):
        with pytest.raises(RejectError) as caught:
            BytesSource(raw, b"{}").read(limits)
        assert caught.value.code == code


def test_pickle_and_zip_in_disguise(tmp_path: Path) -> None:
    for protocol in (2, 3, 4, 5):
        assert refused(pickle.dumps({"a": [1.0] * 40}, protocol)) == "pickle-adapter"
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("data.pkl", "x")
    assert refused((tmp_path / "x.zip").read_bytes()) == "pickle-adapter"


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=200), place=st.integers(0, 150), raw=st.binary(max_size=40))
def test_arbitrary_bytes_give_a_refusal_or_exact_tensors(
    data: bytes, place: int, raw: bytes
) -> None:
    good = len(ONE).to_bytes(8, "little") + ONE + bytes(8)
    for candidate in (data, good[:place] + raw + good[place + len(raw) :]):
        try:
            tensors = parse(candidate)
        except RotaError:
            continue
        assert sum(t.data.nbytes for t in tensors) <= len(candidate)


# Directories


def read(folder: Path, limits: FileLimits = LIMITS) -> Any:
    return DirectorySource(folder).read(limits)


def dir_refused(folder: Path, limits: FileLimits = LIMITS) -> str:
    with pytest.raises(RotaError) as caught:
        read(folder, limits)
    return caught.value.code


def test_directory_and_bytes_give_the_same(kit: Any, tmp_path: Path) -> None:
    raw, config = kit.file(kit.pair()), kit.config()
    kit.write(tmp_path, raw, config)
    found = read(tmp_path)
    same = BytesSource(raw, config).read(LIMITS)
    assert found.config == config and found.shards[0].tobytes() == raw
    assert found.digest() == same.digest()


def test_what_is_missing(kit: Any, tmp_path: Path) -> None:
    assert dir_refused(tmp_path / "nowhere") == "adapter-unreadable"
    assert dir_refused(tmp_path / "a\0b") == "adapter-unreadable"
    assert dir_refused(tmp_path) == "missing-weights"
    (tmp_path / "adapter_model.safetensors").write_bytes(kit.file(kit.pair()))
    assert dir_refused(tmp_path) == "missing-config"
    assert dir_refused(tmp_path / "adapter_model.safetensors") == "adapter-unreadable"


def test_only_a_pickle_is_refused_without_opening_it(tmp_path: Path) -> None:
    # A link to nowhere: opening it would fail in another way.
    (tmp_path / "adapter_model.bin").symlink_to(tmp_path / "gone")
    (tmp_path / "adapter_config.json").write_text("{}")
    assert dir_refused(tmp_path) == "pickle-adapter"


def test_a_pickle_beside_safetensors_is_ignored(kit: Any, tmp_path: Path) -> None:
    kit.write(tmp_path, kit.pair(), kit.config())
    (tmp_path / "adapter_model.bin").symlink_to(tmp_path / "gone")
    assert read(tmp_path).shards[0].nbytes > 0


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_links_out_of_the_directory(kit: Any, tmp_path: Path, name: str) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.mkdir(), inside.mkdir()
    kit.write(outside, kit.pair(), kit.config())
    kit.write(inside, kit.pair(), kit.config())
    (inside / name).unlink()
    (inside / name).symlink_to(outside / name)
    assert dir_refused(inside) == "file-escapes-directory"
    followed = DirectorySource(inside, follow_links=True).read(LIMITS)
    assert followed.digest() == read(outside).digest()
    (inside / name).unlink()
    (inside / "real").write_bytes((outside / name).read_bytes())
    (inside / name).symlink_to("real")
    assert read(inside).shards[0].nbytes > 0


def test_the_directory_itself_may_be_a_link(kit: Any, tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    kit.write(real, kit.pair(), kit.config())
    (tmp_path / "link").symlink_to(real)
    assert read(tmp_path / "link").digest() == read(real).digest()


def test_pipes_directories_and_loops(kit: Any, tmp_path: Path) -> None:
    kit.write(tmp_path, kit.pair(), kit.config())
    weights = tmp_path / "adapter_model.safetensors"
    weights.unlink()
    os.mkfifo(weights)
    assert dir_refused(tmp_path) == "not-a-plain-file"
    weights.unlink()
    weights.mkdir()
    assert dir_refused(tmp_path) == "not-a-plain-file"
    weights.rmdir()
    weights.symlink_to(weights)
    assert dir_refused(tmp_path) == "adapter-unreadable"


def _rewrite(folder: Path, other: Path) -> None:
    data = (other / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(data)
    os.utime(folder / "adapter_model.safetensors", ns=(5, 5))  # a clock tick later


def _rewrite_with_its_time(folder: Path, other: Path) -> None:
    """As tools do that copy a file's time with it; the sizes are equal."""
    file = folder / "adapter_model.safetensors"
    was = file.stat()
    file.write_bytes((other / file.name).read_bytes())
    os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
    while file.stat().st_ctime_ns == was.st_ctime_ns:
        os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))


def _rename_file(folder: Path, other: Path) -> None:
    (other / "adapter_model.safetensors").rename(folder / "adapter_model.safetensors")


def _rename_folder(folder: Path, other: Path) -> None:
    folder.rename(folder.with_name("gone"))
    other.rename(folder)


def _config_after(folder: Path, other: Path) -> None:
    (other / "adapter_config.json").rename(folder / "adapter_config.json")


def _remove(folder: Path, other: Path) -> None:
    (folder / "adapter_config.json").unlink()


@pytest.mark.parametrize(
    ("change", "after"),
    [
        (_rewrite, "adapter_model.safetensors"),
        (_rewrite_with_its_time, "adapter_config.json"),
        (_rewrite_with_its_time, "adapter_model.safetensors"),
        (_rename_file, "adapter_config.json"),
        (_rename_file, "adapter_model.safetensors"),
        (_rename_folder, "adapter_config.json"),
        (_rename_folder, "adapter_model.safetensors"),
        (_config_after, "adapter_config.json"),
        (_remove, "adapter_config.json"),
    ],
)
def test_a_config_is_never_paired_with_the_weights_of_another_version(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, after: str
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, alpha in ((one, 8), (two, 16)):
        folder.mkdir()
        kit.write(folder, kit.pair(), kit.config(lora_alpha=alpha))
    whole = directory._Reader.read

    def read_then_change(self: Any, name: str, *limits: Any) -> Any:
        made = whole(self, name, *limits)
        if name == after:
            change(one, two)
        return made

    monkeypatch.setattr(directory._Reader, "read", read_then_change)
    assert dir_refused(one) == "adapter-changing"


def test_a_link_that_moves_on_to_a_new_version_leaves_the_old_one_whole(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, alpha in (("one", 8), ("two", 16)):
        (tmp_path / name).mkdir()
        kit.write(tmp_path / name, kit.pair(), kit.config(lora_alpha=alpha))
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "one")
    before, whole = read(link).digest(), directory._Reader.read

    def read_then_move_on(self: Any, name: str, *limits: Any) -> Any:
        made = whole(self, name, *limits)
        if link.readlink() == tmp_path / "one":
            link.unlink()
            link.symlink_to(tmp_path / "two")
        return made

    monkeypatch.setattr(directory._Reader, "read", read_then_move_on)
    assert read(link).digest() == before


def test_size_limits_of_a_directory(kit: Any, tmp_path: Path) -> None:
    kit.write(tmp_path, kit.pair(), kit.config())
    assert dir_refused(tmp_path, FileLimits(config_bytes=4)) == "config-too-large"
    assert dir_refused(tmp_path, FileLimits(file_bytes=4)) == "file-too-large"


def shard(kit: Any, folder: Path, names: dict[str, str]) -> None:
    """Write q_proj's A and B into two shards and an index that maps keys to ``names``."""
    tensors = kit.pair()
    (folder / "adapter_config.json").write_bytes(kit.config())
    for number, (key, value) in enumerate(tensors.items()):
        (folder / f"part-{number}.safetensors").write_bytes(kit.file({key: value}))
    index = {"metadata": {}, "weight_map": names}
    (folder / "adapter_model.safetensors.index.json").write_text(json.dumps(index))


def test_shards(kit: Any, tmp_path: Path) -> None:
    a, b = kit.pair()
    shard(kit, tmp_path, {b: "part-1.safetensors", a: "part-0.safetensors"})
    raw = read(tmp_path)
    assert [t.key for t in parse_shards(raw.shards, LIMITS)] == [a, b]
    sizes = [part.nbytes for part in raw.shards]
    assert sum(sizes) - 1 > max(sizes)
    assert dir_refused(tmp_path, FileLimits(file_bytes=sum(sizes) - 1)) == "file-too-large"
    assert dir_refused(tmp_path, FileLimits(shards=1)) == "bad-index"
    with pytest.raises(RejectError) as caught:
        parse_shards(raw.shards, FileLimits(tensors=1))
    assert caught.value.code == "too-many-tensors"
    with pytest.raises(RejectError) as caught:
        parse_shards((raw.shards[0], raw.shards[0]), LIMITS)
    assert (caught.value.code, caught.value.subject) == ("duplicate-tensor", a)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("../part-0.safetensors", "file-escapes-directory"),
        ("/etc/part.safetensors", "file-escapes-directory"),
        ("sub/part-0.safetensors", "file-escapes-directory"),
        ("..\\part-0.safetensors", "file-escapes-directory"),
        ("adapter_model.bin", "bad-index"),
        (3, "bad-index"),
        ("gone.safetensors", "adapter-unreadable"),
    ],
)
def test_shard_names(kit: Any, tmp_path: Path, name: Any, code: str) -> None:
    shard(kit, tmp_path, {"x": name})
    assert dir_refused(tmp_path) == code


@pytest.mark.parametrize("text", ["{}", "[]", "{", '{"weight_map": []}', '{"weight_map": {}}'])
def test_bad_index(kit: Any, tmp_path: Path, text: str) -> None:
    shard(kit, tmp_path, {"x": "part-0.safetensors"})
    (tmp_path / "adapter_model.safetensors.index.json").write_text(text)
    assert dir_refused(tmp_path) == "bad-index"


def test_an_index_that_a_shard_does_not_bear_out(kit: Any, tmp_path: Path) -> None:
    """A part lost on the way, or a part nobody asked for: never half an adapter."""
    a, b = kit.pair()
    whole = {a: "part-0.safetensors", b: "part-1.safetensors"}
    for names in (
        whole | {a.replace("layers.0", "layers.1"): "part-0.safetensors"},
        {a: "part-0.safetensors", "other": "part-1.safetensors"},
        {a: "part-1.safetensors", b: "part-0.safetensors"},
    ):
        shard(kit, tmp_path, names)
        assert dir_refused(tmp_path) == "bad-index"
    shard(kit, tmp_path, whole)
    assert len(read(tmp_path).shards) == 2


def test_unreadable_is_not_the_adapters_fault(kit: Any, tmp_path: Path) -> None:
    with pytest.raises(StagingError):
        read(tmp_path / "nowhere")
