"""Simulated runs by seed: ``python -m rota.sched.sim.run --seed N [--count N] [--minimise]``, or
with ``--crowd`` those in which steps overlap as often as they can.

Exit codes: 0 every law held, 1 one was broken, 2 wrongly called.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from .crowd import crowd_of
from .minimise import minimise
from .scenario import Scenario, scenario_of
from .world import Outcome, run_scenario


class Failed(msgspec.Struct, frozen=True):
    """A seed that broke a law."""

    scenario: Scenario
    outcome: Outcome


def command_of(scenario: Scenario) -> str:
    """The one command that runs this scenario's seed again."""
    crowd = " --crowd" if scenario.profile == "crowd" else ""
    return f"python -m rota.sched.sim.run --seed {scenario.seed}{crowd} --minimise"


def run_seeds(
    seeds: Iterable[int],
    run: Callable[[Scenario], Outcome] = run_scenario,
    make: Callable[[int], Scenario] = scenario_of,
) -> tuple[list[Failed], int]:
    """Run each seed; returns the failed ones and the number of events handled in all."""
    failed, events = [], 0
    for seed in seeds:
        scenario = make(seed)
        outcome = run(scenario)
        events += outcome.events
        if outcome.violation is not None:
            failed.append(Failed(scenario, outcome))
    return failed, events


def report(failed: Failed, run: Callable[[Scenario], Outcome] = run_scenario) -> str:
    """What broke, the command that shows it, and the fewest actions that still show it."""
    violation = failed.outcome.violation
    assert violation is not None
    small = minimise(failed.scenario, violation.law, run)
    lines = [
        f"law broken: {violation.law}: {violation.what} (at {violation.at:.4f} s, "
        f"profile {failed.scenario.profile}, {failed.scenario.backend})",
        f"reproduce: {command_of(failed.scenario)}",
        f"{len(small.actions)} of {len(failed.scenario.actions)} actions are enough:",
    ]
    lines += [f"  {msgspec.json.encode(a).decode()}" for a in (*small.faults, *small.actions)]
    return "\n".join(lines)


def main_sim(argv: Sequence[str] | None = None) -> int:
    """Entry point; writes to standard output."""
    parser = argparse.ArgumentParser(prog="rota sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=1, help="how many seeds, from the first")
    parser.add_argument("--minimise", action="store_true", help="cut a failing seed down")
    parser.add_argument("--crowd", action="store_true", help="steps overlap as often as they can")
    parser.add_argument("--scenario", type=Path, help="run a scenario file instead of seeds")
    args = parser.parse_args(argv)
    logging.getLogger("rota").setLevel(logging.CRITICAL)
    begin = time.process_time()
    if args.scenario is not None:
        scenario = msgspec.json.decode(args.scenario.read_bytes(), type=Scenario)
        outcome = run_scenario(scenario)
        failed = [Failed(scenario, outcome)] if outcome.violation is not None else []
        events = outcome.events
    else:
        failed, events = run_seeds(
            range(args.seed, args.seed + args.count), make=crowd_of if args.crowd else scenario_of
        )
    for one in failed:
        violation = one.outcome.violation
        text = report(one) if args.minimise else f"{violation}\n{command_of(one.scenario)}"
        sys.stdout.write(f"seed {one.scenario.seed}: {text}\n")
    seconds = time.process_time() - begin
    sys.stdout.write(
        f"{args.count} seed(s), {events} events, {len(failed)} failed, {seconds:.1f} s of CPU\n"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main_sim())
