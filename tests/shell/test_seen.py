"""What staging saw is remembered, newest first, of so many names, until they are unloaded.
Every sleep is of virtual time."""

from __future__ import annotations

from dataclasses import dataclass

import anyio
import pytest

from rota.errors import DeviceError, RequestError
from rota.sched import seen
from rota.sched.core import events as ev
from rota.sched.seen import Seen, StagedReport
from rota.sched.sim import SimFaults

from .simulated import Sim, running


@dataclass
class Staged:
    digest: str
    image: None = None
    report: None = None


def test_the_newest_of_each_name_is_told_and_the_oldest_name_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(seen, "KEPT", 3)
    names = set("abcd")
    told = Seen(names.__contains__)
    for name in ("a", "b", "c", "a", "d"):
        told.note(name, Staged(f"{name}1"))
    assert told.of("b") is None, "staged longest ago"
    assert [told.of(name) for name in "acd"] == [StagedReport(f"{n}1", None) for n in "acd"]
    told.note("a", Staged("a2"))
    assert told.of("a") == StagedReport("a2", None)
    names.remove("a")
    for maybe in ("a", "c", None):
        told.check(maybe)
    told.note("a", Staged("a3"))  # it took longer than its name was there
    assert told.of("a") is None and told.of("c") is not None


@pytest.mark.anyio
async def test_what_was_staged_of_a_name_is_told_until_it_is_unloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def digest(sim: Sim, name: str) -> str | None:
        seen = sim.shell.seen.of(name)
        return None if seen is None else seen.digest

    async def unload(sim: Sim, name: str, wait_s: float = 0.0) -> str:
        deadline = anyio.current_time() + wait_s
        done = await sim.shell.command(lambda i: ev.Unload(i, name, deadline, True))
        assert done.reply is not None
        return done.reply.outcome

    commits = [None, DeviceError("no", code="injected")]
    faults = SimFaults(lambda kind: commits.pop() if kind == "commit" and commits else None)
    async with running(faults) as sim:
        with pytest.raises(DeviceError):  # staged, and then there is no such name
            await sim.load("a", "A0")
        assert digest(sim, "a") is None
        await sim.load("a", "A1")
        assert digest(sim, "a") == "A1"
        # One sequence runs: the answer of unload comes after the name is new again, twice.
        running_on = sim.generate("a", n=50)
        await running_on.__anext__()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(unload, sim, "a", 0.5)
            await anyio.sleep(0.1)
            assert digest(sim, "a") is None
            await sim.load("a", "A2")
        assert digest(sim, "a") == "A2"
        # Staging that hears too late that nobody wants it.
        monkeypatch.setattr(sim.stager, "cancel", lambda stage: None)

        async def replace() -> None:
            with pytest.raises(RequestError, match="adapter-unloaded"):
                await sim.replace("a", "A3", seconds=0.5)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(replace)
            await anyio.sleep(0.1)
            assert await unload(sim, "a") == "unloaded"
        await anyio.sleep(1)
        assert sim.core.stats().stages == 4 and digest(sim, "a") is None
