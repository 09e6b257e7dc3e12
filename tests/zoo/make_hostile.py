"""Makes the hostile part of the zoo: adapters that are damaged, or pretend to be something else.

Run with any Python, after make_zoo.py: ``python tests/zoo/make_hostile.py``. Each is the plain
llama adapter of the zoo with one thing wrong; ``zoo.json`` says under which code it is refused.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT, PLAIN = HERE / "hostile", HERE / "llama" / "plain"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def parts() -> tuple[dict[str, Any], bytes]:
    raw = (PLAIN / WEIGHTS).read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def joined(header: dict[str, Any] | bytes, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def patched(value: bytes) -> bytes:
    """The plain file with one float32 of its data replaced."""
    header, data = parts()
    return joined(header, data[:400] + value + data[404:])


def changed(**fields: Any) -> bytes:
    """The plain file with fields of its first entry replaced."""
    header, data = parts()
    key = min(key for key in header if key != "__metadata__")
    header[key] = header[key] | fields
    return joined(header, data)


def zipped() -> bytes:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        archive.writestr(zipfile.ZipInfo("archive/data.pkl"), pickle.dumps({"lora": 1}, 2))
    return memory.getvalue()


def cases() -> dict[str, tuple[str, dict[str, bytes]]]:
    """Name -> (code, files that differ from the plain adapter's; an empty one is left out)."""
    header, data = parts()
    whole, config = (PLAIN / WEIGHTS).read_bytes(), (PLAIN / CONFIG).read_bytes()
    twice = json.dumps(header).encode()
    entry = twice[: twice.index(b"}", twice.index(b"}") + 1) + 1].split(b", ", 1)[1]
    return {
        "truncated": ("bad-safetensors", {WEIGHTS: whole[:-100]}),
        "cut_header": ("bad-safetensors", {WEIGHTS: whole[:60]}),
        "huge_header": ("bad-safetensors", {WEIGHTS: struct.pack("<Q", 1 << 62) + whole[8:]}),
        "overlapping": ("bad-safetensors", {WEIGHTS: changed(data_offsets=[4, 388])}),
        "past_the_end": ("bad-safetensors", {WEIGHTS: joined(header, data[:-8])}),
        "negative_shape": ("bad-safetensors", {WEIGHTS: changed(shape=[-2, -48])}),
        "wrong_dtype": ("unsupported-dtype", {WEIGHTS: changed(dtype="I32")}),
        "empty_shape": ("bad-safetensors", {WEIGHTS: changed(shape=[0])}),
        "nan": ("non-finite", {WEIGHTS: patched(struct.pack("<f", float("nan")))}),
        "infinite": ("non-finite", {WEIGHTS: patched(struct.pack("<f", float("-inf")))}),
        "zeros": ("no-effect", {WEIGHTS: joined(header, bytes(len(data)))}),
        "pickle_in_disguise": ("pickle-adapter", {WEIGHTS: pickle.dumps({"a": [1] * 9}, 4)}),
        "zip_in_disguise": ("pickle-adapter", {WEIGHTS: zipped()}),
        "pickle_only": ("pickle-adapter", {WEIGHTS: b"", "adapter_model.bin": zipped()}),
        "one_key_twice": (
            "duplicate-json-key",
            {WEIGHTS: joined(twice[:-1] + b", " + entry + b"}", data)},
        ),
        "config_key_twice": (
            "duplicate-json-key",
            {CONFIG: config.rstrip().removesuffix(b"}") + b', "r": 4}'},
        ),
        "config_not_json": ("bad-config", {CONFIG: config[:-20]}),
        "no_config": ("missing-config", {CONFIG: b""}),
        "no_weights": ("missing-weights", {WEIGHTS: b""}),
    }


def main() -> None:
    shutil.rmtree(ROOT, ignore_errors=True)
    entries = {}
    for name, (code, files) in cases().items():
        folder = ROOT / name
        folder.mkdir(parents=True)
        plain = {file: (PLAIN / file).read_bytes() for file in (CONFIG, WEIGHTS)}
        for file, content in (plain | files).items():
            if content:
                (folder / file).write_bytes(content)
        entries[name] = {"refused": code}
    outside = ROOT / "link_outside"
    outside.mkdir()
    (outside / CONFIG).write_bytes((PLAIN / CONFIG).read_bytes())
    os.symlink(f"../../llama/plain/{WEIGHTS}", outside / WEIGHTS)
    entries["link_outside"] = {"refused": "file-escapes-directory"}
    text = json.dumps({"adapters": entries}, indent=1, sort_keys=True)
    (ROOT / "zoo.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
