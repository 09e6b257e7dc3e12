"""Frozen snapshots for people, metrics and tests."""

from __future__ import annotations

import msgspec

from .events import Failure
from .spread import Times
from .state import State
from .tables import SeqState


class SlotStats(msgspec.Struct, frozen=True):
    """``name`` and ``generation`` of the version the slot holds (``None``, 0 when it has none).
    ``coming``: the name it is being written or drained for. ``annex``: its bytes in the arena."""

    index: int
    state: str
    name: str | None
    generation: int
    adapter_id: int
    leases: int
    pinned: bool
    coming: str | None = None
    annex: int = 0


class ArenaStats(msgspec.Struct, frozen=True):
    """Bytes of the arena. ``largest_hole``: what one adapter could have without an eviction."""

    total: int = 0
    used: int = 0
    largest_hole: int = 0

    @property
    def free(self) -> int:
        """Bytes nobody has, side by side or not."""
        return self.total - self.used


class PrefixStats(msgspec.Struct, frozen=True):
    """Prompt tokens of admitted requests, and how many of them were read from the prefix cache."""

    queried: int = 0
    hit: int = 0


class AdapterStats(msgspec.Struct, frozen=True):
    """``level``: ``device`` (in a slot), ``host`` (image cached) or ``cold``. ``prefix``: since the
    name is known. ``doing``: the state of the name's first job (``QUEUED``, ``STAGING``,
    ``PLACING``, ``COMMITTING``), and ``job`` what it is; empty without one."""

    name: str
    generation: int
    level: str
    slot: int
    jobs: int
    prefix: PrefixStats = PrefixStats()
    doing: str = ""
    job: str = ""


class Stats(msgspec.Struct, frozen=True):
    """Counts are of now; totals (``steps`` ... ``base_prefix``) are since the start.
    ``blocks_free``: those that hold nothing; ``blocks_cached``: those of the prefix cache that no
    sequence reads, which are given up as soon as they are wanted. ``spill_blocks_used``: of
    preempted sequences, in host memory, recurrent states counted as blocks. ``snapshots_kept``, of
    ``snapshots_total``: states that a request may begin with behind a cached prefix.
    ``spilled``: those of ``preempted`` that were copied there.
    ``evicted``: versions that were overwritten in their idle slot, or had to leave the arena; of
    these ``overwritten`` by their own name's next version and ``swapped`` by a swap. ``drained``:
    busy slots that were emptied for a waiting adapter. ``slot_wait_s``: what commits have waited
    for their slots, added up. ``steps_ahead``: those of ``steps`` that were planned while another
    was in flight. ``wasted_rows``: rows whose sequence had ended before their step was over.
    ``prefix``: of all requests, ``base_prefix``: of those without an adapter. ``times``: filled
    in by who has a clock. ``dead``: why nothing is served any more, once the device is dead."""

    slots: tuple[SlotStats, ...]
    adapters: tuple[AdapterStats, ...]
    default_adapter: str | None
    waiting: int
    prefilling: int
    decoding: int
    closing: int
    jobs: int
    blocks_free: int
    blocks_cached: int
    blocks_total: int
    spill_blocks_used: int
    spill_blocks_total: int
    image_bytes: int
    steps: int
    tokens: int
    prompt_tokens: int
    submitted: int
    ended: int
    preempted: int
    spilled: int
    commits: int
    evicted: int
    drained: int
    stages: int
    stage_failures: int
    prefix: PrefixStats
    base_prefix: PrefixStats
    overwritten: int = 0
    swapped: int = 0
    slot_wait_s: float = 0.0
    snapshots_kept: int = 0
    snapshots_total: int = 0
    steps_ahead: int = 0
    wasted_rows: int = 0
    arena: ArenaStats = ArenaStats()
    times: Times = Times()
    dead: Failure | None = None


def snapshot(state: State) -> Stats:
    coming = {job.slot: job.name for job in state.commits.values()}
    for slot in state.slots.slots:
        job = state.jobs.get(slot.drained_for)
        if job is not None:
            coming[slot.index] = job.name
    slots = tuple(
        SlotStats(
            s.index,
            s.state.value,
            s.version.name if s.version else None,
            s.version.generation if s.version else 0,
            s.version.adapter_id if s.version else 0,
            len(s.leases),
            s.pinned,
            coming.get(s.index),
            s.annex,
        )
        for s in state.slots.slots
    )
    adapters = []
    for name, entry in state.names.names.items():
        current = entry.current
        level = "cold"
        if current is not None and current.slot >= 0:
            level = "device"
        elif current is not None and current.image >= 0:
            level = "host"
        adapters.append(
            AdapterStats(
                name,
                current.generation if current else 0,
                level,
                current.slot if current else -1,
                len(entry.jobs),
                PrefixStats(entry.queried, entry.hit),
                entry.jobs[0].state.value if entry.jobs else "",
                entry.jobs[0].kind.value if entry.jobs else "",
            )
        )
    states = [s.state for s in state.running.values()]
    arena = state.slots.arena
    c = state.counters
    return Stats(
        slots=slots,
        adapters=tuple(adapters),
        default_adapter=state.default,
        waiting=state.lanes.waiting + state.following,
        prefilling=states.count(SeqState.PREFILL),
        decoding=states.count(SeqState.DECODE),
        closing=states.count(SeqState.CLOSING),
        jobs=len(state.jobs),
        blocks_free=state.memory.blocks.free,
        blocks_cached=state.memory.prefix.idle,
        blocks_total=state.memory.blocks.total,
        spill_blocks_used=state.memory.host_used,
        spill_blocks_total=state.memory.host_total,
        image_bytes=state.names.image_bytes,
        steps=c.steps,
        tokens=c.tokens,
        prompt_tokens=c.prompt_tokens,
        submitted=c.submitted,
        ended=c.ended,
        preempted=c.preempted,
        spilled=c.spilled,
        commits=c.commits,
        evicted=c.evicted,
        drained=c.drained,
        stages=c.stages,
        stage_failures=c.stage_failures,
        prefix=PrefixStats(c.prefix_queried, c.prefix_hit),
        base_prefix=PrefixStats(c.base_queried, c.base_hit),
        overwritten=c.overwritten,
        swapped=c.swapped,
        slot_wait_s=c.slot_wait_s,
        snapshots_kept=state.memory.snapshots.kept,
        snapshots_total=state.memory.snapshots.total,
        steps_ahead=c.ahead,
        wasted_rows=c.wasted_rows,
        arena=ArenaStats(arena.total, arena.used, arena.largest_hole),
        dead=state.dead,
    )
