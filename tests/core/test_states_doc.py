"""docs/states.md is what the tables say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from rota.sched.core.tables import SLOT_TABLE, SlotState

ROOT = Path(__file__).resolve().parents[2]


def _tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_states", ROOT / "tools/make_states.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_state_diagrams_are_those_of_the_tables() -> None:
    tool = _tool()
    assert (ROOT / "docs" / "states.md").read_text() == tool.document(), (
        "run: python tools/make_states.py"
    )
    assert tool.main(["--check"]) == 0


def test_a_changed_table_is_a_changed_document() -> None:
    tool = _tool()
    fewer = dict(list(SLOT_TABLE.items())[1:])
    drawn = tool.diagram("Slot", SlotState.EMPTY, SLOT_TABLE)
    assert tool.diagram("Slot", SlotState.EMPTY, fewer) != drawn
    assert "EMPTY --> STAGING: choose" in drawn and "| READY | lease | IN_USE |" in drawn
