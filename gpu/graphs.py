"""Captured steps, kept by what they really bake in: a cache of execs for one device and stream.

What it owns: every exec it made, until it is evicted, drained or the cache is closed. A graph bakes
addresses and shapes: the padded number of rows and whether the LoRA kernels are in it. It does not
bake adapters: kernels find those through tables at fixed addresses, so swaps keep graphs valid;
whoever moves the tables or the pool drains the cache first.

Invariants: a capture that fails for any reason is aborted and leaves nothing behind; at most
``limits[kind]`` execs of a kind are alive, the least recently used goes first; `drain` destroys
every handle and goes on after failures, and a handle the device would not destroy is asked for
again at the next drain. Used by the device thread only.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from ..errors import DeviceError
from .device import Device, Exec, Graph, Stream

log = logging.getLogger("rota.gpu.graphs")

Kind = Literal["decode", "verify", "fused"]
"""Decode rows; rows that verify drafts; both in one step."""
Case = Literal["none", "routed", "affine", "tokens"]
"""Only base rows (no LoRA kernel in the graph), a slot for each row, that with the vectors of DoRA
and biases, or all of it with the deltas of embed_tokens and lm_head."""

BUCKETS: Final = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Padded batch sizes; rows that only pad have slot -1."""
LIMITS: Final[Mapping[Kind, int]] = MappingProxyType(
    {"decode": 2 * len(BUCKETS), "verify": 16, "fused": 16}
)


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What a graph bakes.

    Attributes:
        kind: which step.
        rows: padded rows.
        case: the kernels in it.
        width: tokens a row feeds (1 for decode, drafts + 1 for verify).
        span: KV blocks of each row that its attention covers; 0 where the kernels find that out.
    """

    kind: Kind
    rows: int
    case: Case
    width: int = 1
    span: int = 0


def bucket_of(rows: int, buckets: tuple[int, ...] = BUCKETS) -> int | None:
    """The smallest bucket that holds this many rows; ``None`` if there is none: run eagerly."""
    return next((bucket for bucket in buckets if bucket >= rows), None)


def case_of(slots: list[int] | tuple[int, ...]) -> Case:
    """``routed`` if any row has an adapter."""
    return "routed" if any(slot >= 0 for slot in slots) else "none"


class GraphCache:
    """Graphs of one device, captured on first use.

    Args:
        device: that captures and replays.
        limits: execs of each kind that may be alive, at least 1.

    Raises:
        DeviceError: bad-argument, for a limit below 1 or a kind without one.
    """

    def __init__(self, device: Device, limits: Mapping[Kind, int] = LIMITS) -> None:
        for kind in LIMITS:
            if limits.get(kind, 0) < 1:
                raise DeviceError(
                    "bad graph limit",
                    code="bad-argument",
                    subject=kind,
                    expected=">= 1",
                    found=limits.get(kind),
                )
        self._device = device
        self._limits = dict(limits)
        self._execs: dict[Kind, OrderedDict[GraphKey, Exec]] = {
            kind: OrderedDict() for kind in LIMITS
        }
        self._undead_graphs: list[Graph] = []
        self._undead_execs: list[Exec] = []
        self.captures = 0
        """Captures that succeeded, ever."""

    def __len__(self) -> int:
        return sum(len(table) for table in self._execs.values())

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._execs[key.kind]

    def run(self, key: GraphKey, stream: Stream, record: Callable[[], None]) -> None:
        """Replay the graph of ``key`` on the stream; capture it first if there is none.

        Args:
            key: what the recorded work bakes in; equal keys must record equal work.
            stream: captures and replays.
            record: queues the work on the stream; it must not allocate or wait, and runs only when
                the graph is captured.

        Raises:
            DeviceError: what capture, instantiation or replay raises; then no capture is active and
                the key is not cached (a failed replay drops its exec).
            Exception: what ``record`` raises, after the capture was aborted.
        """
        table = self._execs[key.kind]
        graph_exec = table.get(key)
        if graph_exec is None:
            graph_exec = self._capture(stream, record)
            table[key] = graph_exec
            self.captures += 1
        else:
            table.move_to_end(key)
        try:
            self._device.replay(graph_exec, stream)
        except DeviceError:
            # Whatever it touched is gone or the device is: never offer it again.
            del table[key]
            self._destroy_exec(graph_exec)
            raise
        while len(table) > self._limits[key.kind]:
            _, oldest = table.popitem(last=False)
            self._destroy_exec(oldest)

    def _capture(self, stream: Stream, record: Callable[[], None]) -> Exec:
        device = self._device
        device.begin_capture(stream)
        try:
            record()
            graph = device.end_capture(stream)
        except BaseException as error:
            try:
                device.abort_capture_if_active(stream)
            except DeviceError as second:
                error.add_note(f"and the capture could not be aborted: {second}")
            raise
        try:
            graph_exec = device.instantiate(graph)
        finally:
            self._destroy_graph(graph)
        try:
            device.upload(graph_exec, stream)
        except BaseException:
            self._destroy_exec(graph_exec)
            raise
        return graph_exec

    def drain(self) -> int:
        """Destroy every exec; the number of handles the device would not destroy (they are kept).

        Finish the work that replays them first, or let the stream do: a queued replay still runs.
        """
        graphs, self._undead_graphs = self._undead_graphs, []
        execs, self._undead_execs = self._undead_execs, []
        for table in self._execs.values():
            execs += table.values()
            table.clear()
        for graph in graphs:
            self._destroy_graph(graph)
        for graph_exec in execs:
            self._destroy_exec(graph_exec)
        return len(self._undead_graphs) + len(self._undead_execs)

    def _destroy_graph(self, graph: Graph) -> None:
        try:
            self._device.destroy_graph(graph)
        except DeviceError as error:
            log.warning("a graph was not destroyed: %s", error)
            if error.code not in ("device-closed", "destroyed-handle"):
                self._undead_graphs.append(graph)

    def _destroy_exec(self, graph_exec: Exec) -> None:
        try:
            self._device.destroy_exec(graph_exec)
        except DeviceError as error:
            log.warning("an exec was not destroyed: %s", error)
            if error.code not in ("device-closed", "destroyed-handle"):
                self._undead_execs.append(graph_exec)
