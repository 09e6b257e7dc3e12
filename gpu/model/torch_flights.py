"""Steps in flight on an accelerator: queued one behind the other, answered in the same order.

What it owns: the flights, two at most, the event behind each of them, and what a step that could
not be queued whole left behind. Invariants: what a step reads of the host's memory lies in a pinned
twin of its own, and is written again only when that step is over; results are read only behind
their step's event; a flight is settled behind those before it; if one fails, so do all behind it,
by the same name, and the next step waits for the stream first; a step whose choices need the host
(`on_device`), or whose logits somebody wants to see, is settled before anything else is queued.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from ...errors import DeviceError, RotaError
from ..device import Device, Event, Stream
from ..tensors import TensorSpace
from .adapters import Adapters, slots_of
from .batch import StepBatch
from .contract import (
    LogitsSink,
    OpenSequences,
    answers,
    named_failure,
    not_open,
    nothing_fed,
)
from .rows import RowLike, RowOutput
from .sampling import Choice, Sampler
from .states import StateArena
from .torch_batch import TWINS
from .torch_sampling import choice_of, on_device
from .torch_step import StepRunner


class StepFlight:
    """One step, queued. Made by `Flights.begin`.

    Args:
        rows: of the step.
        places: for each row that samples, its row of the logits.
        samplers: for each row that samples; ``None`` where its sequence is not open.
        unfed: rows that were fed a sample known not to be there.
        fed: (row, row of ``source``) of rows that the step before feeds.
        twin: of the pinned blocks.
    """

    def __init__(
        self,
        flights: Flights,
        rows: Sequence[RowLike],
        places: dict[int, int],
        samplers: Sequence[Sampler | None],
        unfed: Sequence[int],
        fed: Sequence[tuple[int, int]],
        source: StepFlight | None,
        twin: int,
    ) -> None:
        self._flights = flights
        self.rows, self.places, self.samplers = rows, places, samplers
        self.unfed, self.fed, self.source, self.twin = unfed, fed, source, twin
        self.logits: torch.Tensor | None = None
        self.outputs: list[RowOutput] | None = None
        self.error: RotaError | None = None

    @property
    def settled(self) -> bool:
        """True once `finish` does not wait."""
        return self.outputs is not None or self.error is not None

    def finish(self) -> list[RowOutput]:
        """The step's answer, in row order; waits for the step, and may be called again.

        Raises:
            DeviceError: what the device raised while the step, or one before it, ran;
                runner-closed.
        """
        self._flights.settle(self)
        if self.error is not None:
            raise self.error
        assert self.outputs is not None
        return self.outputs


class Flights:
    """Queues steps and settles them; see the module.

    Args:
        steps: closed by the caller, as are ``batch``'s and ``states``' owners.

    Raises:
        DeviceError: what `create_event` raises.
    """

    def __init__(
        self,
        device: Device,
        space: TensorSpace,
        stream: Stream,
        batch: StepBatch,
        sequences: OpenSequences,
        states: StateArena | None,
        steps: StepRunner,
    ) -> None:
        self._device, self._space, self._stream = device, space, stream
        self._batch, self._sequences, self._states = batch, sequences, states
        self._steps = steps
        self._flying: deque[StepFlight] = deque()
        self._last: StepFlight | None = None
        self._twin = 0
        # What was queued last may read arrays that the next step fills, and would then run on its
        # rows: a step failed before all of it was queued, or while it ran.
        self._astray = False
        self._events: list[Event] = []
        try:
            for _ in range(TWINS):
                self._events.append(device.create_event(label="step done"))
        except DeviceError:
            self.close()
            raise

    def begin(
        self, rows: Sequence[RowLike], adapters: Adapters | None, sink: LogitsSink | None
    ) -> StepFlight:
        """Queue one step behind those in flight. Raises as `TorchRunner.step`."""
        twin = self._twin
        with torch.inference_mode(), named_failure(), self._space.computing(self._stream):
            for flight in [one for one in self._flying if one.twin == twin]:
                self.settle(flight)
            if self._astray:
                self._device.synchronize(self._stream)
                self._astray = False
            # Whatever goes wrong from here on, nobody is fed by the step before this one.
            source, self._last = self._last, None
            n, slots = self._fill(rows, adapters, source)
            over = nothing_fed(rows, self._batch)
            if over is not None:
                return self._over(rows, over)
            flight = self._queue(rows, n, slots, source, twin)
            self._twin = 1 - twin
            host = [s for s in flight.samplers if s is not None and not on_device(s)]
            if host or sink is not None:
                self.settle(flight)
        if sink is not None and flight.logits is not None and flight.error is None:
            seqs = [row.seq for row in rows if row.sample]
            sink(seqs, flight.logits.cpu()[list(flight.places.values())])
        flight.logits = None
        return flight

    def _fill(
        self, rows: Sequence[RowLike], adapters: Adapters | None, source: StepFlight | None
    ) -> tuple[int, frozenset[int]]:
        n = self._batch.fill(rows)
        slots = slots_of(adapters, rows)
        if source is not None and self._batch.fed and self._steps.needs_tokens(slots):
            self.settle(source)
            self._batch.sampled(source.outputs or ())
            n = self._batch.fill(rows)
        return n, slots

    def _over(self, rows: Sequence[RowLike], outputs: list[RowOutput]) -> StepFlight:
        flight = StepFlight(self, rows, {}, (), (), (), None, self._twin)
        flight.outputs = outputs
        self._last = flight
        return flight

    def _queue(
        self,
        rows: Sequence[RowLike],
        n: int,
        slots: frozenset[int],
        source: StepFlight | None,
        twin: int,
    ) -> StepFlight:
        batch, states, steps = self._batch, self._states, self._steps
        sampling = [i for i, row in enumerate(rows) if row.sample]
        samplers = self._sequences.samplers([rows[i].seq for i in sampling])
        fed, unfed = batch.fed, batch.unfed
        from_source = [] if source is None else [(row, source.places[i]) for row, i in fed]
        if states is not None:
            states.begin(rows)
        self._astray = True
        logits, rows_of_logits = steps.run(rows, n, slots, sampling, from_source, twin)
        places = dict(zip(sampling, rows_of_logits, strict=True))
        if logits is not None:
            chosen = [
                (s, at) for s, at in zip(samplers, places.values(), strict=True) if s is not None
            ]
            steps.sampler.draw(
                [s for s, _ in chosen],
                [at for _, at in chosen],
                logits,
                twin=twin,
                stream=self._stream,
            )
        if states is not None:
            states.save(rows)
        self._space.join(self._stream)
        steps.arrays.fetch(twin, self._stream)
        self._device.record_event(self._events[twin], self._stream)
        self._astray = False
        if states is not None:
            states.done(rows)
        batch.queued(rows)
        source = source if fed else None
        flight = StepFlight(self, rows, places, samplers, unfed, fed, source, twin)
        flight.logits = logits
        self._flying.append(flight)
        self._last = flight
        return flight

    def settle(self, flight: StepFlight) -> None:
        """Wait for a flight, and for those before it. What went wrong is theirs to tell."""
        while not flight.settled:
            first = self._flying[0]
            try:
                with named_failure():
                    outputs = self._answer(first)
            except RotaError as error:
                self.fail(error)
                return
            self._flying.popleft()
            first.outputs, first.source = outputs, None
            if first is self._last:
                self._batch.sampled(outputs)

    def _answer(self, flight: StepFlight) -> list[RowOutput]:
        self._device.synchronize_event(self._events[flight.twin])
        tokens, peaks = self._steps.arrays.choices(flight.twin)
        by_host = iter(self._host_choices(flight))
        choices: list[Choice] = []
        places = flight.places.items()
        for (row, place), sampler in zip(places, flight.samplers, strict=True):
            if sampler is None:
                choices.append(not_open(flight.rows[row].seq))
            elif on_device(sampler):
                choices.append(choice_of(sampler, tokens[place], peaks[place]))
            else:
                choices.append(next(by_host))
        lost = []
        if flight.source is not None:
            made = flight.source.outputs
            lost = [row for row, i in flight.fed if made is None or made[i].token < 0]
            if lost and self._states is not None:
                self._states.failed([flight.rows[row] for row in lost])
        return answers(flight.rows, choices, [*flight.unfed, *lost])

    def _host_choices(self, flight: StepFlight) -> list[Choice]:
        mine = [
            (s, at)
            for s, at in zip(flight.samplers, flight.places.values(), strict=True)
            if s is not None and not on_device(s)
        ]
        if not mine:
            return []
        assert flight.logits is not None
        samplers, places = [s for s, _ in mine], [at for _, at in mine]
        return self._steps.sampler.on_host(samplers, places, flight.logits, self._stream)

    def fail(self, error: RotaError) -> None:
        """Everything in flight fails."""
        for flight in self._flying:
            flight.error, flight.source, flight.logits = error, None, None
            if self._states is not None:
                self._states.failed(flight.rows)
        self._flying.clear()
        self._last, self._astray = None, True
        self._batch.sampled([])

    def close(self) -> None:
        """Destroy the events, once; what is in flight fails. End the stream's work first."""
        self.fail(DeviceError("the runner is closed", code="runner-closed"))
        events, self._events = self._events, []
        with ExitStack() as stack:
            for event in events:
                stack.callback(self._device.destroy_event, event)
