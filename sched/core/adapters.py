"""Adapter jobs: staging, placing into a slot, committing, and what follows for the name.

A job touches nothing but host memory until a slot is chosen; a failed or cancelled stage therefore
leaves every slot, table, name and graph as it was.
"""

from __future__ import annotations

from .effects import CancelStage, Commit, Reply, StartStage
from .events import CommitDone, CommitFailed, Failure, StageDone, StageFailed
from .identity import adapter_id
from .jobs import JOB_TABLE, Job, JobEvent, JobKind, JobState
from .registry import Name, Version
from .slots import Slot
from .state import State
from .tables import SlotState


def _move(state: State, job: Job, event: JobEvent) -> None:
    target = JOB_TABLE.get((job.state, event))
    subject = f"adapter {job.name}"
    if target is None:
        raise state.log.broken(subject, f"job {job.id}: {event.value} in {job.state.value}")
    state.log.add(subject, f"job {job.id} {job.kind.value}: {event.value} -> {target.value}")
    job.state = target


def add_job(
    state: State,
    entry: Name,
    kind: JobKind,
    source: int,
    command: int = -1,
    *,
    target: int = -1,
    pin: bool = False,
    created: bool = False,
) -> Job:
    """Queue a job for ``entry`` and start it if it is the first. ``created``: the name is known
    only because of this job."""
    job = Job(state.new_id(), kind, entry.name, source, target, pin)
    entry.provisional = entry.provisional or created
    state.names.hold_source(source)
    state.jobs[job.id] = job
    if command >= 0:
        wait_for(state, job, command)
    entry.jobs.append(job)
    if len(entry.jobs) == 1:
        _start(state, entry, job)
    return job


def wait_for(state: State, job: Job, command: int) -> None:
    state.commands[command] = job.id
    job.commands.append(command)


def miss(state: State, name: str) -> None:
    """A waiting sequence needs ``name`` in a slot."""
    entry = state.names.names[name]
    if any(j.kind is not JobKind.PREFETCH for j in entry.jobs):
        return
    add_job(state, entry, JobKind.MISS, entry.source)


def _start(state: State, entry: Name, job: Job) -> None:
    """Take up the first job of a name: from the host cache if it can be, else stage."""
    current = entry.current
    if job.kind in (JobKind.PROMOTE, JobKind.MISS) and current is not None:
        if _serves(state, current):
            _finish(state, entry, job, JobEvent.FINISH, "resident")
            return
    if state.jobs_in_hand() >= state.config.jobs_in_hand():
        job.queued = state.now
        backlog = state.misses if job.kind is JobKind.MISS else state.backlog
        backlog[job.id] = job
        return
    reuse = job.kind not in (JobKind.REPLACE, JobKind.SWAP, JobKind.LOAD)
    if reuse and current is not None and state.names.knows_image(current.image):
        state.names.image_staged(current.image, 0)
        job.image, job.digest = current.image, current.digest
        _place_or_finish(state, entry, job)
        return
    job.stage = state.new_id()
    state.stages[job.stage] = job
    state.counters.stages += 1
    _move(state, job, JobEvent.STAGE)
    state.out.append(StartStage(job.stage, job.name, job.source))


def start_waiting(state: State) -> bool:
    """Take up jobs that waited because enough others were in hand, commands before misses;
    whether there were any."""
    started = False
    for backlog in (state.backlog, state.misses):
        while backlog and state.jobs_in_hand() < state.config.jobs_in_hand():
            job = backlog.pop(next(iter(backlog)))
            _start(state, state.names.names[job.name], job)
            started = True
    return started


def stage_done(state: State, event: StageDone) -> None:
    job = state.stages.pop(event.stage)
    state.names.image_staged(event.image, event.nbytes)
    job.image, job.digest = event.image, event.digest
    state.trim_images()
    if job.abandoned:
        _drop(state, job, JobEvent.FAIL)
        return
    _place_or_finish(state, state.names.names[job.name], job)


def stage_failed(state: State, event: StageFailed) -> None:
    job = state.stages.pop(event.stage)
    state.counters.stage_failures += 1
    if job.abandoned:
        _drop(state, job, JobEvent.FAIL)
        return
    fail(state, job, event.failure)


def _place_or_finish(state: State, entry: Name, job: Job) -> None:
    _move(state, job, JobEvent.STAGED)
    current = entry.current
    if job.kind is JobKind.PREFETCH:
        if current is None or current.digest != job.digest:
            version = entry.version(entry.reserve(), job.digest, job.source, job.image)
            _adopt(state, entry, job, version)
        else:
            _relink(state, current, job.image)
        _finish(state, entry, job, JobEvent.FINISH, "prefetched")
        return
    if current is not None and _serves(state, current) and not _is_fresh(entry, job):
        _relink(state, current, job.image)
        _finish(state, entry, job, JobEvent.FINISH, "unchanged")
        return
    job.since = state.now if job.queued is None else job.queued
    state.placing[job.id] = job
    state.unsettled = True


def _serves(state: State, version: Version) -> bool:
    """Whether new sequences may lease this version now."""
    return version.slot >= 0 and state.slots[version.slot].state is not SlotState.DRAINING


def _pool_full(state: State) -> Failure:
    return Failure(
        "capacity",
        "POOL_FULL",
        "every slot is pinned",
        expected="a slot that may be a victim",
        found=f"{len(state.slots)} pinned",
    )


def _own(entry: Name, job: Job) -> int:
    """The slot of the version this job replaces, or -1."""
    if job.kind is JobKind.REPLACE and entry.current is not None:
        return entry.current.slot
    return -1


def place_all(state: State) -> None:
    """Give slots to the jobs that wait for one, in the order they began to wait. Does nothing
    unless a job, a slot, a lane or the time has changed what it would decide."""
    slots, lanes = state.slots, state.lanes
    due = state.place_at is not None and state.now >= state.place_at
    if not (state.unsettled or slots.changed or lanes.changed or due):
        return
    state.unsettled = slots.changed = lanes.changed = False
    idle, ever, drained = slots.any_idle(), slots.can_ever_place(), slots.drained_for()
    for job in list(state.placing.values()):
        entry = state.names.names[job.name]
        current = entry.current
        if current is not None and _serves(state, current) and not _is_fresh(entry, job):
            # The slot it drained from serves again: the wait is over without a commit.
            _relink(state, current, job.image)
            _finish(state, entry, job, JobEvent.FINISH, "resident")
            continue
        if job.target < 0 and not (ever or slots.can_ever_place(_own(entry, job))):
            fail(state, job, _pool_full(state))
            continue
        if job.target < 0 and not idle and (job.id in drained or not _due(state, job)):
            continue
        slot = _slot_for(state, entry, job, drained)
        if slot is not None:
            _commit(state, entry, job, slot)
        if slots.changed:
            idle, ever, drained = slots.any_idle(), slots.can_ever_place(), slots.drained_for()
    state.place_at = _next_drain(state)


def _due(state: State, job: Job) -> bool:
    return state.now >= job.since + state.config.drain_after_s


def _slot_for(state: State, entry: Name, job: Job, drained: set[int]) -> Slot | None:
    slots = state.slots
    current = entry.current
    if current is not None and current.slot >= 0 and not _is_fresh(entry, job):
        # The version still drains from another slot; two slots never hold one version.
        return None
    if job.target >= 0:
        slot = slots[job.target]
        if slot.state in (SlotState.EMPTY, SlotState.READY):
            return slot
        if slot.state is SlotState.IN_USE:
            _drain(state, slot, job)
        return None
    own = _own(entry, job)
    reserved = {j.target for j in state.placing.values() if j.target >= 0}
    idle = slots.victim(own, reserved, lambda slot: _kept(state, job, slot))
    if idle is not None:
        return idle
    if job.id not in drained and _due(state, job):
        busy = slots.drain_victim(own, reserved)
        if busy is not None:
            _drain(state, busy, job)
    return None


def _kept(state: State, job: Job, slot: Slot) -> bool:
    """Whether an idle slot is not yet a victim for ``job``: the planner has had no turn since it
    was filled, or sequences wait for it and the job has not waited out its time."""
    if not slot.offered:
        return True
    if slot.version is None or not state.lanes.wants(slot.version.name):
        return False
    return state.now < max(job.since, slot.since) + state.config.drain_after_s


def _drain(state: State, slot: Slot, job: Job) -> None:
    state.counters.drained += 1
    state.slots.drain(slot, job.id)


def _is_fresh(entry: Name, job: Job) -> bool:
    """Whether committing this job makes a new version: new content, or a swap (which always
    does, so that a swapped slot never shares an identity with another)."""
    current = entry.current
    return current is None or current.digest != job.digest or job.kind is JobKind.SWAP


def _commit(state: State, entry: Name, job: Job, slot: Slot) -> None:
    job.fresh = _is_fresh(entry, job)
    current = entry.current
    if current is not None and current.slot >= 0:
        job.pin = job.pin or state.slots[current.slot].pinned
    evicted = state.slots.choose(slot)
    if evicted is not None:
        state.counters.evicted += 1
        job.evicted = evicted.name if evicted.name != job.name else None
    # Reserved now: if the name goes away meanwhile, its next version must not share an identity
    # with what is being written.
    job.generation = entry.reserve() if job.fresh or current is None else current.generation
    job.slot = slot.index
    job.commit = state.new_id()
    del state.placing[job.id]
    state.commits[job.commit] = job
    _move(state, job, JobEvent.CHOSEN)
    state.counters.commits += 1
    ident = adapter_id(job.name, job.generation)
    state.out.append(Commit(job.commit, slot.index, job.image, job.name, ident))
    _hand_on_drain(state, job)


def _hand_on_drain(state: State, job: Job) -> None:
    """``job`` took another slot than the one drained for it: the drain goes to the next job that
    has waited long enough and has none, so that a slot taken from it costs it no second wait."""
    drained = {s.drained_for: s for s in state.slots.slots if s.state is SlotState.DRAINING}
    slot = drained.get(job.id)
    if slot is None:
        return
    for other in state.placing.values():
        due = other.since + state.config.drain_after_s <= state.now
        if other.target < 0 and due and other.id not in drained:
            slot.drained_for = other.id
            return


def commit_done(state: State, event: CommitDone) -> None:
    job = state.commits.pop(event.commit)
    slot = state.slots[job.slot]
    if job.abandoned:
        orphan = Version(job.name, 0, 0, job.digest, job.source, -1)
        state.slots.committed(slot, orphan, pin=False)
        state.slots.retire(slot)
        state.slot_emptied(slot.index)
        _drop(state, job, JobEvent.COMMITTED)
        return
    entry = state.names.names[job.name]
    if job.fresh:
        version = entry.version(job.generation, job.digest, job.source, job.image)
        _adopt(state, entry, job, version)
    else:
        assert entry.current is not None
        version = entry.current
        _relink(state, version, job.image)
    state.slots.committed(slot, version, job.pin)
    _finish(state, entry, job, JobEvent.COMMITTED, "done")


def _adopt(state: State, entry: Name, job: Job, version: Version) -> None:
    """Repoint the name, atomically: from here on new sequences get ``version``."""
    old, entry.current = entry.current, version
    entry.provisional = False
    state.names.link(version)
    if entry.source != job.source:
        state.names.hold_source(job.source)
        state.drop_sources(state.names.release_source(entry.source))
        entry.source = job.source
    if old is not None:
        state.names.unlink(old)
        if old.slot >= 0:
            _supersede(state, old)


def _relink(state: State, version: Version, image: int) -> None:
    if version.image != image:
        state.names.unlink(version)
        version.image = image
        state.names.link(version)


def _supersede(state: State, old: Version) -> None:
    """No new leases on the old version's slot; it empties when its last sequence ends."""
    slot = state.slots[old.slot]
    if slot.state is SlotState.READY:
        state.slots.retire(slot)
        state.slot_emptied(slot.index)
    elif slot.state is SlotState.IN_USE:
        state.slots.drain(slot, -1)


def commit_failed(state: State, event: CommitFailed) -> None:
    job = state.commits.pop(event.commit)
    state.slots.commit_failed(state.slots[job.slot])
    state.slot_emptied(job.slot)
    if job.abandoned:
        _drop(state, job, JobEvent.FAIL)
    else:
        fail(state, job, event.failure)


def fail(state: State, job: Job, failure: Failure) -> None:
    """The job's commands, and the sequences that wait for a name nothing else will bring, hear
    why; the name's earlier version, if any, stays as it is."""
    entry = state.names.names[job.name]
    _undrain(state, job)
    _move(state, job, JobEvent.FAIL)
    state.reply(job.commands, Reply(-1, "failed", name=job.name, failure=failure))
    _release(state, job)
    entry.jobs.remove(job)
    if entry.jobs:
        _start(state, entry, entry.jobs[0])
    else:
        _give_up(state, entry, job, failure)
    state.lanes.unpark(job.name)


def _give_up(state: State, entry: Name, job: Job, failure: Failure) -> None:
    """The name's last job failed: who waits hears why, unless what failed was a replacement and
    the name's own content was never tried."""
    # The default stays known: its requests are refused by cause and tried again, not as unknown.
    forget = entry.current is None and entry.provisional and state.default != entry.name
    own = job.kind not in (JobKind.REPLACE, JobKind.SWAP)
    serves = entry.current is not None and entry.current.slot >= 0
    if not serves and (own or forget):
        entry.failed = failure
        entry.failed_until = state.now + state.config.failure_backoff_s
        for seq in state.lanes.of_adapter(job.name):
            if not seq.leased:
                state.end(seq, "error", failure)
    if forget:
        state.drop_sources(state.names.forget(entry))


def _finish(state: State, entry: Name, job: Job, event: JobEvent, outcome: str) -> None:
    _undrain(state, job)
    _move(state, job, event)
    version = entry.current
    assert version is not None
    entry.failed = None
    if job.pin and version.slot >= 0:
        state.slots.pin(state.slots[version.slot], True)
    image = job.image
    state.reply(
        job.commands,
        Reply(
            -1,
            outcome,
            entry.name,
            version.slot,
            version.generation,
            version.adapter_id,
            job.evicted,
            image,
        ),
    )
    state.placing.pop(job.id, None)
    _release(state, job)
    entry.jobs.remove(job)
    state.lanes.unpark(entry.name)
    if entry.jobs:
        _start(state, entry, entry.jobs[0])


def _undrain(state: State, job: Job) -> None:
    """A slot drained for this job is needed no more: let it serve again."""
    for slot in state.slots.slots:
        if slot.drained_for == job.id and slot.state is SlotState.DRAINING:
            version = slot.version
            entry = state.names.names.get(version.name) if version else None
            if entry is not None and entry.current is version:
                state.slots.undrain(slot)
                state.lanes.unpark(entry.name)
            else:
                slot.drained_for = -1


def _release(state: State, job: Job) -> None:
    """Everything a job holds, once: its image, its source."""
    state.jobs.pop(job.id)
    for waiting in (state.placing, state.backlog, state.misses):
        waiting.pop(job.id, None)
    if job.image >= 0:
        state.names.image_released(job.image)
    state.drop_sources(state.names.release_source(job.source))
    state.trim_images()


def _drop(state: State, job: Job, event: JobEvent) -> None:
    """End of a job whose name is gone."""
    _undrain(state, job)
    _move(state, job, event)
    _release(state, job)


def abandon(state: State, entry: Name, failure: Failure) -> None:
    """The name goes away: answer its jobs' commands now; work in flight ends by itself."""
    for job in list(entry.jobs):
        state.reply(job.commands, Reply(-1, "failed", name=entry.name, failure=failure))
        job.abandoned = True
        if job.state is JobState.STAGING:
            state.out.append(CancelStage(job.stage))
        if job.state in (JobState.QUEUED, JobState.PLACING):
            state.placing.pop(job.id, None)
            _drop(state, job, JobEvent.FAIL)
    entry.jobs.clear()


def fail_all(state: State, failure: Failure) -> None:
    """Every open job fails (dead device, closing); stages in flight report later, to nobody."""
    for entry in list(state.names.names.values()):
        if entry.jobs:
            abandon(state, entry, failure)


def _next_drain(state: State) -> float | None:
    """When the next waiting job may drain a victim (past that, only an event can help it)."""
    after = state.config.drain_after_s
    times = [j.since + after for j in state.placing.values()]
    if times:
        times += [s.since + after for s in state.slots.slots if s.state is SlotState.READY]
    return min((t for t in times if t > state.now), default=None)
