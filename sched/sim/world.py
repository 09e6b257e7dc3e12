"""One simulated run: the real core and shell, simulated device, staging and callers.

Owns the callers (tasks that read, leave early, send commands) and the order of the end: everyone is
served or refused, the world comes to rest and is checked, the engine is closed and checked again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import msgspec

from ...errors import DeviceError, InternalError, RejectError, RequestError, RotaError, StagingError
from ..core import Core
from ..core import effects as fx
from ..core import events as ev
from ..generation import Generation
from ..shell import Shell
from ..streams import Outlet, Stream
from . import rest, waits
from .clock import run_virtual
from .device import BASE, SimExecutor, SimFaults, SimSource, SimStager, SimThread, token_of
from .kv import SimKV
from .laws import Ledger
from .pins import Pins
from .records import Violation
from .scenario import Ask, Do, Fault, Jump, Scenario, Shut, SourceSpec
from .states import SimStates

Observer = Callable[[ev.Event, list[fx.Effect], float], None]

_MOST_AT_ONCE = 20_000
"""Events at one moment of virtual time from which a run counts as going in circles."""


class Outcome(msgspec.Struct, frozen=True):
    """What a run came to. ``violation``: the first broken law, or ``None``."""

    violation: Violation | None
    events: int
    steps: int
    tokens: int
    seconds: float


def _error_of(code: str) -> RotaError | None:
    if not code:
        return None
    kind, _, rest = code.partition(":")
    if kind == "reject":
        return RejectError("injected", code=rest, subject="sim")
    return StagingError("injected", code=code)


def source_of(spec: SourceSpec) -> SimSource:
    error = _error_of(spec.error)
    return SimSource(
        spec.content,
        spec.seconds,
        error,
        spec.nbytes,
        spec.path,
        rank=spec.rank,
        annex=spec.annex,
    )


class _Faults:
    """Counts device jobs by kind and answers with the fault due."""

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        self._due: dict[tuple[str, int], str] = {(f.kind, f.nth): f.code for f in faults}
        self._seen: dict[str, int] = {}
        self._dead = False

    def before(self, kind: str) -> RotaError | None:
        if self._dead:
            return DeviceError("dead", code="device-dead")
        nth = self._seen.get(kind, 0)
        self._seen[kind] = nth + 1
        code = self._due.get((kind, nth))
        if code is None:
            return None
        if kind == "row":
            return RequestError("injected", code=code)
        self._dead = code == "device-dead"
        return DeviceError("injected", code=code)


class _StopAfter:
    """A text sink that matches a stop string after some tokens."""

    def __init__(self, tokens: int) -> None:
        self._left = tokens

    def push(self, token: int) -> tuple[str, bool]:
        self._left -= 1
        return "x", self._left == 0

    def finish(self) -> str:
        return ""


def _prompt(ask: Ask, seq: int) -> tuple[int, ...]:
    """The topic's text as far as it is shared, then the request's own."""
    shared = [(ask.topic * 31 + i) % 997 for i in range(ask.shared)]
    return (*shared, *((seq + i) % 997 for i in range(ask.shared, ask.prompt)))


class SimWorld:
    """A scenario being run. ``observers`` see every event with its effects and time."""

    def __init__(
        self,
        scenario: Scenario,
        observers: tuple[Observer, ...] = (),
        core: Callable[..., Core] = Core,
    ) -> None:
        self.scenario = scenario
        config = scenario.config
        self.core = core(config)
        faults = SimFaults(_Faults(scenario.faults).before)
        kv = SimKV(config.block_size)
        states = SimStates(config.max_running, config.snapshots) if config.recurrent else None
        self.executor = SimExecutor(
            config.max_loras,
            faults,
            kv,
            config.block_size,
            states,
            arena_bytes=config.arena_bytes,
        )
        self.thread = SimThread(self._cost)
        self.stager = SimStager(lambda: self.executor.max_rank)
        self.ledger = Ledger(
            config,
            self._content,
            clock_may_jump=any(isinstance(a, Jump) for a in scenario.actions),
            retires_work=not any(f.kind == "retire" or "dead" in f.code for f in scenario.faults),
        )
        self.pins = Pins(self.ledger.need)
        self.observers = observers
        self._moment, self._at_once = 0.0, 0
        self.events = 0
        self.shell: Shell
        self._waiting: dict[int, str] = {}
        self._dead_names = {
            a.name
            for a in scenario.actions
            if isinstance(a, Do) and a.source is not None and a.source.seconds > 1e6
        }
        self._shut = False

    def _content(self, slot: int) -> str | None:
        contents = self.executor.contents
        return contents[slot] if slot < len(contents) else None

    # the device's cost model --------------------------------------------------------------------
    def _cost(self, job: Any) -> float:
        s = self.scenario
        if job.func == self.executor.step:
            rows = job.args[0]
            return s.step_s + s.row_s * len(rows) + s.token_s * sum(len(r.tokens) for r in rows)
        if job.func in (self.executor.spill, self.executor.restore):
            return s.commit_s / 2
        return s.commit_s if job.func == self.executor.commit else 1e-5

    def _observe(self, event: ev.Event, effects: list[fx.Effect], now: float) -> None:
        self.events += 1
        self._at_once = self._at_once + 1 if now == self._moment else 0
        self._moment = now
        if self._at_once > _MOST_AT_ONCE:
            self.ledger.broken("livelock", f"{self._at_once} events while no time passes")
            raise InternalError("the core goes round in circles", code="livelock")
        self.ledger.see(event, effects, now)
        self.pins.see(event, effects, self.core.stats)
        for observer in self.observers:
            observer(event, effects, now)
        self.core.check()

    # the run ------------------------------------------------------------------------------------
    async def run(self, jump: Callable[[float], None]) -> Outcome:
        self.shell = Shell(self.core, self.executor, self.thread, self.stager, self._observe)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.thread.run)
            await tasks.start(partial(self.shell.run))
            async with anyio.create_task_group() as callers:
                start = anyio.current_time()
                for index, action in enumerate(self.scenario.actions):
                    await anyio.sleep_until(start + action.at)
                    self._act(callers, index, action, jump)
                await self._rest(callers)
            await self._close()
            self.thread.stop()
        self._after_close()
        stats = self.core.stats()
        broken = self.ledger.violations
        seconds = self.ledger.now
        return Outcome(
            broken[0] if broken else None, self.events, stats.steps, stats.tokens, seconds
        )

    def _act(self, callers: Any, index: int, action: Any, jump: Callable[[float], None]) -> None:
        match action:
            case Ask():
                self._waiting[index] = (
                    f"request {index} for {'default' if action.default else action.adapter}"
                )
                callers.start_soon(self._ask, index, action)
            case Do():
                self._waiting[index] = f"command {index}: {action.verb} {action.name}"
                callers.start_soon(self._do, index, action)
            case Jump(_, seconds):
                jump(seconds)
            case Shut():
                self._shut = True
                self.shell.close()

    async def _rest(self, callers: Any) -> None:
        """Wait until all are served; whoever still waits at the limit is stuck."""
        with anyio.move_on_after(self.scenario.limit_s):
            while self._waiting or not self._quiet():
                if self.shell.closed.is_set() and not self._waiting:
                    break
                await anyio.sleep(0.5)  # virtual
        excused = bool(self._dead_names)
        if self._waiting and not (excused and self._only_dead()):
            self.ledger.broken("stuck", "; ".join(self._waiting.values()))
        if not self._waiting and self._quiet() and not self.shell.closed.is_set():
            sources = set(self.shell._sources)
            rest.at_rest(self.ledger, self.core.stats(), set(self.stager.images), sources)
        self.shell.close()

    def _only_dead(self) -> bool:
        dead = {n for n in self._dead_names if n is not None}
        return all(
            text.endswith(" default") or any(text.endswith(f" {name}") for name in dead)
            for text in self._waiting.values()
        )

    def _quiet(self) -> bool:
        return self.core.idle() and self.thread.join(0.0) and not self.shell._openings

    async def _close(self) -> None:
        with anyio.CancelScope(shield=True):
            self.shell.close()
            with anyio.move_on_after(60.0) as scope:
                await self.shell.closed.wait()
            if scope.cancelled_caught:
                self.ledger.broken("close", "closing does not end")
                self.shell.abort("the simulated engine did not close")

    def _after_close(self) -> None:
        ledger, shell = self.ledger, self.shell
        if shell.broken is not None:
            ledger.broken("invariant", str(shell.broken))
            return
        ledger.need(ledger.closed, "close", "no Closed effect")
        ledger.need(not self.executor.open, "leak", "sequences open on the device")
        ledger.need(not self.executor.spilled, "leak", "sequences in host memory")
        ledger.need(not (shell._streams or shell._pending), "leak", "streams or commands")
        ledger.need(not shell._openings, "leak", "openings")
        stats = self.core.stats()
        ledger.need(stats.blocks_free == stats.blocks_total, "leak", "blocks after close")
        ledger.need(not any(s.leases for s in stats.slots), "leak", "leases after close")
        ledger.need(not stats.snapshots_kept, "leak", "snapshots after close")
        states = self.executor.states
        ledger.need(states is None or not (states.held or states.spilled), "leak", "states")
        if not any(isinstance(a, Jump) for a in self.scenario.actions):
            s = self.scenario
            widest = s.step_s + s.row_s * s.config.max_running
            step = widest + s.token_s * s.config.max_step_tokens
            names = {a.name for a in s.actions if isinstance(a, Do) and a.name is not None}
            stories = {name: self.core.story(f"adapter {name}") for name in sorted(names)}
            most = max(s.config.max_loras, *ledger.slot_counts)
            slots = [self.core.story(f"slot {i}") for i in range(most)]
            slack = (1 + s.config.step_depth) * step + s.commit_s * (s.config.max_loras + 1) + 0.01
            waits.check(ledger, stories, slots, slack)

    # callers ------------------------------------------------------------------------------------
    async def _ask(self, index: int, ask: Ask) -> None:
        shell = self.shell
        try:
            outlet, streams = Outlet(), []
            for sample in range(ask.samples):
                text = _StopAfter(1 + int(ask.leave_after * 20)) if ask.leave == "stop" else None
                seq = shell.new_id()
                streams.append(Stream(seq, text, shell.stop_matched, outlet, sample))
            seq, *siblings = (stream.seq for stream in streams)
            deadline = None if ask.deadline_s is None else anyio.current_time() + ask.deadline_s
            event = ev.Submit(
                seq,
                _prompt(ask, seq),
                ask.adapter,
                ask.default,
                ask.tokens,
                priority=ask.priority,
                deadline=deadline,
                siblings=tuple(siblings),
            )
            shell.submit_samples(event, [(stream, None) for stream in streams])
            await self._read(Generation(shell, *streams), ask)
        except RotaError:
            pass  # refused or ended by name; the ledger has seen it
        finally:
            del self._waiting[index]

    async def _read(self, generation: Generation, ask: Ask) -> None:
        leave_at = anyio.current_time() + ask.leave_after
        reading = ask.leave in ("", "stop")
        got: list[Any] = []
        with anyio.CancelScope(deadline=float("inf") if reading else leave_at):
            async for event in generation:
                got.append(event)
                if ask.leave == "cancel" and anyio.current_time() >= leave_at:
                    generation.cancel()
        if ask.leave == "drop":
            del generation
            gc.collect(0)
            await anyio.lowlevel.checkpoint()
        for sample in range(ask.samples):
            self._judge([e for e in got if e.sample == sample], ask, reading)

    def _judge(self, got: list[Any], ask: Ask, complete: bool) -> None:
        """What the caller saw: in order, of one version, ended by exactly one reason."""
        need = self.ledger.need
        tokens = [e for e in got if e.token_id is not None]
        need([e.index for e in tokens] == list(range(len(tokens))), "order", "caller's indexes")
        need(len({e.adapter_id for e in tokens}) <= 1, "one version", "caller saw two versions")
        ends = [e for e in got if e.finish_reason is not None]
        need(len(ends) <= 1 and (not ends or ends[0] is got[-1]), "ends once", "caller's ends")
        if complete:
            need(len(ends) == 1, "ends once", "a complete read without a reason")
            need(len(tokens) <= ask.tokens, "limit", "more tokens than asked for")
        for event in tokens:
            content = self.ledger.content.get(event.adapter_id, BASE)
            right = event.token_id == token_of(content, ask.prompt + event.index)
            need(right, "right weights", f"caller's token {event.index} is not {content}'s")

    async def _do(self, index: int, do: Do) -> None:
        try:
            with anyio.move_on_after(do.cancel_after):
                await self.shell.command(partial(self._command, do))
        except RotaError:
            pass
        finally:
            del self._waiting[index]

    def _command(self, do: Do, ident: int) -> ev.Command:
        name = do.name or ""
        source = -1
        if do.source is not None:
            source = self.shell.source_id(source_of(do.source))
        optional = source if do.source is not None else None
        match do.verb:
            case "load":
                return ev.Load(ident, name, source, do.pin)
            case "register":
                return ev.Register(ident, name, source)
            case "replace":
                return ev.Replace(ident, name, source)
            case "promote":
                return ev.Promote(ident, name, optional)
            case "prefetch":
                return ev.Prefetch(ident, name, optional)
            case "swap":
                return ev.Swap(ident, name, source, do.slot)
            case "rotate":
                return ev.Rotate(ident, do.name)
            case "unload":
                deadline = anyio.current_time() + do.deadline_s
                return ev.Unload(ident, name, deadline, do.cancel_late)
            case "resize":
                deadline = anyio.current_time() + do.deadline_s
                return ev.Resize(ident, do.slot, do.rank, deadline)
            case "pin" | "unpin":
                return ev.Pin(ident, name, do.verb == "pin")
            case _:
                raise RequestError("no such verb", code="sim-verb", found=do.verb)


def run_scenario(
    scenario: Scenario, observers: tuple[Observer, ...] = (), core: Callable[..., Core] = Core
) -> Outcome:
    """Run to the end in virtual time; the same scenario gives the same outcome and events."""
    world = SimWorld(scenario, observers, core)
    return run_virtual(world.run, scenario.backend, scenario.seed)
