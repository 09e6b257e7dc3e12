"""The law of bounded waits: how long a staged adapter may wait for its slot (docs/states.md).

Judged at the end of a run from the ledger's own times and the stories of adapters and slots. With
nobody else given a slot meanwhile, ``drain_after_s`` + the longest remaining lease of the chosen
victim; else the longest lease of any sequence, once for each who was. One with an annex may need
several victims gone, and count as well who gave up waiting meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .laws import Ledger

_PLACING = re.compile(r"(\S+) job (\d+) (\w+): staged -> PLACING")
_PLACED = re.compile(r"(\S+) job (\d+) \w+: (\w+) -> (\w+)")
_MOVED = re.compile(r"(\S+) \w+ -(\w+)-> (\w+)")


@dataclass(frozen=True, slots=True)
class _Drain:
    """A slot that drained from ``begin`` until its last lease ended at ``end``."""

    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class _Wait:
    job: str
    kind: str
    begin: float
    end: float
    chosen: bool


def check(
    ledger: Ledger,
    adapters: Mapping[str, Iterable[str]],
    slots: Sequence[Iterable[str]],
    slack: float,
) -> None:
    """``adapters``: stories by name; ``slots``: stories by index; ``slack``: seconds of
    ``step_depth`` + 1 steps and the commits in between."""
    leases = [r.left_by(ledger.now) - r.held for r in ledger.reqs.values() if r.held is not None]
    each = ledger.config.drain_after_s + max(leases, default=0.0) + slack
    given = {(at, name): slot for at, slot, name in ledger.slots_given}
    drains = [_drains(ledger, index, story) for index, story in enumerate(slots)]
    given_up = [w.end for story in adapters.values() for w in _waits(story) if not w.chosen]
    for name, story in adapters.items():
        for wait in _waits(story):
            if not wait.chosen:
                continue
            if any(b <= wait.end and wait.begin <= e for b, e in ledger.resizes.values()):
                continue  # the barrier has a deadline of its own
            length = wait.end - wait.begin
            others = sum(wait.begin <= at < wait.end for at, _, _ in ledger.slots_given)
            others += sum(wait.begin <= at <= wait.end for at in ledger.pin_times)
            annex = (wait.end, name) in ledger.annexes.given
            if annex:
                others += sum(wait.begin <= at <= wait.end for at in given_up)
            bound = each * (1 + others)
            slot = None if annex else given.get((wait.end, name))
            drain = None if slot is None else _of_wait(ledger, wait, slot, drains[slot])
            if slot is not None and drain is not None:
                left = _last_leave(ledger, slot, drain.begin) - drain.begin
                after = ledger.config.drain_after_s + slack
                # A drain that began later was another job's, taken because this one came first.
                if not others and drain.begin <= wait.begin + after:
                    bound = ledger.config.drain_after_s + left + slack
                late = wait.end - drain.begin
                what = f"job {wait.job}: {late:.3f} s after its drain, the lease had {left:.3f} s"
                ledger.need(late <= left + slack, "bounded wait", what)
            what = f"job {wait.job}: {length:.3f} s > {bound:.3f} s"
            ledger.need(length <= bound, "bounded wait", what)


def _waits(story: Iterable[str]) -> Iterable[_Wait]:
    since: dict[str, tuple[str, float]] = {}
    for line in story:
        if (found := _PLACING.match(line)) is not None:
            since[found[2]] = found[3], float(found[1])
        elif (found := _PLACED.match(line)) is not None and found[2] in since:
            kind, begin = since.pop(found[2])
            yield _Wait(found[2], kind, begin, float(found[1]), found[3] == "chosen")


def _drains(ledger: Ledger, index: int, story: Iterable[str]) -> list[_Drain]:
    """Finished drains of a slot, each held to: no lease was given after it began."""
    done: list[_Drain] = []
    begin: float | None = None
    for line in story:
        found = _MOVED.match(line)
        if found is None:
            continue
        at, event = float(found[1]), found[2]
        if event == "drain":
            begin = at
        elif event == "undrain":
            begin = None
        elif event == "release_last" and begin is not None:
            last = _last_leave(ledger, index, begin)
            what = f"slot {index} drained until {at:.3f}, its leases ended {last:.3f}"
            ledger.need(at <= last + 1e-5, "bounded wait", what)
            done.append(_Drain(begin, at))
            begin = None
    return done


def _last_leave(ledger: Ledger, slot: int, at: float) -> float:
    """When the last of those who held ``slot`` at time ``at`` left it."""
    ends = [
        r.left_by(ledger.now)
        for r in ledger.reqs.values()
        if r.held is not None
        and r.held <= at + 1e-5
        and r.left_by(ledger.now) >= at - 1e-5
        # One that never ran may have held any slot.
        and (r.slot == slot or (r.slot is None and r.adapter is not None))
    ]
    return max(ends, default=at)


def _of_wait(ledger: Ledger, wait: _Wait, slot: int, drains: Iterable[_Drain]) -> _Drain | None:
    """The drain that gave this wait its slot, if it began while the job waited for any slot."""
    if wait.kind == "swap":
        return None
    for drain in drains:
        if not wait.begin <= drain.begin <= drain.end <= wait.end:
            continue
        if not any(s == slot and drain.end <= t < wait.end for t, s, _ in ledger.slots_given):
            return drain
    return None
