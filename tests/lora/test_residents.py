"""Who is to come back in another arena finds a place there, or is named."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from rota.errors import CommandError
from rota.gpu.lora.annex import check_residents


@dataclass
class One:
    name: str
    pinned: bool
    slot: int = 0


THREE = (One("a", True), One("b", False), One("c", True))


def test_those_that_are_not_pinned_need_a_place_only_alone() -> None:
    check_residents(THREE, (256, 512, 256), 512)
    check_residents(THREE, (0, 0, 0), 0)


@pytest.mark.parametrize(
    ("needs", "code", "subject", "least"),
    [
        ((256, 768, 256), "resident-annex-too-large", "b", 768),
        ((768, 0, 0), "resident-annex-too-large", "a", 768),
        ((256, 512, 512), "pinned-annexes-do-not-fit", "a: 256, c: 512", 768),
    ],
)
def test_who_finds_no_place_is_named_with_its_bytes(
    needs: tuple[int, ...], code: str, subject: str, least: int
) -> None:
    with pytest.raises(CommandError) as caught:
        check_residents(THREE, needs, 512)
    assert (caught.value.code, caught.value.subject) == (code, subject)
    assert caught.value.expected == f"an arena of at least {least} bytes"
    assert caught.value.found == "512 bytes"
