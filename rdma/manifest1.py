"""The JSON manifest of the version-1 peer protocol.

What it owns: nothing. Invariant: a parsed manifest is checked in itself: every span lies inside its
shard, every number and list is bounded.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ..errors import WireError


@dataclass(frozen=True, slots=True)
class Tensor1:
    """One tensor of a version-1 manifest; ``offset`` is from the start of its shard file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int
    shard: int
    extra: bool = False


@dataclass(frozen=True, slots=True)
class Manifest1:
    """What a version-1 server says of a model: its shard files and the tensors in them."""

    model_id: str
    shard_files: tuple[str, ...]
    shard_lens: tuple[int, ...]
    tensors: tuple[Tensor1, ...]

    def to_json(self) -> bytes:
        """The manifest as it travels."""
        return json.dumps(
            {
                "version": 1,
                "model_id": self.model_id,
                "shard_files": list(self.shard_files),
                "shard_lens": list(self.shard_lens),
                "tensors": [
                    {
                        "name": t.name,
                        "dtype": t.dtype,
                        "shape": list(t.shape),
                        "offset_in_shard": t.offset,
                        "len": t.length,
                        "shard_index": t.shard,
                        "extra": t.extra,
                    }
                    for t in self.tensors
                ],
            },
            separators=(",", ":"),
        ).encode()


def _bad(why: str, expected: object = None, found: object = None) -> WireError:
    return WireError(why, code="wire1-bad-manifest", expected=expected, found=found)


def _int(value: Any, name: str, limit: int) -> int:
    if type(value) is not int or not 0 <= value <= limit:
        raise _bad(f"{name} is out of range", f"0..{limit}", repr(value)[:40])
    return value


def _list(value: Any, name: str, limit: int) -> list[Any]:
    if type(value) is not list or len(value) > limit:
        raise _bad(f"{name} is not a list of at most {limit}")
    return value


def _text(value: Any, name: str) -> str:
    if type(value) is not str or len(value) > 4096:
        raise _bad(f"{name} is not a string of at most 4096 characters")
    return value


def parse_manifest(raw: bytes, *, max_tensors: int = 100_000) -> Manifest1:
    """Read and check a manifest: every span lies inside its shard.

    Raises:
        WireError: wire1-bad-manifest.
    """
    try:
        top = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise _bad("the manifest is not JSON", found=type(error).__name__) from None
    if type(top) is not dict or type(top.get("version")) is not int or top["version"] != 1:
        raise _bad("not a version-1 manifest", 1, repr(top)[:40])
    files = [_text(f, "shard_files") for f in _list(top.get("shard_files"), "shard_files", 4096)]
    lens = [
        _int(n, "shard_lens", 1 << 48) for n in _list(top.get("shard_lens"), "shard_lens", 4096)
    ]
    if len(files) != len(lens):
        raise _bad("shard_files and shard_lens differ in number", len(files), len(lens))
    tensors = []
    for entry in _list(top.get("tensors"), "tensors", max_tensors):
        if type(entry) is not dict:
            raise _bad("a tensor is not an object")
        shape = _list(entry.get("shape"), "shape", 8)
        extra = entry.get("extra", False)
        if type(extra) is not bool:
            raise _bad("extra is not true or false")
        tensor = Tensor1(
            name=_text(entry.get("name"), "name"),
            dtype=_text(entry.get("dtype"), "dtype"),
            shape=tuple(_int(n, "shape", 1 << 48) for n in shape),
            offset=_int(entry.get("offset_in_shard"), "offset_in_shard", 1 << 48),
            length=_int(entry.get("len"), "len", 1 << 48),
            shard=_int(entry.get("shard_index"), "shard_index", 4095),
            extra=extra,
        )
        if tensor.shard >= len(lens) or tensor.offset + tensor.length > lens[tensor.shard]:
            raise _bad("a tensor reaches past its shard", found=tensor.name[:80])
        tensors.append(tensor)
    return Manifest1(
        _text(top.get("model_id"), "model_id"), tuple(files), tuple(lens), tuple(tensors)
    )
