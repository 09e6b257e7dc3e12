"""A dozen short stories with a known course, as text: ``python -m rota.sched.sim.golden DIR``
writes them anew. A change of layout must leave them byte for byte; a change of policy re-records
them in a commit of its own.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core import CoreConfig
from ..replay.story import Story
from .scenario import Action, Ask, Do, Fault, Scenario, Shut, SourceSpec
from .world import run_scenario


def _source(content: str, seconds: float = 0.05, error: str = "", annex: int = 0) -> SourceSpec:
    return SourceSpec(content, seconds, error, annex=annex)


def _do(at: float, verb: str, name: str | None, content: str | None = None, **more: Any) -> Do:
    seconds, error = more.pop("seconds", 0.05), more.pop("error", "")
    annex = more.pop("annex", 0)
    source = None if content is None else _source(content, seconds, error, annex)
    return Do(at, verb, name, source, **more)


def _scenario(
    *actions: Action, faults: tuple[Fault, ...] = (), slots: int = 2, **config: Any
) -> Scenario:
    settings: dict[str, Any] = {"num_blocks": 64, "max_context": 160, **config}
    made = CoreConfig(max_loras=slots, **settings)
    return Scenario(0, "golden", "asyncio", made, actions, faults, step_s=0.02)


SCENARIOS: dict[str, Scenario] = {
    "base_and_two_adapters_share_steps": _scenario(
        _do(0.0, "load", "sql", "S"),
        _do(0.0, "load", "legal", "L"),
        Ask(0.2, None, tokens=3),
        Ask(0.2, "sql", tokens=3),
        Ask(0.2, "legal", tokens=3),
    ),
    "replace_under_traffic": _scenario(
        _do(0.0, "load", "sql", "v1"),
        Ask(0.2, "sql", tokens=8),
        _do(0.25, "replace", "sql", "v2"),
        Ask(0.35, "sql", tokens=3),
    ),
    "swap_waits_for_its_slot_only": _scenario(
        _do(0.0, "load", "a", "A"),
        _do(0.0, "load", "b", "B"),
        Ask(0.2, "a", tokens=6),
        Ask(0.2, "b", tokens=10),
        _do(0.21, "swap", "c", "C", slot=0),
        Ask(0.4, "c", tokens=2),
    ),
    "a_miss_promotes_and_evicts_the_oldest": _scenario(
        _do(0.0, "register", "a", "A"),
        _do(0.0, "register", "b", "B"),
        _do(0.0, "register", "c", "C"),
        Ask(0.1, "a", tokens=2),
        Ask(0.2, "b", tokens=2),
        Ask(0.4, "c", tokens=2),
        Ask(0.6, "a", tokens=2),
    ),
    "a_cold_adapter_drains_a_hot_one": _scenario(
        _do(0.0, "load", "hot", "H"),
        _do(0.0, "register", "cold", "C"),
        Ask(0.1, "hot", tokens=12),
        Ask(0.15, "cold", tokens=2),
        Ask(0.2, "hot", tokens=12),
        Ask(0.3, "hot", tokens=2),
        slots=1,
        drain_after_s=0.1,
    ),
    "rotate_changes_later_requests_only": _scenario(
        _do(0.0, "load", "a", "A"),
        _do(0.0, "load", "b", "B"),
        _do(0.1, "rotate", "a"),
        Ask(0.2, default=True, tokens=5),
        _do(0.22, "rotate", "b"),
        Ask(0.24, default=True, tokens=2),
    ),
    "a_bad_replacement_changes_nothing": _scenario(
        _do(0.0, "load", "a", "A"),
        Ask(0.1, "a", tokens=6),
        _do(0.12, "replace", "a", "bad", error="reject:shape-mismatch"),
        Ask(0.25, "a", tokens=2),
    ),
    "a_failed_commit_is_named_and_tried_again": _scenario(
        _do(0.0, "register", "a", "A"),
        Ask(0.1, "a", tokens=2),
        Ask(1.5, "a", tokens=2),
        faults=(Fault("commit", 0),),
    ),
    "cancel_while_waiting_and_while_decoding": _scenario(
        _do(0.0, "load", "a", "A"),
        Ask(0.1, "a", tokens=30, leave="cancel", leave_after=0.1),
        Ask(0.1, None, tokens=30, leave="scope", leave_after=0.05),
        Ask(0.1, "a", tokens=4, leave="drop", leave_after=0.01),
        max_running=2,
    ),
    "memory_pressure_preempts_and_resumes": _scenario(
        _do(0.0, "load", "a", "A"),
        Ask(0.1, "a", prompt=20, tokens=30),
        Ask(0.1, None, prompt=20, tokens=30),
        num_blocks=6,
        watermark_blocks=0,
    ),
    "unload_with_a_deadline": _scenario(
        _do(0.0, "load", "a", "A"),
        Ask(0.1, "a", tokens=30),
        Ask(0.15, "a", tokens=30),
        _do(0.2, "unload", "a", deadline_s=0.1, cancel_late=True),
        Ask(0.25, "a", tokens=2),
        max_running=1,
    ),
    "equal_beginnings_are_computed_once": _scenario(
        _do(0.0, "load", "a", "A"),
        Ask(0.1, "a", prompt=40, shared=36, tokens=2),
        Ask(0.3, "a", prompt=40, shared=36, tokens=2),
        Ask(0.3, None, prompt=40, shared=36, tokens=2),
        _do(0.4, "replace", "a", "A2"),
        Ask(0.6, "a", prompt=40, shared=36, tokens=2),
    ),
    "samples_share_their_prompt": _scenario(
        _do(0.0, "load", "a", "A"),
        Ask(0.1, "a", prompt=40, tokens=3, samples=3),
    ),
    "recurrent_states_begin_behind_snapshots": _scenario(
        _do(0.0, "load", "a", "A"),
        Ask(0.1, "a", prompt=40, shared=36, tokens=2),
        Ask(0.3, "a", prompt=40, shared=36, tokens=2, samples=2),
        Ask(0.3, None, prompt=40, shared=36, tokens=2),
        _do(0.5, "replace", "a", "A2"),
        Ask(0.7, "a", prompt=40, shared=36, tokens=2),
        recurrent=True,
        snapshots=2,
        snapshot_tokens=16,
    ),
    "memory_pressure_spills_and_restores": _scenario(
        Ask(0.0, None, prompt=28, tokens=8),
        Ask(0.0, None, prompt=28, tokens=8),
        num_blocks=5,
        watermark_blocks=0,
        prefix_cache=False,
        spill_blocks=4,
        spill_fixed_cost=0.0,
    ),
    "steps_overlap_except_where_somebody_waits": _scenario(
        _do(0.0, "load", "a", "A"),
        Ask(0.1, "a", tokens=7),
        Ask(0.1, None, tokens=5),
        Ask(0.17, None, tokens=2),
        step_depth=2,
    ),
    "an_end_nobody_foresaw_wastes_a_row": _scenario(
        _do(0.0, "load", "a", "A"),
        Ask(0.1, "a", tokens=30, leave="stop", leave_after=0.1),
        Ask(0.1, None, tokens=6),
        _do(0.12, "replace", "a", "A2"),
        step_depth=2,
    ),
    "a_failed_step_takes_the_one_behind_it_along": _scenario(
        Ask(0.1, None, tokens=30),
        Ask(0.1, None, tokens=30),
        Ask(0.3, None, tokens=2),
        faults=(Fault("step", 2),),
        step_depth=2,
    ),
    "annexes_make_room_for_each_other": _scenario(
        _do(0.0, "load", "a", "A", annex=40),
        _do(0.0, "load", "b", "B", annex=40),
        _do(0.1, "load", "huge", "H", annex=101),
        _do(0.2, "load", "c", "C", annex=60),
        Ask(0.3, "c", tokens=12),
        _do(0.32, "replace", "c", "C2", annex=70),
        _do(0.35, "load", "plain", "P"),
        Ask(0.6, "c", tokens=2),
        slots=4,
        arena_bytes=100,
        drain_after_s=0.1,
    ),
    "a_dead_device_ends_everything_by_name": _scenario(
        _do(0.0, "load", "a", "A"),
        Ask(0.1, "a", tokens=30),
        Ask(0.1, None, tokens=30),
        _do(0.15, "load", "b", "B", seconds=0.5),
        Ask(0.4, None, tokens=2),
        faults=(Fault("step", 4, "device-dead"),),
    ),
    "close_while_things_run": _scenario(
        _do(0.0, "load", "a", "A"),
        Ask(0.1, "a", tokens=30),
        _do(0.12, "load", "b", "B", seconds=5.0),
        Shut(0.2),
    ),
}


def story_of(scenario: Scenario) -> str:
    """The scenario's course as text. Raises AssertionError if it breaks a law."""
    story = Story()
    outcome = run_scenario(scenario, (story,))
    assert outcome.violation is None, outcome.violation
    return story.text()


def main(argv: Sequence[str] | None = None) -> int:
    """Write every story to ``DIR/<name>.trace``."""
    args = list(sys.argv[1:] if argv is None else argv)
    if len(args) != 1:
        sys.stderr.write("usage: python -m rota.sched.sim.golden DIR\n")
        return 2
    logging.getLogger("rota").setLevel(logging.CRITICAL)
    target = Path(args[0])
    target.mkdir(parents=True, exist_ok=True)
    for name, scenario in SCENARIOS.items():
        (target / f"{name}.trace").write_text(story_of(scenario))
    return 0


if __name__ == "__main__":
    sys.exit(main())
