"""Make docs/states.md from the core's transition tables: ``python tools/make_states.py [--check]``.

``--check`` writes nothing and exits 1 if the file is not what the tables say.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Mapping
from pathlib import Path

from rota.sched.core.jobs import JOB_TABLE, JobState
from rota.sched.core.resize import RESIZE_TABLE, ResizeState
from rota.sched.core.tables import SEQ_TABLE, SLOT_TABLE, SeqState, SlotState

TARGET = Path(__file__).resolve().parent.parent / "docs" / "states.md"
INTRO = """# States of slots, sequences and adapter jobs

Made from the tables in `sched/core/tables.py`, `jobs.py` and `resize.py` by `tools/make_states.py`;
do not edit by hand. A pair of state and event that is not drawn here is an error that carries the
story of the thing it happened to.
"""
WAIT = """## How long a cold adapter waits

From the moment its image is ready until its slot is chosen, a job waits at most

    (drain_after_s + longest lease) * (1 + slots given to others meanwhile)

and `step_depth` + 1 steps and the commits in between; undisturbed by others, at most

    drain_after_s + longest remaining lease of the chosen victim

A request for an adapter that is not resident starts its promotion when it arrives, however full
the running batch is.

*Longest lease* is the longest any sequence holds a slot. With an idle victim it waits for
nothing. Without one, after `drain_after_s` the least recently used busy slot that is not pinned
stops giving leases; its running sequences end within their own length. Jobs are given slots in
the order they began to wait, and a slot drained for one job but taken by an earlier one is made
good by the earlier one's. Before the image is ready a job waits for staging, and while
`2 * max_loras + spare_jobs` jobs are in hand, for one of those to finish (commands before misses);
that time counts towards `drain_after_s`. If every slot is pinned nothing is waited for: the job
fails with POOL_FULL.

An adapter with experts, token matrices or replaced token rows also waits for an extent of the
arena, and keeps the first bound, where *others* are also those who claimed a place there and gave
up: after `drain_after_s` it claims the place that costs least, and all who are busy there stop
giving leases at once, so their longest remaining lease counts. One job at a time has a claim; the
next has its turn when that one's extent is given. Jobs without an annex never wait for the arena.
"""


def diagram(
    title: str,
    first: enum.Enum,
    table: Mapping[tuple[enum.Enum, enum.Enum], enum.Enum],
) -> str:
    """One Mermaid state diagram and the same as a table."""
    lines = [f"## {title}", "", "```mermaid", "stateDiagram-v2", f"    [*] --> {first.value}"]
    left = {state for state, _ in table}
    lines += [f"    {s.value} --> {t.value}: {e.value}" for (s, e), t in table.items()]
    ends = dict.fromkeys(t for t in table.values() if t not in left)
    lines += [f"    {state.value} --> [*]" for state in ends]
    lines += ["```", "", "| state | event | becomes |", "|---|---|---|"]
    lines += [f"| {s.value} | {e.value} | {t.value} |" for (s, e), t in table.items()]
    return "\n".join(lines) + "\n"


def document() -> str:
    """The whole file."""
    parts = [
        INTRO,
        diagram("Slot", SlotState.EMPTY, SLOT_TABLE),
        diagram("Sequence", SeqState.WAITING, SEQ_TABLE),
        diagram("Adapter job", JobState.QUEUED, JOB_TABLE),
        diagram("Resize", ResizeState.DRAINING, RESIZE_TABLE),
        WAIT,
    ]
    return "\n".join(parts)


def main(argv: list[str]) -> int:
    if "--check" in argv:
        return int(TARGET.read_text() != document())
    TARGET.write_text(document())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
