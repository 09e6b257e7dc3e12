"""Metrics for Prometheus: the engine's, read from its snapshot, and this face's own.

Owns the histograms and counters of one face. Invariant: the number of series is bounded: adapter
names become labels for ``metrics_adapters`` of them at most, routes and codes come from fixed sets.
The ``vllm:`` names are those of the Gateway API inference extension's model-server protocol
(its proposal 003), so that its endpoint picker reads rota as it reads vLLM.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from ..core.snapshot import Stats
from ..core.spread import EDGES_S, PHASES, Spread
from ..face import AdapterReply
from .pulse import Pulse

_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_TIMES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_LEVELS = ("device", "host", "cold")
_SLOT_STATES = ("EMPTY", "STAGING", "READY", "IN_USE", "DRAINING")


class HttpMetrics:
    """This face's own numbers."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.pulse = Pulse(time.monotonic)
        self.requests = Counter(
            "rota_http_requests",
            "Answered requests.",
            ["route", "status"],
            registry=registry,
        )
        self.seconds = Histogram(
            "rota_http_request_seconds",
            "From the first byte of a request to the last of its answer.",
            ["route"],
            buckets=_TIMES,
            registry=registry,
        )
        self.first_token = Histogram(
            "rota_time_to_first_token_seconds",
            "From a request's start to its first token.",
            buckets=_TIMES,
            registry=registry,
        )
        self.gap = Histogram(
            "rota_inter_token_seconds",
            "Between two tokens of one request.",
            buckets=_GAPS,
            registry=registry,
        )
        self._command = Histogram(
            "rota_adapter_command_seconds",
            "Adapter commands that stage, from the call to the answer.",
            buckets=_TIMES,
            registry=registry,
        )
        self.refused = Counter(
            "rota_adapter_commands_refused",
            "Adapter commands that ended in an error, by its kind.",
            ["kind"],
            registry=registry,
        )

    def tokens(self, made: int, gap_s: float | None) -> None:
        """``made`` tokens have come, ``gap_s`` seconds from one to the next (``None``: the
        first of their request)."""
        if gap_s is not None:
            self.gap.observe(gap_s)
        self.pulse.add(made, gap_s)

    def loaded(self, reply: AdapterReply) -> None:
        """An adapter command that staged something has been answered."""
        self._command.observe(reply.seconds)

    def render(self, stats: Stats | None, most: int, clock: Callable[[], float]) -> bytes:
        """The whole page; without the engine's part when it does not answer."""
        page: bytes = generate_latest(self._registry)
        if stats is None:
            return page
        registry = CollectorRegistry()
        registry.register(_Snapshot(stats, most, clock))
        return bytes(generate_latest(registry)) + page


class _Snapshot:
    """A collector over one snapshot."""

    def __init__(self, stats: Stats, most: int, clock: Callable[[], float]) -> None:
        self._stats = stats
        self._most = most
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        yield from self._protocol()
        yield from self._slots()
        yield from self._adapters()
        yield from self._prefix()
        yield from self._times()
        yield from self._totals()

    def _protocol(self) -> Iterator[Metric]:
        s = self._stats
        running = s.prefilling + s.decoding
        spare = s.blocks_free + s.blocks_cached
        used = 1.0 - spare / s.blocks_total if s.blocks_total else 0.0
        info = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters ready in the pool, adapters that wait for a slot, and the slots; the value "
            "is the time of the snapshot.",
            labels=["running_lora_adapters", "waiting_lora_adapters", "max_lora"],
        )
        resident = [a.name for a in s.adapters if a.level == "device"]
        waiting = [a.name for a in s.adapters if a.level != "device" and a.jobs]
        info.add_metric(
            [_listed(resident), _listed(waiting[: self._most]), str(len(s.slots))], self._clock()
        )
        yield info
        yield _gauge("vllm:num_requests_running", "Requests in steps.", running)
        yield _gauge("vllm:num_requests_waiting", "Requests that wait for admission.", s.waiting)
        yield _gauge("vllm:kv_cache_usage_perc", "KV memory in use, 1 is all.", used)
        yield _gauge("rota_requests_running", "Requests in steps.", running)
        yield _gauge("rota_requests_waiting", "Requests that wait for admission.", s.waiting)
        yield _gauge("rota_kv_blocks_free", "KV blocks that hold nothing.", s.blocks_free)
        yield _gauge(
            "rota_kv_blocks_cached",
            "KV blocks that hold a prefix no request reads now; given up when wanted.",
            s.blocks_cached,
        )
        yield _gauge(
            "rota_kv_blocks_spilled",
            "KV blocks of preempted requests in host memory, recurrent states counted as blocks.",
            s.spill_blocks_used,
        )
        yield _gauge(
            "rota_state_snapshots",
            "Recurrent states that a request may begin with behind a cached prefix.",
            s.snapshots_kept,
        )
        yield _gauge("rota_kv_blocks_total", "KV blocks.", s.blocks_total)

    def _slots(self) -> Iterator[Metric]:
        s = self._stats
        states = GaugeMetricFamily("rota_slots", "Slots of the pool, by state.", labels=["state"])
        for state in _SLOT_STATES:
            states.add_metric([state], sum(x.state == state for x in s.slots))
        yield states
        leases = GaugeMetricFamily("rota_slot_leases", "Leases of a slot.", labels=["slot"])
        for slot in s.slots:
            leases.add_metric([str(slot.index)], slot.leases)
        yield leases

    def _adapters(self) -> Iterator[Metric]:
        s = self._stats
        levels = GaugeMetricFamily(
            "rota_adapters", "Known adapters, by where they are.", labels=["level"]
        )
        for level in _LEVELS:
            levels.add_metric([level], sum(a.level == level for a in s.adapters))
        yield levels
        residency = GaugeMetricFamily(
            "rota_adapter_residency",
            "1 at the level an adapter is at; the nearest to the device are listed.",
            labels=["adapter", "level"],
        )
        generation = GaugeMetricFamily(
            "rota_adapter_generation", "Versions an adapter has had.", labels=["adapter"]
        )
        nearest = sorted(s.adapters, key=lambda a: _LEVELS.index(a.level))[: self._most]
        for adapter in nearest:
            residency.add_metric([adapter.name, adapter.level], 1)
            generation.add_metric([adapter.name], adapter.generation)
        yield residency
        yield generation
        yield _gauge("rota_adapter_jobs", "Adapter commands and misses under way.", s.jobs)
        yield _gauge("rota_image_cache_bytes", "Host memory of staged images.", s.image_bytes)
        hole = "Bytes of the arena that one adapter could have without an eviction."
        yield _gauge("rota_arena_bytes", "Memory of annexes.", s.arena.total)
        yield _gauge("rota_arena_used_bytes", "Memory that annexes have.", s.arena.used)
        yield _gauge("rota_arena_largest_hole_bytes", hole, s.arena.largest_hole)

    def _prefix(self) -> Iterator[Metric]:
        s = self._stats
        told = (
            ("queried", "Prompt tokens looked up in the prefix cache."),
            ("hit", "Prompt tokens read from the prefix cache instead of computed."),
        )
        busiest = sorted(s.adapters, key=lambda a: -a.prefix.queried)[: self._most]
        for field, text in told:
            value = getattr(s.prefix, field)
            yield CounterMetricFamily(f"rota_prefix_{field}_tokens", text, value=value)
            each = CounterMetricFamily(
                f"rota_adapter_prefix_{field}_tokens",
                f"{text} By adapter, base is empty; those asked for most are listed.",
                labels=["adapter"],
            )
            each.add_metric([""], getattr(s.base_prefix, field))
            for adapter in busiest:
                if adapter.prefix.queried:
                    each.add_metric([adapter.name], getattr(adapter.prefix, field))
            yield each

    def _times(self) -> Iterator[Metric]:
        times = self._stats.times
        yield _histogram(
            "rota_barrier_seconds",
            "From the decision to commit until no step was in the way.",
            [((), times.barrier)],
        )
        yield _histogram("rota_commit_seconds", "Writing a slot.", [((), times.commit)])
        yield _histogram(
            "rota_adapter_load_seconds",
            "Staging an adapter, by phase.",
            [((phase,), spread) for phase, spread in zip(PHASES, times.phases, strict=True)],
            ("phase",),
        )
        yield CounterMetricFamily(
            "rota_slot_wait_seconds",
            "What commits have waited for their slots, added up.",
            value=self._stats.slot_wait_s,
        )

    def _totals(self) -> Iterator[Metric]:
        s = self._stats
        for name, text, value in (
            ("rota_steps", "Steps run.", s.steps),
            ("rota_steps_ahead", "Steps planned while another was in flight.", s.steps_ahead),
            ("rota_wasted_rows", "Rows whose sequence ended before their step.", s.wasted_rows),
            ("rota_generated_tokens", "Tokens sampled.", s.tokens),
            ("rota_prompt_tokens", "Prompt tokens fed.", s.prompt_tokens),
            ("rota_requests_submitted", "Requests taken or refused.", s.submitted),
            ("rota_requests_ended", "Requests that ended.", s.ended),
            ("rota_preemptions", "Sequences preempted for KV memory.", s.preempted),
            ("rota_spills", "Preempted sequences copied to host memory.", s.spilled),
            ("rota_commits", "Slot images written.", s.commits),
            ("rota_stages", "Adapters staged.", s.stages),
            ("rota_stage_failures", "Stagings that failed.", s.stage_failures),
        ):
            yield CounterMetricFamily(name, text, value=value)
        evictions = CounterMetricFamily(
            "rota_evictions", "Adapters that lost their slot, by cause.", labels=["cause"]
        )
        evictions.add_metric(["idle"], s.evicted - s.overwritten - s.swapped)
        evictions.add_metric(["drained"], s.drained)
        evictions.add_metric(["swapped"], s.swapped)
        evictions.add_metric(["replaced"], s.overwritten)
        yield evictions


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _histogram(
    name: str,
    text: str,
    found: list[tuple[tuple[str, ...], Spread]],
    labels: tuple[str, ...] = (),
) -> Metric:
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, spread in found:
        below = list(itertools.accumulate(spread.counts))
        edges = [*(str(edge) for edge in EDGES_S), "+Inf"]
        family.add_metric(values, list(zip(edges, below, strict=True)), spread.total_s)
    return family


def _listed(names: list[str]) -> str:
    """A comma-separated list, as the protocol wants; a comma inside a name is written ``%2C``."""
    return ",".join(name.replace(",", "%2C") for name in names)


def wall_clock() -> float:
    """Seconds since the epoch."""
    return time.time()


def route_of(path: str, known: frozenset[str]) -> str:
    """A bounded label for a path."""
    return path if path in known else "other"
