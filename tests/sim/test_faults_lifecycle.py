"""Faults this field has seen (identity and life time of adapters), each by its symptom.

The ledger judges every event of every test besides: right version per token, no busy slot written,
one end per request, one answer per command, nothing held at rest. Every sleep is of virtual time.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import pytest

from rota.errors import CommandError, RejectError, RequestError, RotaError, StagingError
from rota.sched.core import adapter_id
from rota.sched.core import effects as fx
from rota.sched.core import events as ev
from rota.sched.sim.device import SimSource

from .serving import Serving, expected, serving

pytestmark = pytest.mark.anyio


def _bad(code: str = "shape-mismatch") -> RejectError:
    return RejectError("refused", code=code, subject="x")


async def _gather(*jobs: Any) -> None:
    async with anyio.create_task_group() as tasks:
        for job in jobs:
            tasks.start_soon(job)


# identity -----------------------------------------------------------------------------------------
async def test_same_name_reload_never_serves_the_previous_weights() -> None:
    """Ten reloads of one name with one prompt: each answer is the new version's, from KV computed
    under it (the simulated KV refuses blocks of another version), and each identity is new."""
    async with serving() as s:
        ids = {(await s.load("x", "v0")).adapter_id}
        for version in range(1, 11):
            ids.add((await s.replace("x", f"v{version}")).adapter_id)
            assert await s.collect("x", n=4, prompt=32) == expected(f"v{version}", 4, 32)
        assert len(ids) == 11


async def test_reload_in_place_from_one_directory_tracks_its_content() -> None:
    async with serving() as s:
        await s.load("x", "old", path="/sim/x")
        assert await s.collect("x", n=2) == expected("old", 2)
        await s.replace("x", "new", path="/sim/x")
        assert await s.collect("x", n=2) == expected("new", 2)


async def test_equal_prompts_of_two_adapters_share_nothing() -> None:
    async with serving() as s:
        a, b = await s.load("a", "A"), await s.load("b", "B")
        assert a.adapter_id != b.adapter_id
        assert await s.collect("a", n=4, prompt=48) == expected("A", 4, 48)
        assert await s.collect("b", n=4, prompt=48) == expected("B", 4, 48)
        assert await s.collect(None, n=4, prompt=48) == expected("base", 4, 48)


async def test_blocks_that_leave_the_device_come_back_to_their_own_adapter() -> None:
    """Equal tokens of two adapters, both spilled to host memory and back under pressure (the
    simulated KV refuses a block computed under another version)."""
    tight = {"num_blocks": 9, "watermark_blocks": 0, "spill_blocks": 16, "spill_fixed_cost": 0.0}
    async with serving(**tight) as s:
        for name in "ab":
            await s.load(name, name.upper())
        got: dict[str, list[int]] = {}

        async def one(name: str) -> None:
            got[name] = await s.collect(name, n=60, prompt=40)

        await _gather(*(partial(one, n) for n in "ab"))
        assert got == {n: expected(n.upper(), 60, 40) for n in "ab"}
        assert s.core.stats().spilled >= 1


async def test_a_name_reused_without_eviction_is_another_adapter() -> None:
    async with serving() as s:
        first = await s.load("x", "A")
        await s.collect("x")
        await s.unload("x")
        second = await s.load("x", "B")
        assert second.adapter_id != first.adapter_id
        assert await s.collect("x", n=3) == expected("B", 3)


async def test_one_adapters_swap_bumps_its_own_identity_only() -> None:
    async with serving() as s:
        other = await s.load("other", "O")
        await s.load("x", "A")
        await s.replace("x", "B")
        mine = {slot.name: slot.adapter_id for slot in s.core.stats().slots}
        assert mine["other"] == other.adapter_id == adapter_id("other", 1)


async def test_names_are_taken_as_they_are() -> None:
    names = ["org/a@v1", "org/a@v2", "org/a:b", "org_a_v1"]
    async with serving(max_loras=4) as s:
        ids = {(await s.load(n, n.upper())).adapter_id for n in names}
        assert len(ids) == 4
        for name in names:
            assert await s.collect(name, n=2) == expected(name.upper(), 2)


# unload -------------------------------------------------------------------------------------------
async def test_unload_really_frees_slot_image_and_source() -> None:
    async with serving() as s:
        for name in "abc":
            await s.load(name, name.upper())
        await s.unload("b")
        await s.rest()
        assert s.executor.contents == ["A", None, "C"]
        assert [a.name for a in s.core.stats().adapters] == ["a", "c"]
        assert len(s.shell._sources) == 2
        reply = await s.load("b", "B2")
        assert reply.slot == 1, "no copy of the old one is kept"


@pytest.mark.parametrize("busy", [False, True])
async def test_unload_after_heavy_parallel_sampling_returns(busy: bool) -> None:
    """Uses are a set of sequence ids, so they cannot drift: 48 runs of one adapter, some aborted,
    then the unload answers within its deadline."""
    async with serving(max_running=8) as s:
        await s.load("x", "A")

        async def one(index: int) -> None:
            with anyio.move_on_after(0.05 * index if index % 3 == 0 else 100.0):
                await s.collect("x", n=6)

        async with anyio.create_task_group() as tasks:
            for index in range(48):
                tasks.start_soon(one, index)
            if busy:
                await anyio.sleep(0.3)
                tasks.cancel_scope.cancel()
        begin = anyio.current_time()
        reply = await s.unload("x", after=5.0)
        assert reply.outcome == "unloaded" and anyio.current_time() - begin < 1.0


@pytest.mark.parametrize("when", ["before", "waiting", "prefill", "decode", "after"])
async def test_an_abort_at_any_stage_gives_the_adapter_back(when: str) -> None:
    async with serving(max_running=1, max_step_tokens=8) as s:
        await s.load("x", "A")
        blocker = s.generate(None, n=20) if when == "waiting" else None
        generation = s.generate("x", n=2 if when == "after" else 50, prompt=40)
        if when == "waiting":
            await anyio.sleep(0.1)
        elif when == "prefill":
            await anyio.sleep(0.05)
        elif when == "decode":
            await generation.__anext__()
        elif when == "after":
            while await generation.take(8):
                pass
        generation.cancel()
        generation.cancel()
        if blocker is not None:
            blocker.cancel()
        reply = await s.unload("x", after=2.0)
        assert reply.outcome == "unloaded"


async def test_an_unload_racing_a_waiting_request_is_atomic() -> None:
    """The request runs on the version it got, or is refused by name; nothing in between."""
    async with serving(max_running=1) as s:
        await s.load("x", "A")
        running = s.generate("x", n=10)
        await running.__anext__()
        waiting = s.generate("x", n=3)

        async def unload() -> None:
            await s.unload("x")

        async def gone() -> None:
            with pytest.raises(RequestError) as caught:
                await waiting.__anext__()
            assert caught.value.code == "adapter-unloaded"

        await _gather(unload, gone)
        with pytest.raises(RequestError) as late:
            await s.collect("x")
        assert late.value.code == "unknown-adapter"
        assert len([e async for e in running]) == 9


# loading ------------------------------------------------------------------------------------------
async def test_loading_a_malformed_adapter_while_generating_fails_only_the_load() -> None:
    async with serving() as s:
        await s.load("x", "A")
        generation = s.generate("x", n=20)
        await generation.__anext__()
        with pytest.raises(RejectError):
            await s.load("y", "bad", error=_bad())
        assert len([e async for e in generation]) == 19


async def test_a_directory_that_vanished_fails_only_the_request_that_needs_it() -> None:
    async with serving(max_loras=1, image_cache_bytes=0) as s:
        await s.load("x", "A", path="/sim/gone")
        await s.load("y", "B")
        gone = StagingError("no such file", code="stage-io", subject="/sim/gone")
        ident = next(i for i, v in s.shell._sources.items() if v.path == "/sim/gone")
        s.shell._sources[ident] = SimSource("A", error=gone, path="/sim/gone")
        with pytest.raises(StagingError) as caught:
            await s.collect("x")
        assert caught.value.code == "stage-io"
        assert await s.collect("y", n=3) == expected("B", 3)


async def test_evicted_from_host_and_device_a_name_is_still_enough() -> None:
    async with serving(max_loras=1, image_cache_bytes=0) as s:
        await s.load("x", "A")
        await s.load("y", "B")
        assert not s.stager.images, "nothing is cached on the host"
        assert await s.collect("x", n=3) == expected("A", 3)


async def test_a_hundred_loads_of_one_name_stage_once() -> None:
    async with serving() as s:
        outcomes: list[str] = []

        async def promote() -> None:
            outcomes.append(
                (await s.send(ev.Promote, "x", "A", path="/sim/x", seconds=0.5)).outcome
            )

        await _gather(*[promote] * 100)
        assert outcomes == ["done"] * 100 and s.stages() == 1


async def test_one_bad_adapter_is_not_retried_for_ever_and_blocks_nobody() -> None:
    async with serving(failure_backoff_s=1.0) as s:
        await s.register("bad", "x", error=_bad("rank-exceeds-max"))
        await s.register("good", "G")
        for _ in range(50):
            with pytest.raises(RejectError):
                await s.collect("bad")
            assert await s.collect("good", n=1) == expected("G", 1)
        elapsed = anyio.current_time()
        tries = sum(isinstance(e, fx.StartStage) and e.name == "bad" for e in s.effects)
        assert tries <= elapsed / 1.0 + 1


async def test_an_unknown_adapter_never_falls_back_to_base() -> None:
    async with serving() as s:
        for name in ("nobody", "", "base"):
            with pytest.raises(RequestError) as caught:
                await s.collect(name)
            assert caught.value.code == "unknown-adapter"
        assert s.executor.steps == 0


# slots --------------------------------------------------------------------------------------------
async def test_as_many_adapters_as_slots_and_base_share_one_step() -> None:
    async with serving(max_loras=3) as s:
        for name in "abc":
            await s.load(name, name.upper())
        got: dict[str | None, list[int]] = {}

        async def one(name: str | None) -> None:
            got[name] = await s.collect(name, n=4)

        before = s.executor.steps
        await _gather(*(partial(one, n) for n in ("a", "b", "c", None)))
        assert s.executor.steps - before == 4
        assert got[None] == expected("base", 4) and got["c"] == expected("C", 4)


async def test_more_adapters_than_slots_at_once_are_all_served() -> None:
    async with serving(max_loras=2, drain_after_s=0.1) as s:
        for name in "abc":
            await s.register(name, name.upper())
        got: dict[str, list[int]] = {}

        async def one(name: str) -> None:
            got[name] = await s.collect(name, n=5)

        await _gather(*(partial(one, n) for n in "abc"))
        assert got == {n: expected(n.upper(), 5) for n in "abc"}


async def test_a_cold_adapter_waits_a_bounded_time_behind_hot_traffic() -> None:
    async with serving(max_loras=1, drain_after_s=0.2) as s:
        await s.load("hot", "H")
        await s.register("cold", "C", seconds=0.01)
        waited = 0.0

        async def hot() -> None:
            for _ in range(40):
                async with anyio.create_task_group() as pair:
                    pair.start_soon(partial(s.collect, "hot", n=10))
                    await anyio.sleep(0.1)

        async def cold() -> None:
            nonlocal waited
            await anyio.sleep(0.5)
            begin = anyio.current_time()
            await s.generate("cold", n=1).__anext__()
            waited = anyio.current_time() - begin

        await _gather(hot, cold)
        # Staging, drain_after_s, the longest lease (10 steps), the commit and a step or two.
        assert waited <= 0.01 + 0.2 + 10 * 0.02 + 0.001 + 3 * 0.02


async def test_rolling_versions_need_no_spare_slot() -> None:
    async with serving(max_loras=1) as s:
        await s.load("x", "v0")
        for version in range(1, 8):
            generation = s.generate("x", n=3)
            await generation.__anext__()
            await s.replace("x", f"v{version}")
            assert len([e async for e in generation]) == 2
        assert await s.collect("x", n=2) == expected("v7", 2)


async def test_fifty_swaps_under_live_requests_lose_none_and_mix_none() -> None:
    async with serving(max_loras=2) as s:
        await s.load("x", "v0")
        done = anyio.Event()
        served = 0

        async def requests() -> None:
            nonlocal served
            while not done.is_set():
                events = [e async for e in s.generate("x", n=3)]
                assert len({e.adapter_id for e in events}) == 1
                served += 1

        async def swaps() -> None:
            for version in range(1, 51):
                await s.replace("x", f"v{version}")
            done.set()

        await _gather(requests, requests, requests, swaps)
        assert served > 50


# growth -------------------------------------------------------------------------------------------
def _sizes(s: Serving) -> dict[str, int]:
    """Sizes of everything the shell, stager and core keep by id or name."""
    state: Any = s.core._state
    held: dict[str, int] = {}
    for owner, thing in (("shell", s.shell), ("stager", s.stager), ("registry", state.names)):
        for key, value in vars(thing).items():
            if isinstance(value, (dict, set, list)):
                held[f"{owner}.{key}"] = len(value)
    for key in ("seqs", "running", "commands", "jobs", "placing", "stages", "commits", "unloading"):
        held[f"state.{key}"] = len(getattr(state, key))
    for key, value in vars(state.lanes).items():
        if isinstance(value, dict):
            held[f"lanes.{key}"] = len(value)
    return held


async def test_five_hundred_load_and_unload_cycles_keep_nothing() -> None:
    async with serving(max_remembered_generations=16) as s:
        sizes = []
        for cycle in range(500):
            await s.load(f"x{cycle}", f"v{cycle}", seconds=0.0)
            await s.collect(f"x{cycle}", n=1)
            await s.unload(f"x{cycle}")
            s.effects.clear()
            if cycle in (50, 499):
                await s.rest()
                sizes.append(_sizes(s))
        assert sizes[0] == sizes[1]


async def test_many_names_with_one_request_each_leave_nothing_per_name() -> None:
    async with serving(max_loras=4, image_cache_bytes=3000, drain_after_s=0.0) as s:
        for index in range(1000):
            await s.register(f"n{index}", f"c{index}", seconds=0.0)
            await s.collect(f"n{index}", n=1)
            s.effects.clear()
        await s.rest()
        assert len(s.stager.images) <= 3
        lanes = {k: v for k, v in _sizes(s).items() if k.startswith(("lanes", "state"))}
        assert set(lanes.values()) == {0}, lanes
        for index in range(1000):
            await s.unload(f"n{index}")
        assert not s.core.stats().adapters and not s.shell._sources


async def test_a_refused_command_keeps_nothing() -> None:
    async with serving() as s:
        await s.load("x", "A")
        before = _sizes(s)
        for _ in range(50):
            with pytest.raises(CommandError):
                await s.load("x", "again")
            with pytest.raises(RotaError):
                await s.load("y", "bad", error=_bad(), seconds=0.0)
        await s.rest()
        assert _sizes(s) == before
