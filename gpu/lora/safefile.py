"""Parsing safetensors safely and fast: numpy views over a file's bytes, no copy per tensor.

What it owns: the rules of the file format (8-byte little-endian header length, JSON header, data
tiled by the tensors without gap or overlap), file names and limits. Invariants: no byte outside the
file is ever addressed; every tensor's length equals its shape times its dtype's size.
Format: https://github.com/huggingface/safetensors (README, "Format").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from ...errors import RejectError
from .strictjson import loads_object

CONFIG_NAME = "adapter_config.json"
FILE_NAME = "adapter_model.safetensors"
INDEX_NAME = "adapter_model.safetensors.index.json"
MLX_NAME = "adapters.safetensors"
PICKLE_NAMES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
"""Bytes per element of every dtype an adapter may be stored in."""
MAX_DIMS = 8
MAX_EXTENT = (1 << 63) - 1
"""Of a dimension or an offset: what is larger cannot be, and may have too many digits to name."""


@dataclass(frozen=True, slots=True)
class FileLimits:
    """Bounds on what will be read, in bytes unless said otherwise."""

    config_bytes: int = 1 << 20
    index_bytes: int = 16 << 20
    header_bytes: int = 16 << 20
    file_bytes: int = 16 << 30
    tensors: int = 100_000
    shards: int = 64
    key_chars: int = 1024


class Tensor(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One tensor: bytes ``begin`` to ``end`` of ``block``, the data part of its file (uint8).

    Nothing it holds can lead back to it, so the garbage collector need not look at the thousands
    that a large adapter has (``gc=False``).
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    block: npt.NDArray[np.uint8]
    begin: int
    end: int

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """The tensor's bytes, uint8 ``[end - begin]``, a view."""
        return self.block[self.begin : self.end]


class Span(
    msgspec.Struct, frozen=True, eq=False, gc=False, array_like=True, forbid_unknown_fields=True
):
    """Offsets of a tensor, in bytes from the start of the data."""

    begin: int
    end: int


class Entry(msgspec.Struct, eq=False, gc=False, forbid_unknown_fields=True):
    """What a header says of one tensor: of the right form, and otherwise not checked."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: Span


_HEADER: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRY: Final = msgspec.json.Decoder(Entry)
_METADATA: Final = msgspec.json.Decoder(dict[str, str] | None)


def check_sizes(config_bytes: int, file_bytes: int, limits: FileLimits) -> None:
    """Refuse bytes over the limits. Raises RejectError config-too-large, file-too-large."""
    if config_bytes > limits.config_bytes:
        raise too_large("config-too-large", CONFIG_NAME, limits.config_bytes, config_bytes)
    if file_bytes > limits.file_bytes:
        raise too_large("file-too-large", FILE_NAME, limits.file_bytes, file_bytes)


def too_large(code: str, name: str, limit: int, size: int) -> RejectError:
    """The refusal of a file over its limit (bytes)."""
    return RejectError(
        "larger than the limit",
        code=code,
        subject=name,
        expected=f"at most {limit} bytes",
        found=size,
    )


def parse_shards(shards: tuple[npt.NDArray[np.uint8], ...], limits: FileLimits) -> list[Tensor]:
    """Every tensor of the files, in the order of their data.

    Raises:
        RejectError: bad-safetensors (header, offsets), pickle-adapter (a zip or pickle under a
            safetensors name), duplicate-json-key, duplicate-tensor (one key in two shards),
            unsupported-dtype, too-many-tensors, key-too-long.
    """
    if len(shards) == 1:
        return _parse(shards[0], limits, limits.tensors)
    tensors: list[Tensor] = []
    seen: set[str] = set()
    for shard in shards:
        for tensor in _parse(shard, limits, limits.tensors - len(tensors)):
            if tensor.key in seen:
                raise RejectError(
                    "two shards hold the same tensor",
                    code="duplicate-tensor",
                    subject=tensor.key,
                )
            seen.add(tensor.key)
            tensors.append(tensor)
    return tensors


def _bad(why: str, subject: str = FILE_NAME, **facts: object) -> RejectError:
    return RejectError(
        why,
        code="bad-safetensors",
        subject=subject[:200],
        **facts,  # type: ignore[arg-type]  # an error checks its own fields
    )


def parse_header(file: npt.NDArray[np.uint8], limits: FileLimits) -> tuple[dict[str, Any], int]:
    """The header of a file (uint8 ``[size]``) and where its data starts.

    Each value is an `Entry`, or what stands there if the header had to be read strictly; that of
    ``__metadata__`` is a map of strings, ``None`` or, read strictly, what stands there.

    Raises:
        RejectError: bad-safetensors, pickle-adapter, duplicate-json-key.
    """
    start = file[:8].tobytes()
    if start[:4] == b"PK\x03\x04" or (start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05"):
        # 0x80 0x02.. as a length would be a header of 640 bytes or more whose high bytes are text.
        if start[:4] == b"PK\x03\x04" or int.from_bytes(start, "little") > file.nbytes - 8:
            raise RejectError(
                "a zip archive or pickle under a safetensors name; it is never opened",
                code="pickle-adapter",
                subject=FILE_NAME,
            )
    if file.nbytes < 10:
        raise _bad("the file is too short for a header", found=file.nbytes)
    length = int.from_bytes(start, "little")
    if length > limits.header_bytes:
        raise _bad(
            "the header is larger than the limit",
            expected=f"at most {limits.header_bytes} bytes",
            found=length,
        )
    if length < 2 or length > file.nbytes - 8:
        raise _bad(
            "the header does not fit in the file (truncated?)",
            expected=f"2..{file.nbytes - 8} bytes",
            found=length,
        )
    raw = file[8 : 8 + length].tobytes()
    if raw[:1] != b"{":
        raise _bad("the header does not begin with '{'")
    header = _quickly(raw)
    if header is None:
        header = loads_object(raw, code="bad-safetensors", subject=FILE_NAME)
    return header, 8 + length


def _quickly(raw: bytes) -> dict[str, Any] | None:
    """The entries of a header, and its metadata, if it is well formed; ``None`` if it needs a
    closer look.

    Entry by entry, so that a thread that waits for the interpreter gets it in between.
    """
    if b"\\" in raw:  # two readers may differ in what they make of an escape
        return None
    header: dict[str, Any] = {}
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
    try:
        found = _HEADER.decode(raw)
        # Of an entry its key, those of its three fields, and the dtype; of the metadata, which may
        # be null, its key and its own. The text of one with a key that came twice has more.
        strings = 5 * len(found)
        if "__metadata__" in found:
            metadata = header["__metadata__"] = _METADATA.decode(found.pop("__metadata__"))
            strings += 2 * len(metadata or ()) - 4
        if raw.count(b'"') != 2 * strings:
            return None
        for key, text in found.items():
            header[key] = entry = _ENTRY.decode(text)
            shape = entry.shape
            entry.shape = shapes.setdefault(shape, shape)  # one object: a large adapter has few
    except (msgspec.DecodeError, RecursionError):
        return None
    return header


def _parse(file: npt.NDArray[np.uint8], limits: FileLimits, allowed: int) -> list[Tensor]:
    header, start = parse_header(file, limits)
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    ):
        raise _bad("the metadata is not a map of strings", "__metadata__")
    if len(header) > allowed:
        raise RejectError(
            "too many tensors",
            code="too-many-tensors",
            expected=f"at most {limits.tensors}",
            found=f"more than {allowed}" if allowed < limits.tensors else len(header),
        )
    data, tensors = file[start:], list[Tensor]()
    place, tiled = 0, True
    for key, found in header.items():
        if len(key) > limits.key_chars:
            raise RejectError(
                "a tensor key is too long",
                code="key-too-long",
                subject=key[:200],
                expected=f"at most {limits.key_chars} characters",
                found=len(key),
            )
        tensor = _tensor(key, found, data)
        tensors.append(tensor)
        tiled = tiled and place == tensor.begin < tensor.end
        place = tensor.end
    if not tiled or place != data.nbytes:
        tensors.sort(key=lambda tensor: (tensor.begin, tensor.end, tensor.key))
        _check_tiled(tensors, data.nbytes)
    return tensors


def _check_tiled(tensors: list[Tensor], nbytes: int) -> None:
    place = 0
    for tensor in tensors:
        if tensor.begin != place:
            raise _bad(
                "tensors overlap or leave a hole",
                tensor.key,
                expected=f"start {place}",
                found=tensor.begin,
            )
        if tensor.end > nbytes:
            raise _bad(
                "a tensor reaches past the end of the file (truncated?)",
                tensor.key,
                expected=f"at most {nbytes}",
                found=tensor.end,
            )
        place = tensor.end
    if place != nbytes:
        raise _bad("bytes after the last tensor", expected=place, found=nbytes)


def _fields(key: str, found: object) -> tuple[str, tuple[Any, ...], list[Any]]:
    """(dtype, shape, offsets) of one header entry, however it was read."""
    if type(found) is Entry:
        span = found.data_offsets
        return found.dtype, found.shape, [span.begin, span.end]
    if type(found) is dict and len(found) == 3:
        dtype, shape, offsets = found.get("dtype"), found.get("shape"), found.get("data_offsets")
        if type(shape) is list and type(offsets) is list and type(dtype) is str:
            return dtype, tuple(shape), offsets
    raise _bad("an entry is not {dtype, shape, data_offsets}", key)


def _tensor(key: str, found: object, data: npt.NDArray[np.uint8]) -> Tensor:
    """The tensor of one header entry, checked for itself."""
    dtype, shape, offsets = _fields(key, found)
    item = ITEM_BYTES.get(dtype)
    if item is None:
        raise RejectError(
            "a dtype no adapter is served in",
            code="unsupported-dtype",
            subject=key[:200],
            expected=" ".join(ITEM_BYTES),
            found=dtype[:40],
        )
    if len(shape) > MAX_DIMS or len(offsets) != 2:
        raise _bad("too many dimensions, or not two offsets", key)
    size = item
    for extent in shape:
        if type(extent) is not int or not 0 <= extent <= MAX_EXTENT:
            raise _bad("a shape entry is not a non-negative integer", key, found=repr(extent)[:40])
        size *= extent
    begin, end = offsets
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end <= MAX_EXTENT:
        raise _bad("offsets are not 0 <= begin <= end", key, found=repr(offsets)[:80])
    if end - begin != size:
        raise _bad("shape times dtype is not the length", key, expected=size, found=end - begin)
    return Tensor(key, dtype, shape, data, begin, end)
