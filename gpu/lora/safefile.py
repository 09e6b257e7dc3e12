"""Reading safetensors safely and fast: one read per file, then numpy views, no copy per tensor.

What it owns: the rules of the file format (8-byte little-endian header length, JSON header, data
tiled by the tensors without gap or overlap) and the rules of the directory (plain files inside it,
never pickle). Invariants: no byte outside the file is ever addressed; every tensor's length equals
its shape times its dtype's size; a directory is read through one file descriptor per file.
Format: https://github.com/huggingface/safetensors (README, "Format").
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import RejectError, StagingError
from .strictjson import loads_object

CONFIG_NAME = "adapter_config.json"
FILE_NAME = "adapter_model.safetensors"
INDEX_NAME = "adapter_model.safetensors.index.json"
MLX_NAME = "adapters.safetensors"
PICKLE_NAMES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
"""Bytes per element of every dtype an adapter may be stored in."""
MAX_DIMS = 8


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


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """One tensor: bytes ``begin`` to ``end`` of ``block``, the data part of its file (uint8)."""

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


def check_sizes(config_bytes: int, file_bytes: int, limits: FileLimits) -> None:
    """Refuse bytes over the limits. Raises RejectError config-too-large, file-too-large."""
    if config_bytes > limits.config_bytes:
        raise _too_large("config-too-large", CONFIG_NAME, limits.config_bytes, config_bytes)
    if file_bytes > limits.file_bytes:
        raise _too_large("file-too-large", FILE_NAME, limits.file_bytes, file_bytes)


def read_directory(
    path: Path, limits: FileLimits, *, follow_links: bool = False
) -> tuple[bytes, tuple[npt.NDArray[np.uint8], ...]]:
    """The config bytes and every safetensors file (uint8 arrays, by file name) of a directory.

    ``follow_links``: a file may be a link to a plain file elsewhere.

    Raises:
        RejectError: missing-config, missing-weights, pickle-adapter, file-escapes-directory,
            not-a-plain-file, config-too-large, file-too-large, bad-index, duplicate-json-key.
        StagingError: adapter-unreadable, when the system refuses a read.
    """
    try:
        root = path.resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links; a NUL in the path
        raise _unreadable(path.name, error) from error
    if not root.is_dir():
        raise StagingError(
            "the adapter path is not a directory", code="adapter-unreadable", subject=path.name
        )
    # What there is to read is decided before anything is read: a pickle is never opened.
    every = (CONFIG_NAME, FILE_NAME, INDEX_NAME, MLX_NAME)
    present = {name for name in every if _exists(root / name)}
    if not present - {CONFIG_NAME}:
        pickled = [name for name in PICKLE_NAMES if _exists(root / name)]
        if pickled:
            raise RejectError(
                "the adapter exists only as a pickle, which is never opened;"
                " save it as safetensors",
                code="pickle-adapter",
                subject=pickled[0],
                expected=FILE_NAME,
                found=pickled[0],
            )
        raise RejectError(
            "the directory holds no adapter weights", code="missing-weights", expected=FILE_NAME
        )
    if CONFIG_NAME not in present:
        raise RejectError(
            "the directory holds no adapter config", code="missing-config", expected=CONFIG_NAME
        )
    config = _read(
        root, CONFIG_NAME, limits.config_bytes, "config-too-large", follow_links
    ).tobytes()
    index: dict[str, set[str]] = {}
    names = [FILE_NAME if FILE_NAME in present else MLX_NAME]
    if FILE_NAME not in present and INDEX_NAME in present:
        raw = _read(root, INDEX_NAME, limits.index_bytes, "file-too-large", follow_links)
        index = _shard_names(raw.tobytes(), limits)
        names = sorted(index)
    shards, left = [], limits.file_bytes
    for name in names:
        shards.append(_read(root, name, left, "file-too-large", follow_links))
        left -= shards[-1].nbytes
        if index:
            _check_index(name, index[name], _header(shards[-1], limits)[0].keys())
    return config, tuple(shards)


def _exists(path: Path) -> bool:
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _unreadable(path.name, error) from error
    return True


def _check_index(name: str, listed: set[str], held: Collection[str]) -> None:
    """A shard holds exactly what the index says, or a part of the adapter is elsewhere."""
    odd = sorted(listed.symmetric_difference(set(held) - {"__metadata__"}))
    if odd:
        raise RejectError(
            "the index and a shard disagree on what the shard holds",
            code="bad-index",
            subject=odd[0][:300],
            expected=f"in {name}" if odd[0] in listed else f"not in {name}",
            found=f"{len(odd)} such tensors",
        )


def _shard_names(raw: bytes, limits: FileLimits) -> dict[str, set[str]]:
    """File name -> its tensors, of an index; each must be a bare name in the same directory."""
    index = loads_object(raw, code="bad-index", subject=INDEX_NAME)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise RejectError("the index has no weight_map", code="bad-index", subject=INDEX_NAME)
    names: dict[str, set[str]] = {}
    for key, name in weight_map.items():
        if not isinstance(name, str) or not name.endswith(".safetensors"):
            raise RejectError(
                "the index names a file that is not safetensors",
                code="bad-index",
                subject=key[:200],
                found=repr(name)[:200],
            )
        if os.path.basename(name) != name or "\\" in name or "\0" in name:
            raise RejectError(
                "the index names a file outside the adapter directory",
                code="file-escapes-directory",
                subject=name[:200],
                expected="a bare file name",
            )
        names.setdefault(name, set()).add(key)
    if len(names) > limits.shards:
        raise RejectError(
            "too many shards",
            code="bad-index",
            subject=INDEX_NAME,
            expected=f"at most {limits.shards}",
            found=len(names),
        )
    return names


def _read(
    root: Path, name: str, limit: int, code: str, follow_links: bool
) -> npt.NDArray[np.uint8]:
    """Whole file ``name`` of ``root`` in one buffer. ``root`` is already resolved."""
    try:
        real = (root / name).resolve(strict=True)
        if not follow_links and root not in real.parents:
            raise RejectError(
                "a link leads outside the adapter directory",
                code="file-escapes-directory",
                subject=name,
            )
        # O_NOFOLLOW on the resolved path: a link put there since then is refused, not followed.
        # O_NONBLOCK: opening a FIFO must not wait for a writer.
        handle = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, RuntimeError, ValueError) as error:
        raise _unreadable(name, error) from error
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise RejectError("not a plain file", code="not-a-plain-file", subject=name)
        if status.st_size > limit:
            raise _too_large(code, name, limit, status.st_size)
        buffer = np.empty(status.st_size, np.uint8)
        view, filled = buffer.data, 0
        while filled < status.st_size:
            count = os.readv(handle, [view[filled:]])
            if count == 0:
                raise StagingError(
                    "the file shrank while it was read",
                    code="adapter-unreadable",
                    subject=name,
                    expected=status.st_size,
                    found=filled,
                )
            filled += count
    except OSError as error:
        raise _unreadable(name, error) from error
    finally:
        os.close(handle)
    return buffer


def _unreadable(name: str, error: BaseException) -> StagingError:
    reason = error.strerror if isinstance(error, OSError) else None
    return StagingError(
        f"cannot read the adapter: {reason or type(error).__name__}",
        code="adapter-unreadable",
        subject=name,
    )


def _too_large(code: str, name: str, limit: int, size: int) -> RejectError:
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
        **facts,  # type: ignore[arg-type]
    )


def _header(file: npt.NDArray[np.uint8], limits: FileLimits) -> tuple[dict[str, Any], int]:
    """The header object and where the data starts."""
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
    return loads_object(raw, code="bad-safetensors", subject=FILE_NAME), 8 + length


def _parse(file: npt.NDArray[np.uint8], limits: FileLimits, allowed: int) -> list[Tensor]:
    header, start = _header(file, limits)
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
    entries: list[tuple[int, int, str, str, tuple[int, ...]]] = []
    for key, entry in header.items():
        if len(key) > limits.key_chars:
            raise RejectError(
                "a tensor key is too long",
                code="key-too-long",
                subject=key[:200],
                expected=f"at most {limits.key_chars} characters",
                found=len(key),
            )
        begin, end, dtype, shape = _entry(key, entry)
        entries.append((begin, end, key, dtype, shape))
    entries.sort()
    data = file[start:]
    place, tensors = 0, []
    for begin, end, key, dtype, shape in entries:
        if begin != place:
            raise _bad(
                "tensors overlap or leave a hole", key, expected=f"start {place}", found=begin
            )
        if end > data.nbytes:
            raise _bad(
                "a tensor reaches past the end of the file (truncated?)",
                key,
                expected=f"at most {data.nbytes}",
                found=end,
            )
        tensors.append(Tensor(key, dtype, shape, data, begin, end))
        place = end
    if place != data.nbytes:
        raise _bad("bytes after the last tensor", expected=place, found=data.nbytes)
    return tensors


def _entry(key: str, entry: Any) -> tuple[int, int, str, tuple[int, ...]]:
    """(begin, end, dtype, shape) of one header entry, checked for itself."""
    if type(entry) is not dict or len(entry) != 3:
        raise _bad("an entry is not {dtype, shape, data_offsets}", key)
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if type(shape) is not list or type(offsets) is not list or type(dtype) is not str:
        raise _bad("an entry is not {dtype, shape, data_offsets}", key)
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
        if type(extent) is not int or extent < 0:
            raise _bad("a shape entry is not a non-negative integer", key, found=repr(extent)[:40])
        size *= extent
    begin, end = offsets
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end:
        raise _bad("offsets are not 0 <= begin <= end", key, found=repr(offsets)[:80])
    if end - begin != size:
        raise _bad("shape times dtype is not the length", key, expected=size, found=end - begin)
    return begin, end, dtype, tuple(shape)
