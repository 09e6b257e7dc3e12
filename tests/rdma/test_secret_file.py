"""Secrets are read from files alike at both ends: bounded, never cut short, refused by code."""

from __future__ import annotations

from pathlib import Path

import pytest

from rota.errors import RequestError
from rota.rdma.secret_file import MAX_SECRET, MIN_SECRET, read_secret
from rota.sched.serve.sources import Sources


@pytest.mark.parametrize("size", [MIN_SECRET, MAX_SECRET])
def test_white_space_around_a_secret_does_not_count(tmp_path: Path, size: int) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"s" * size + b"\n")
    assert read_secret(path) == b"s" * size


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "weak-secret"),
        (b" " * 40 + b"s" * (MIN_SECRET - 1) + b"\n", "weak-secret"),
        (b"s" * (MAX_SECRET + 1), "bad-secret-file"),
        (b"s" * MAX_SECRET + b"\nmore", "bad-secret-file"),
    ],
)
def test_a_secret_of_another_length_is_refused_at_both_ends(
    tmp_path: Path, content: bytes, code: str
) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    with pytest.raises(RequestError) as caught:
        read_secret(path)
    assert (caught.value.code, caught.value.subject) == (code, str(path))
    with pytest.raises(RequestError) as engine:
        Sources(str(path))
    assert engine.value.code == code


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError) as caught:
        read_secret(tmp_path / "secret")
    assert caught.value.code == "bad-secret-file"


def test_a_file_without_end_is_read_to_the_limit_only() -> None:
    with pytest.raises(RequestError) as caught:
        read_secret(Path("/dev/zero"))
    assert caught.value.code == "bad-secret-file"
