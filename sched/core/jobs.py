"""Adapter jobs: one piece of work that brings an adapter version somewhere, as a state machine.

Jobs of one name run one after the other, in the order asked: the last replace asked for is the one
that stays. Commands wait on jobs; a job outlives a command that nobody waits for any more.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from .events import Failure


class JobKind(enum.Enum):
    LOAD = "load"
    REPLACE = "replace"
    PROMOTE = "promote"  #: asked for by a command
    MISS = "miss"  #: asked for by a waiting sequence
    SWAP = "swap"
    PREFETCH = "prefetch"


class JobState(enum.Enum):
    QUEUED = "QUEUED"  #: behind another job of the same name, or behind all that are in hand
    STAGING = "STAGING"  #: a worker makes the image
    PLACING = "PLACING"  #: image ready, waits for a slot and its part of the arena
    COMMITTING = "COMMITTING"  #: the device writes the slot
    DONE = "DONE"
    FAILED = "FAILED"


class JobEvent(enum.Enum):
    STAGE = "stage"
    STAGED = "staged"
    RESTAGE = "restage"  #: the pool's layout changed under its image
    CHOSEN = "chosen"
    COMMITTED = "committed"
    FAIL = "fail"
    FINISH = "finish"  #: nothing (more) to write: unchanged, or prefetch only


JOB_TABLE: dict[tuple[JobState, JobEvent], JobState] = {
    (JobState.QUEUED, JobEvent.STAGE): JobState.STAGING,
    (JobState.QUEUED, JobEvent.STAGED): JobState.PLACING,
    (JobState.QUEUED, JobEvent.FINISH): JobState.DONE,
    (JobState.QUEUED, JobEvent.FAIL): JobState.FAILED,
    (JobState.STAGING, JobEvent.STAGED): JobState.PLACING,
    (JobState.STAGING, JobEvent.FAIL): JobState.FAILED,
    (JobState.PLACING, JobEvent.RESTAGE): JobState.QUEUED,
    (JobState.PLACING, JobEvent.CHOSEN): JobState.COMMITTING,
    (JobState.PLACING, JobEvent.FINISH): JobState.DONE,
    (JobState.PLACING, JobEvent.FAIL): JobState.FAILED,
    (JobState.COMMITTING, JobEvent.COMMITTED): JobState.DONE,
    (JobState.COMMITTING, JobEvent.FAIL): JobState.FAILED,
}


@dataclass(slots=True, eq=False)
class Job:
    id: int
    kind: JobKind
    name: str
    source: int
    target: int = -1
    pin: bool = False
    state: JobState = JobState.QUEUED
    commands: list[int] = field(default_factory=list)
    stage: int = -1
    image: int = -1
    digest: str = ""
    rank: int = 0
    annex: int = 0  #: bytes its image needs in the arena
    slot: int = -1
    commit: int = -1
    queued: float | None = None  #: when it began to wait behind the jobs in hand, if it did
    since: float = 0.0  #: when it began to wait for a slot
    evicted: str | None = None
    fresh: bool = False  #: its commit makes a new version
    generation: int = 0  #: of that version, reserved when its slot was chosen
    abandoned: bool = False  #: its name was unloaded meanwhile
    failure: Failure | None = None  #: why it failed
