"""What staging saw is remembered, newest first, of so many names, until they are unloaded."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from rota.sched import seen
from rota.sched.seen import Seen, StagedReport


@dataclass
class Staged:
    digest: str
    image: None = None
    report: None = None


def test_the_newest_of_each_name_is_told_and_the_oldest_name_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(seen, "KEPT", 3)
    told = Seen()
    for name in ("a", "b", "c", "a", "d"):
        told.note(name, Staged(f"{name}1"))
    assert told.of("b") is None, "staged longest ago"
    assert [told.of(name) for name in "acd"] == [StagedReport(f"{n}1", None) for n in "acd"]
    told.note("a", Staged("a2"))
    assert told.of("a") == StagedReport("a2", None)
    told.forget("a")
    told.forget("nobody")
    told.forget(None)
    assert told.of("a") is None and told.of("c") is not None
