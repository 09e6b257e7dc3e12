"""Adapter identity against published FNV-1a vectors and by its own rules."""

from __future__ import annotations

import pytest

from rota.sched.core import BASE_ID, adapter_id


@pytest.mark.parametrize(
    ("name", "generation", "expected"),
    [
        ("demo", 0, 0xA5E41B674276D396),
        ("demo", 1, 0xF870E4085A73EC77),
        ("vega", 0, 0x66FDEA01023FF308),
        ("a", 0, 0xAF63DC4C8601EC8C),
    ],
)
def test_vectors(name: str, generation: int, expected: int) -> None:
    assert adapter_id(name, generation) == expected


def test_a_version_is_never_base_and_generations_differ() -> None:
    ids = {adapter_id(name, g) for name in ("x", "y", "org/a@v1", "org/a:b") for g in range(50)}
    assert len(ids) == 200 and BASE_ID not in ids
