"""Kept code: the second start links instead of compiling, and doubtful code is never run."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rota.gpu.codecache import CodeCache

pytest.importorskip("numba", reason="kernels are compiled by numba, which is not installed")


def scaled_sum(tag: Any, out: int, count: int, factor: float) -> Any:
    total = 0.0
    for i in range(count):
        total += i * factor
    if total > 1e9:
        return -1
    return count


def kernel(store: CodeCache) -> Any:
    from rota.gpu.kernels.compiled import Compiled

    return Compiled(scaled_sum, store)


def test_the_second_start_does_not_compile(tmp_path: Path) -> None:
    store = CodeCache(tmp_path / "code")
    first = kernel(store)
    assert first(0, 0, 5, 2.0) == 5 and first(0.0, 0, 5, 1e9) == -1
    assert len(first.device.overloads) == 2
    second = kernel(store)
    assert second(0, 0, 5, 2.0) == 5 and second(0.0, 0, 5, 1e9) == -1
    assert not second.device.overloads, "linked from kept code"


MAY_RAISE = """
import sys
from pathlib import Path
from rota.gpu.codecache import CodeCache
from rota.gpu.kernels.compiled import Compiled
def steps(tag, count, step):
    total = 0
    for i in range(0, count, step):
        total += i
    return total
kernel = Compiled(steps, CodeCache(Path(sys.argv[1])))
assert kernel(0, 10, 3) == 18
try:
    kernel(0, 10, 0)
except ValueError:
    print(len(kernel.device.overloads))
"""


def test_kept_code_that_may_raise_runs_in_a_process_that_compiled_nothing(tmp_path: Path) -> None:
    for compiled in (1, 0):
        command = [sys.executable, "-P", "-c", MAY_RAISE, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, f"{compiled}\n"), done.stderr


@pytest.mark.parametrize("damage", ["cut", "flip", "other"])
def test_damaged_code_is_made_anew(tmp_path: Path, damage: str, caplog: Any) -> None:
    store = CodeCache(tmp_path)
    assert kernel(store)(0, 0, 3, 1.0) == 3
    [entry] = tmp_path.iterdir()
    raw = bytearray(entry.read_bytes())
    if damage == "flip":
        raw[-1] ^= 1
    entry.write_bytes(bytes(raw[: len(raw) // 2]) if damage == "cut" else bytes(raw))
    if damage == "other":
        entry.write_bytes(b"not ours")
    again = kernel(store)
    with caplog.at_level(logging.WARNING, "rota.gpu"):
        assert again(0, 0, 3, 1.0) == 3
    assert again.device.overloads and "damaged" in caplog.text


def test_whole_but_foreign_content_is_made_anew(tmp_path: Path, caplog: Any) -> None:
    store = CodeCache(tmp_path)
    kernel(store)(0, 0, 3, 1.0)
    [entry] = tmp_path.iterdir()
    store.write(entry.name, b"a whole entry that holds no code")
    again = kernel(store)
    with caplog.at_level(logging.WARNING, "rota.gpu"):
        assert again(0, 0, 3, 1.0) == 3
    assert again.device.overloads and "cannot be loaded" in caplog.text


def test_a_folder_others_may_write_is_not_believed(tmp_path: Path) -> None:
    store = CodeCache(tmp_path)
    store.write("x", b"body")
    assert store.read("x") == b"body"
    tmp_path.chmod(0o777)
    assert store.read("x") is None
    store.write("y", b"body")
    assert not (tmp_path / "y").exists()


def test_a_cache_that_cannot_be_written_costs_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert kernel(CodeCache(tmp_path / "file" / "code"))(0, 0, 4, 1.0) == 4
    assert kernel(CodeCache(None))(0, 0, 4, 1.0) == 4


def test_kept_code_gives_equal_bits(tmp_path: Path) -> None:
    from rota.gpu.kernels import norm
    from rota.gpu.kernels.compiled import Compiled

    source = getattr(norm.rms_norm_kernel, "_function", None) or norm.rms_norm_kernel.py_func
    x = np.random.default_rng(0).standard_normal((3, 40)).astype(np.float32)
    weight = np.linspace(0.5, 1.5, 40, dtype=np.float32)
    results = []
    for _ in range(2):
        out = np.zeros_like(x)
        run = Compiled(source, CodeCache(tmp_path))
        args = (0, 0, x.ctypes.data, 40, 0, 0, weight.ctypes.data, 1e-5, out.ctypes.data, 40, 3, 40)
        run(0.0, *args)
        results.append(out)
    assert np.array_equal(results[0], results[1]) and results[0].any()


def test_compiling_is_told_once(tmp_path: Path, caplog: Any) -> None:
    from rota.gpu.kernels import compiled

    compiled._say_compiling.cache_clear()
    with caplog.at_level(logging.INFO, "rota.gpu"):
        for folder in ("one", "two", "one"):
            kernel(CodeCache(tmp_path / folder))(0, 0, 5, 2.0)
    assert [r.message.split(",")[0] for r in caplog.records] == ["compiling kernels"]
