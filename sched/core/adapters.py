"""Adapter jobs: staging, what follows a commit for the name, failing, and being dropped.

A job touches nothing but host memory until a slot is chosen; a failed or cancelled stage therefore
leaves every slot, table, name and graph as it was.
"""

from __future__ import annotations

from .effects import CancelStage, Reply, StartStage
from .events import CommitDone, CommitFailed, Failure, StageDone, StageFailed
from .jobs import JOB_TABLE, Job, JobEvent, JobKind, JobState
from .registry import Name, Version
from .state import State
from .tables import SlotState


def move(state: State, job: Job, event: JobEvent) -> None:
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


def bring_back(state: State, entry: Name, pin: bool) -> Job:
    """A job that makes ``entry`` resident again, before whatever else it was asked for: a
    replacement that never ends must not keep away what was there."""
    job = Job(state.new_id(), JobKind.PROMOTE, entry.name, entry.source, pin=pin)
    state.names.hold_source(job.source)
    state.jobs[job.id] = job
    if entry.jobs and entry.jobs[0].state is JobState.PLACING:
        entry.jobs.insert(1, job)
        return job
    if entry.jobs:
        for waiting in (state.backlog, state.misses):
            waiting.pop(entry.jobs[0].id, None)
    entry.jobs.appendleft(job)
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
        if serves(state, current):
            finish(state, entry, job, JobEvent.FINISH, "resident")
            return
    if state.held or state.jobs_in_hand() >= state.config.jobs_in_hand():
        job.queued = state.now
        backlog = state.misses if job.kind is JobKind.MISS else state.backlog
        backlog[job.id] = job
        return
    reuse = job.kind not in (JobKind.REPLACE, JobKind.SWAP, JobKind.LOAD)
    if reuse and current is not None and state.names.knows_image(current.image):
        state.names.image_staged(current.image, 0)
        job.image, job.digest = current.image, current.digest
        job.rank, job.annex = current.rank, current.annex
        _place_or_finish(state, entry, job)
        return
    job.stage = state.new_id()
    state.stages[job.stage] = job
    state.counters.stages += 1
    move(state, job, JobEvent.STAGE)
    state.out.append(StartStage(job.stage, job.name, job.source))


def start_waiting(state: State) -> bool:
    """Take up jobs that waited because enough others were in hand, commands before misses;
    whether there were any."""
    started = False
    if state.held:
        return started
    for backlog in (state.backlog, state.misses):
        while backlog and state.jobs_in_hand() < state.config.jobs_in_hand():
            job = backlog.pop(next(iter(backlog)))
            _start(state, state.names.names[job.name], job)
            started = True
    return started


def stage_done(state: State, event: StageDone) -> None:
    job = state.stages.pop(event.stage)
    state.names.image_staged(event.image, event.nbytes, reusable=event.reusable)
    job.image, job.digest = event.image, event.digest
    job.rank, job.annex = event.rank, event.annex
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
    move(state, job, JobEvent.STAGED)
    current = entry.current
    if job.kind is JobKind.PREFETCH:
        if current is None or current.digest != job.digest:
            version = entry.version(entry.reserve(), job.digest, job.source, job.image)
            version.rank, version.annex = job.rank, job.annex
            _adopt(state, entry, job, version)
        else:
            relink(state, current, job)
        finish(state, entry, job, JobEvent.FINISH, "prefetched")
        return
    if current is not None and serves(state, current) and not is_fresh(entry, job):
        relink(state, current, job)
        finish(state, entry, job, JobEvent.FINISH, "unchanged")
        return
    job.since = state.now if job.queued is None else job.queued
    state.placing[job.id] = job
    state.unsettled = True


def serves(state: State, version: Version) -> bool:
    """Whether new sequences may lease this version now."""
    return version.slot >= 0 and state.slots[version.slot].state is not SlotState.DRAINING


def leasable(state: State, name: str) -> bool:
    """Whether new sequences of ``name`` can be given a lease now."""
    current = state.names.names[name].current
    return current is not None and serves(state, current)


def is_fresh(entry: Name, job: Job) -> bool:
    """Whether committing this job makes a new version: new content, or a swap (which always
    does, so that a swapped slot never shares an identity with another)."""
    current = entry.current
    return current is None or current.digest != job.digest or job.kind is JobKind.SWAP


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
        version.rank, version.annex = job.rank, job.annex
        _adopt(state, entry, job, version)
    else:
        assert entry.current is not None
        version = entry.current
        relink(state, version, job)
    state.slots.committed(slot, version, job.pin)
    finish(state, entry, job, JobEvent.COMMITTED, "done")


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
        state.version_left(old)


def relink(state: State, version: Version, job: Job) -> None:
    """The version's content is in the image of ``job``, maybe of another layout than before."""
    version.rank, version.annex = job.rank, job.annex
    if version.image != job.image:
        state.names.unlink(version)
        version.image = job.image
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
    undrain(state, job)
    move(state, job, JobEvent.FAIL)
    job.failure = failure
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


def finish(state: State, entry: Name, job: Job, event: JobEvent, outcome: str) -> None:
    undrain(state, job)
    move(state, job, event)
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


def undrain(state: State, job: Job) -> None:
    """What was drained for this job is needed no more: let it serve again."""
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
    """Everything a job holds, once: its image, its source, its claim."""
    state.jobs.pop(job.id)
    state.slots.unclaim(job.id)
    for waiting in (state.placing, state.backlog, state.misses):
        waiting.pop(job.id, None)
    if job.image >= 0:
        state.names.image_released(job.image)
    state.drop_sources(state.names.release_source(job.source))
    state.trim_images()


def _drop(state: State, job: Job, event: JobEvent) -> None:
    """End of a job whose name is gone."""
    undrain(state, job)
    move(state, job, event)
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
