"""The real core and shell over a simulated device, on both backends, in virtual time."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from rota.errors import (
    CapacityError,
    DeviceError,
    EngineClosedError,
    InternalError,
    RejectError,
    RequestError,
    RotaError,
    StagingError,
)
from rota.sched.core import effects
from rota.sched.core import events as ev
from rota.sched.sim import SimFaults, token_of
from rota.sched.sim.device import BASE, SimSource
from rota.sched.staging import Stager

from .simulated import STEP_S, Sim, expected, running

pytestmark = pytest.mark.anyio


async def test_base_and_adapters_share_batches() -> None:
    async with running() as sim:
        await sim.load("a", "A")
        await sim.load("b", "B")
        got: dict[str, list[int]] = {}

        async def one(key: str, adapter: str | None) -> None:
            got[key] = await sim.collect(adapter, n=6)

        before = sim.executor.steps
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one, "base", None)
            tasks.start_soon(one, "a", "a")
            tasks.start_soon(one, "b", "b")
        assert got == {
            "base": expected(BASE, 4, 6),
            "a": expected("A", 4, 6),
            "b": expected("B", 4, 6),
        }
        assert sim.executor.steps - before <= 7, "different adapters must share steps"


async def test_replace_under_traffic_never_mixes_versions_and_pauses_nobody() -> None:
    async with running(max_loras=4) as sim:
        await sim.load("other", "O")
        await sim.load("hot", "v0")
        gaps: list[float] = []
        done = anyio.Event()

        async def steady() -> None:
            last = anyio.current_time()
            tokens = []
            async for event in sim.generate("other", n=200):
                now = anyio.current_time()
                gaps.append(now - last)
                last = now
                tokens.append(event.token_id)
            assert tokens == expected("O", 4, 200)
            done.set()

        async def churn() -> None:
            version = 0
            while not done.is_set():
                current = f"v{version}"
                stream = sim.generate("hot", n=5)
                first = await stream.__anext__()
                version += 1
                await sim.replace("hot", f"v{version}")
                rest = [e.token_id async for e in stream]
                assert [first.token_id, *rest] == expected(current, 4, 5)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(steady)
            tasks.start_soon(churn)
        commits = sum(isinstance(e, effects.Commit) for e in sim.effects)
        assert commits >= 10
        assert max(gaps[1:]) <= 2 * STEP_S + 0.005


async def test_a_failed_stage_changes_nothing_and_hurts_only_its_call() -> None:
    async with running() as sim:
        await sim.load("a", "A")
        bad = RejectError("no", code="shape-mismatch", subject="x", expected="[1]", found="[2]")
        stream = sim.generate("a", n=30)
        first = await stream.__anext__()
        with pytest.raises(RejectError) as caught:
            await sim.replace("a", "bad", error=bad)
        assert (caught.value.code, caught.value.subject) == ("shape-mismatch", "x")
        rest = [e.token_id async for e in stream]
        assert [first.token_id, *rest] == expected("A", 4, 30)
        assert await sim.collect("a", n=3) == expected("A", 4, 3)
        assert sim.core.stats().adapters[0].generation == 1


async def test_leaving_the_loop_cancels_and_gives_the_lease_back() -> None:
    async with running() as sim:
        await sim.load("a", "A")
        async for event in sim.generate("a", n=100):
            if event.index == 2:
                break
        # The iterator is gone with the loop; let the cancel and the step in flight settle.
        await anyio.sleep(1)
        stats = sim.core.stats()
        assert (stats.decoding, stats.closing) == (0, 0)
        assert stats.slots[0].state == "READY"


async def test_events_can_be_taken_in_bulk() -> None:
    async with running() as sim:
        stream = sim.generate(None, n=9)
        first = await stream.take(4)
        assert len(first) == 1, "what is at hand, without waiting for more"
        await anyio.sleep(1)
        sizes = [len(await stream.take(5)) for _ in range(3)]
        assert sizes == [5, 3, 0]


async def test_a_cancelled_reader_ends_its_request() -> None:
    async with running() as sim:
        with anyio.move_on_after(3 * STEP_S):
            await sim.collect(None, n=200)
        await anyio.sleep(1)
        assert sim.core.idle()


async def test_cancelled_first_waiter_of_a_promotion_hurts_nobody() -> None:
    async with running() as sim:
        source = SimSource("A", seconds=1.0)
        outcomes: list[str] = []

        async def promote(limit: float) -> None:
            with anyio.move_on_after(limit):
                pending = await sim.shell.command(
                    lambda i: ev.Promote(i, "a", sim.shell.source_id(source))
                )
                outcomes.append(pending.reply.outcome)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(promote, 0.5)
            await anyio.sleep(0.1)
            for _ in range(20):
                tasks.start_soon(promote, 10.0)
        assert outcomes == ["done"] * 20
        assert sim.core.stats().stages == 1, "single flight"


async def test_a_late_success_is_kept() -> None:
    async with running() as sim:
        with anyio.move_on_after(0.1):
            await sim.load("a", "A", seconds=1.0)
        await anyio.sleep(2)
        assert await sim.collect("a", n=2) == expected("A", 4, 2)
        assert sim.core.stats().stages == 1


async def test_a_cold_adapter_is_promoted_by_the_request_that_misses() -> None:
    async with running(max_loras=1, drain_after_s=0.5) as sim:
        for name in ("a", "b"):
            source = SimSource(name.upper())
            await sim.shell.command(
                partial(lambda n, s, i: ev.Register(i, n, sim.shell.source_id(s)), name, source)
            )
        waits: dict[str, float] = {}

        async def one(name: str) -> None:
            begin = anyio.current_time()
            async for event in sim.generate(name, n=20):
                waits.setdefault(name, anyio.current_time() - begin)
                assert event.token_id == token_of(name.upper(), 4 + event.index)

        async def hot() -> None:
            for _ in range(10):
                async with anyio.create_task_group() as pair:
                    pair.start_soon(one, "a")
                    await anyio.sleep(10 * STEP_S)
                    pair.start_soon(one, "a")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hot)
            await anyio.sleep(0.3)
            tasks.start_soon(one, "b")
        lease = 20 * STEP_S
        assert waits["b"] <= 0.5 + 2 * lease, "a cold adapter waits a bounded time"


async def test_unknown_adapter_and_queue_full_are_named() -> None:
    async with running(max_waiting=2, max_running=1) as sim:
        with pytest.raises(RequestError) as caught:
            await sim.collect("nobody")
        assert (caught.value.code, caught.value.subject) == ("unknown-adapter", "nobody")
        streams = [sim.generate(None, n=50) for _ in range(3)]
        await anyio.sleep(STEP_S)
        streams += [sim.generate(None, n=50) for _ in range(2)]
        with pytest.raises(CapacityError) as full:
            await streams[-1].__anext__()
        assert full.value.code == "QUEUE_FULL" and full.value.retry_after_s is not None


async def test_a_failed_step_ends_its_rows_by_name_and_the_engine_goes_on() -> None:
    errors: list[RotaError] = [DeviceError("boom", code="launch-failed")]
    faults = SimFaults(lambda kind: errors.pop() if kind == "step" and errors else None)
    async with running(faults) as sim:
        with pytest.raises(DeviceError) as caught:
            await sim.collect(None)
        assert caught.value.code == "launch-failed"
        assert await sim.collect(None, n=2) == expected(BASE, 4, 2)


async def test_a_dead_device_ends_everything_by_name() -> None:
    dead: list[bool] = []
    faults = SimFaults(lambda kind: DeviceError("gone", code="device-dead") if dead else None)
    async with running(faults) as sim:
        await sim.load("a", "A")
        streams = [sim.generate(a, n=100) for a in (None, "a")]
        for stream in streams:
            await stream.__anext__()
        dead.append(True)
        for stream in streams:
            with pytest.raises(DeviceError) as caught:
                async for _ in stream:
                    pass
            assert caught.value.code == "device-dead"
        with pytest.raises(DeviceError):
            await sim.collect(None)


async def test_close_ends_every_stream_and_command() -> None:
    async with running() as sim:
        await sim.load("a", "A")
        ended: list[str] = []

        async def read() -> None:
            try:
                await sim.collect("a", n=200)
            except EngineClosedError as error:
                ended.append(error.code)

        async def slow_load() -> None:
            try:
                await sim.load("b", "B", seconds=5.0)
            except EngineClosedError as error:
                ended.append(error.code)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            tasks.start_soon(slow_load)
            await anyio.sleep(0.1)
            sim.shell.close()
        assert ended == ["engine-closed"] * 2
        await sim.shell.closed.wait()
        with pytest.raises(EngineClosedError):
            sim.generate(None)


async def test_a_bug_in_the_core_ends_everything_once_by_name(caplog: Any) -> None:
    async with running() as sim:
        stream = sim.generate(None, n=100)
        await stream.__anext__()
        sim.shell._turn(ev.StepDone(999, ()))
        with pytest.raises(InternalError):
            async for _ in stream:
                pass
        with pytest.raises(InternalError):
            sim.generate(None)


async def test_a_moved_link_never_mixes_up_the_places_of_sources(tmp_path: Any) -> None:
    """The key of a source is what its path meant when it was named, not when it is dropped."""
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "one")
    async with running() as sim:
        await sim.load("a", "A", path=str(link))
        await sim.load("b", "B", path=str(tmp_path / "two"))
        link.unlink()
        link.symlink_to(tmp_path / "two")
        await sim.replace("a", "A2")  # drops the source behind the link
        two = SimSource("B", path=str(tmp_path / "two"))
        assert sim.shell.source_id(two) in sim.shell._sources
        assert len(sim.shell._source_ids) == len(sim.shell._sources) == 2


async def test_an_aborted_close_does_not_wait_for_staging_that_never_ends() -> None:
    sim = Sim()
    with anyio.fail_after(1000):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sim.thread.run)
            await tasks.start(partial(sim.shell.run))

            async def load() -> None:
                with pytest.raises(EngineClosedError) as caught:
                    await sim.load("a", "A", seconds=1e9, deaf=True)
                assert caught.value.code in ("engine-closed", "close-timeout")

            tasks.start_soon(load)
            await anyio.sleep(1)
            sim.shell.close()
            await anyio.sleep(5)
            assert not sim.shell.closed.is_set(), "it is waited for, within the close time-out"
            sim.shell.abort("the engine did not close in time")
            sim.thread.stop()
    assert sim.shell.closed.is_set()


async def test_abandoning_staging_leaves_its_thread_behind() -> None:
    hold, started = threading.Event(), threading.Event()

    def work(source: Any, cancelled: Any, held: Any) -> Any:
        started.set()
        hold.wait(30)
        return None

    stager = Stager(work, workers=1, clock_ns=lambda: 0)
    codes: list[str] = []

    async def run() -> None:
        try:
            await stager.run(1, SimSource("A"))
        except StagingError as error:
            codes.append(error.code)

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await anyio.to_thread.run_sync(started.wait)
            stager.cancel_all()
            await anyio.lowlevel.checkpoint()
            assert codes == [], "a cancelled stage is waited for"
            stager.abandon_all()
        assert codes == ["stage-abandoned"]
    finally:
        hold.set()
