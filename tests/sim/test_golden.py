"""Golden traces: the stories, byte for byte. Re-record: ``python -m rota.sched.sim.golden DIR``."""

from __future__ import annotations

from pathlib import Path

import pytest

from rota.sched.sim.golden import SCENARIOS, main, story_of

GOLDEN = Path(__file__).with_name("golden")


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_story_has_not_changed(name: str) -> None:
    assert story_of(SCENARIOS[name]) == (GOLDEN / f"{name}.trace").read_text()


def test_every_golden_file_has_its_story_and_recording_writes_them(tmp_path: Path) -> None:
    assert {p.stem for p in GOLDEN.glob("*.trace")} == set(SCENARIOS)
    assert main([str(tmp_path)]) == 0
    for path in GOLDEN.glob("*.trace"):
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()
    assert main([]) == 2
