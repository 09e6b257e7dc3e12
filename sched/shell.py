"""The shell: runs the core's effects and feeds completions back as events.

One loop task owns the core. Calls from the loop's own thread (submit, commands, cancel) are handled
at once and without a checkpoint, so they are atomic; completions from the device thread and the
staging workers arrive as events. After each turn the core is asked to plan. Owns the streams, the
waiting commands and the sources; decides nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import anyio
import anyio.abc
import msgspec

from ..errors import EngineClosedError, RotaError
from .core import effects as fx
from .core import events as ev
from .core.core import Core
from .failures import of_device, to_error, to_failure
from .seen import Seen
from .staging import StageRunner, source_key
from .streams import Stream
from .timings import Timings
from .wake import loop_poster
from .worker import Beside, Executor, JobQueue, OutputLike, Relaid, StepJobs, ignore

_log = logging.getLogger("rota.sched.shell")


class Pending:
    """A command somebody waits for."""

    __slots__ = ("done", "error", "reply", "report")

    def __init__(self) -> None:
        self.done = anyio.Event()
        self.reply: fx.Reply | None = None
        self.report: Any = None
        self.error: RotaError | None = None


class Opening(msgspec.Struct, frozen=True):
    """What the runner needs to open a sequence."""

    prompt: tuple[int, ...]
    sampling: Any


class Shell:
    """See the module. ``run`` is the loop task; everything else is called on the loop's thread."""

    def __init__(
        self,
        core: Core,
        executor: Executor,
        thread: JobQueue,
        stager: StageRunner,
        observer: Callable[[ev.Event, list[fx.Effect], float], None] | None = None,
    ) -> None:
        self._core = core
        self._executor = executor
        self._thread = thread
        self._steps = StepJobs(executor, thread)
        self._stager = stager
        self._observer = observer
        self._post = loop_poster()
        self._inbox: list[ev.Event] = []
        self._wake = anyio.Event()
        self._tasks: anyio.abc.TaskGroup | None = None
        self._streams: dict[int, Stream] = {}
        self._openings: dict[int, Opening] = {}
        self._pending: dict[int, Pending] = {}
        #: Sources by id, and ids by place. A place is kept as it was when its source was named: a
        #: link may point elsewhere by the time the source is dropped.
        self._sources: dict[int, Any] = {}
        self._places: dict[int, object] = {}
        self._source_ids: dict[object, int] = {}
        self._outputs: tuple[int, list[OutputLike]] = (0, [])
        self._touched: dict[int, Stream] = {}
        self._last_id = 0
        self._floor = 0.0
        self.timings = Timings(time.perf_counter)
        self.seen = Seen(lambda name: core.source_of(name) is not None)
        self.closed = anyio.Event()
        self.broken: RotaError | None = None

    # calls from the loop's thread ---------------------------------------------------------------
    def new_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def submit(self, event: ev.Submit, stream: Stream, sampling: Any) -> None:
        """Take a request; its tokens and its end come through ``stream``."""
        self.submit_samples(event, [(stream, sampling)])

    def submit_samples(self, event: ev.Submit, samples: Sequence[tuple[Stream, Any]]) -> None:
        """Take a request for several samples: the stream and sampling of ``event.seq``, then of
        each sibling in order."""
        self._refuse_if_over()
        for stream, sampling in samples:
            self._streams[stream.seq] = stream
            self._openings[stream.seq] = Opening(event.prompt, sampling)
        self._turn(event)

    def cancel(self, seq: int) -> None:
        """Nobody reads this sequence any more. Harmless if it has ended."""
        if seq in self._streams and not self.closed.is_set():
            self._turn(ev.Cancel(seq))

    def cancel_soon(self, seq: int) -> None:
        """:meth:`cancel`, from any thread or a finalizer."""
        self._post(partial(self.cancel, seq))

    async def command(self, make: Callable[[int], ev.Command]) -> Pending:
        """Send a command and wait for its answer. Cancelled: the work goes on, unheard."""
        self._refuse_if_over()
        ident = self.new_id()
        pending = self._pending[ident] = Pending()
        try:
            self._turn(event := make(ident))
            if isinstance(event, ev.Unload):  # now: its answer may come after the name is new again
                self.seen.check(event.name)
            await pending.done.wait()
        finally:
            if self._pending.pop(ident, None) is not None and not self.closed.is_set():
                self._turn(ev.CancelCommand(ident))
        if pending.error is not None:
            raise pending.error
        return pending

    def source_id(self, source: Any) -> int:
        """An id for ``source``; the same place has the same id. To be used at once, in the same
        synchronous call that hands it to the core."""
        key = source_key(source)
        ident = self._source_ids.get(key)
        if ident is None:
            ident = self._source_ids[key] = self.new_id()
            self._places[ident] = key
        self._sources[ident] = source
        return ident

    def close(self) -> None:
        """Begin to close; :attr:`closed` is set when everything has ended."""
        if not self.closed.is_set():
            self._turn(ev.Close())

    def abort(self, why: str) -> None:
        """The device does not answer: end everything by name without waiting for it."""
        self._break(EngineClosedError(why, code="close-timeout"))

    def _refuse_if_over(self) -> None:
        if self.broken is not None:
            raise self.broken
        if self.closed.is_set():
            raise EngineClosedError("the engine is closed")

    # the loop -----------------------------------------------------------------------------------
    async def run(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Serve until closed. Never raises for a request's, adapter's or device's fault.

        Shielded: only :meth:`close` ends it, so that a cancelled embedder still gets an orderly
        end of every stream, stage and lease.
        """
        with anyio.CancelScope(shield=True):
            try:
                async with anyio.create_task_group() as self._tasks:
                    task_status.started()
                    await self._loop()
            finally:
                self._tasks = None
                self.closed.set()

    async def _loop(self) -> None:
        while not self.closed.is_set():
            self._turn(ev.Plan())
            if self.closed.is_set():
                return
            self._steps.planned(self._core.steps_in_flight)
            wake_at = self._core.next_wake()
            if self._inbox:
                continue
            if wake_at is None:
                await self._wake.wait()
            else:
                with anyio.move_on_after(max(0.0, wake_at - anyio.current_time())):
                    await self._wake.wait()
                if not self._wake.is_set():
                    # Loops may fire a timer a clock tick early; the core must not see that, or it
                    # would ask for the same moment again and again.
                    self._floor = wake_at
                    self._turn(ev.Tick())
            self._wake = anyio.Event()

    def _turn(self, event: ev.Event) -> None:
        """Handle one event and everything it posts, then let the loop plan."""
        self._inbox.append(event)
        try:
            while self._inbox:
                self._handle(self._inbox.pop(0))
            touched, self._touched = self._touched, {}
            for stream in touched.values():
                stream.flush()
        except Exception as error:  # a bug in rota: nothing after it can be trusted
            self._break(error)
        if not isinstance(event, ev.Plan):
            self._wake.set()

    def _handle(self, event: ev.Event) -> None:
        now = max(self._floor, anyio.current_time())
        effects = self._core.handle(event, now)
        if self._observer is not None:
            self._observer(event, effects, now)
        for effect in effects:
            self._carry_out(effect)

    def _break(self, error: BaseException) -> None:
        """A bug in rota, or a device that does not answer: everything ends, by name, once."""
        _log.error("the engine stops serving", exc_info=error)
        self.broken = to_error(to_failure(error))
        self._inbox.clear()
        self._stager.abandon_all()
        for stream in list(self._streams.values()):
            if not stream.ended:
                stream.push_end("error", 0, self.broken)
        self._streams.clear()
        for pending in list(self._pending.values()):
            pending.error = self.broken
            pending.done.set()
        self.closed.set()
        self._wake.set()

    # effects ------------------------------------------------------------------------------------
    def _carry_out(self, effect: fx.Effect) -> None:
        match effect:
            case fx.Token():
                self._token(effect)
            case fx.RunStep(step, rows):
                self._steps.put(rows, partial(self._step_over, step))
            case fx.Ended():
                self._ended(effect)
            case fx.OpenSequence(seq):
                opening = self._openings.pop(seq)
                opened = Beside(self._executor.open_sequence, seq, opening.prompt, opening.sampling)
                self._device(opened, partial(self._open_over, seq))
            case fx.CloseSequence(seq):
                self._device(Beside(self._executor.close_sequence, seq), ignore)
            case fx.Spill(seq, blocks):
                job = partial(self._executor.spill, seq, blocks)
                self._device(job, partial(self._copied, seq, ev.SpillDone, ev.SpillFailed))
            case fx.Restore(seq, places):
                job = partial(self._executor.restore, seq, places)
                self._device(job, partial(self._copied, seq, ev.RestoreDone, ev.RestoreFailed))
            case fx.DropState(seq):
                self._device(Beside(self._executor.drop_state, seq), ignore)
            case fx.Commit(commit, slot, image, _, _, extent):
                made = self._stager.images[image].image
                write = self.timings.commit(partial(self._executor.commit, slot, made, extent))
                self._device(write, partial(self._commit_over, commit))
            case fx.Retire(slot):
                self._device(partial(self._executor.retire, slot), ignore)
            case fx.Relayout(max_loras, max_rank, residents):
                relayout = partial(self._executor.relayout, max_loras, max_rank, residents)
                self._device(relayout, self._relayout_over)
            case fx.StartStage(stage, name, source):
                assert self._tasks is not None
                self._tasks.start_soon(self._stage, stage, name, self._sources[source])
            case fx.CancelStage(stage):
                self._stager.cancel(stage)
            case fx.DropImage(image):
                self._stager.drop(image)
            case fx.DropSource(source):
                self._drop_source(source)
            case fx.Reply():
                self._reply(effect)
            case fx.Closed():
                self.closed.set()
                self._wake.set()

    def _token(self, effect: fx.Token) -> None:
        stream = self._streams.get(effect.seq)
        if stream is None:
            return
        output = self._outputs[1][effect.row]
        stream.push_token(effect.token, effect.adapter_id, output.logprob, output.top)
        self._touched[effect.seq] = stream

    def _ended(self, effect: fx.Ended) -> None:
        self._openings.pop(effect.seq, None)
        stream = self._streams.pop(effect.seq, None)
        if stream is not None:
            error = to_error(effect.failure) if effect.failure is not None else None
            stream.push_end(effect.reason, effect.adapter_id, error)

    def _reply(self, effect: fx.Reply) -> None:
        pending = self._pending.pop(effect.command, None)
        self.seen.check(effect.name)  # a load that failed leaves no name
        if pending is None:
            return
        pending.reply = effect
        staged = self._stager.images.get(effect.image)
        pending.report = staged.report if staged is not None else None
        if effect.failure is not None:
            pending.error = to_error(effect.failure)
        pending.done.set()

    def _drop_source(self, source: int) -> None:
        del self._sources[source], self._source_ids[self._places.pop(source)]

    def stop_matched(self, seq: int) -> None:
        """A stream's text hit a stop string (called while a token is pushed)."""
        self._inbox.append(ev.Stop(seq))

    # completions --------------------------------------------------------------------------------
    def _device(self, job: Callable[[], Any], done: Callable[..., None]) -> None:
        """Queue a job; ``done(result, error)`` runs on the device thread."""
        self._thread.put(job, done)

    def _deliver(self, event: ev.Event) -> None:
        """From any thread."""
        self._post(partial(self._arrive, event))

    def _arrive(self, event: ev.Event) -> None:
        if not self.closed.is_set():
            self._turn(event)

    def _step_over(
        self, step: int, outputs: list[OutputLike] | None, error: BaseException | None
    ) -> None:
        if error is not None:
            self._deliver(ev.StepFailed(step, *of_device(error)))
            return
        assert outputs is not None
        rows = tuple(
            ev.RowDone(o.seq, o.token, None if o.error is None else to_failure(o.error))
            for o in outputs
        )
        event = ev.StepDone(step, rows)
        self._post(partial(self._step_arrived, outputs, event))

    def _step_arrived(self, outputs: list[OutputLike], event: ev.StepDone) -> None:
        # Log-probabilities stay outside the core; Token effects name their row.
        self._outputs = (event.step, outputs)
        self._arrive(event)

    def _open_over(self, seq: int, _: Any, error: BaseException | None) -> None:
        if error is not None:
            # The step that follows fails by itself for this row; nothing to undo.
            _log.error("opening sequence %d failed: %s", seq, error)

    def _copied(
        self,
        seq: int,
        done: type[ev.SpillDone | ev.RestoreDone],
        failed: type[ev.SpillFailed | ev.RestoreFailed],
        _: Any,
        error: BaseException | None,
    ) -> None:
        if error is None:
            self._deliver(done(seq))
        else:
            _log.warning("a copy of sequence %d failed, it is recomputed: %s", seq, error)
            self._deliver(failed(seq, *of_device(error)))

    def _commit_over(self, commit: int, _: Any, error: BaseException | None) -> None:
        if error is None:
            self._deliver(ev.CommitDone(commit))
        else:
            self._deliver(ev.CommitFailed(commit, *of_device(error)))

    def _relayout_over(self, arena: Relaid, error: BaseException | None) -> None:
        if error is None:
            self._deliver(ev.RelayoutDone(*arena))
        else:
            self._deliver(ev.RelayoutFailed(*of_device(error)))

    async def _stage(self, stage: int, name: str, source: Any) -> None:
        try:
            outcome = await self._stager.run(stage, source)
        except RotaError as error:
            self._arrive(ev.StageFailed(stage, to_failure(error)))
        except Exception as error:  # a bug in staging must not take the engine down
            _log.exception("staging failed unexpectedly")
            self._arrive(ev.StageFailed(stage, to_failure(error)))
        else:
            image = outcome.cached if outcome.cached >= 0 else stage
            self._stager.keep(image, outcome)
            self.seen.note(name, outcome.staged)
            if outcome.cached < 0:
                self.timings.staged(getattr(outcome.staged.report, "seconds", {}))
            made = outcome.staged.image
            reusable, rank = outcome.signature is not None, max(made.ranks, default=0)
            facts = (int(made.nbytes), reusable, rank, made.annex_bytes)
            self._arrive(ev.StageDone(stage, image, outcome.staged.digest, *facts))
