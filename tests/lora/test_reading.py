"""How files are read: what a call of the system may take in at once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rota.gpu.lora.directory import READ_BYTES
from rota.gpu.lora.safefile import FileLimits
from rota.gpu.lora.source import DirectorySource


def test_large_files_are_read_a_piece_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for a core until a whole file is copied."""
    size = 3 * READ_BYTES + 5
    header = json.dumps({"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    data = np.random.default_rng(0).integers(0, 255, size, np.uint8).tobytes()
    file = len(header).to_bytes(8, "little") + header + data
    (tmp_path / "adapter_model.safetensors").write_bytes(file)
    (tmp_path / "adapter_config.json").write_text("{}")
    asked: list[int] = []
    readv = os.readv

    def noted(handle: int, buffers: Any) -> int:
        asked.append(sum(len(room) for room in buffers))
        return readv(handle, buffers)

    monkeypatch.setattr(os, "readv", noted)
    raw = DirectorySource(tmp_path).read(FileLimits())
    assert raw.shards[0].tobytes() == file
    assert max(asked) == READ_BYTES and len(asked) >= 4
