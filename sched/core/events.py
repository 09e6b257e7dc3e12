"""What can happen to the core: every input it ever sees, as frozen data.

Events carry integer ids and plain values only (no tensors, paths or exceptions), so that a recorded
stream of them replays anywhere. Ids are chosen by the shell and never reused.
"""

from __future__ import annotations

import msgspec


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """A refusal or failure as data. ``kind`` names the class in :mod:`rota.errors`
    (``request``, ``command``, ``capacity``, ``reject``, ``staging``, ``device``, ``closed``)."""

    kind: str
    code: str
    message: str
    subject: str | None = None
    expected: str | None = None
    found: str | None = None
    retry_after_s: float | None = None


class Submit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A new sequence, and one more for each of ``siblings``: samples of the same prompt, on the
    same version. ``adapter``: a name, or ``None`` for base; ``use_default`` picks the default
    adapter instead. ``max_tokens``: new tokens at most. ``deadline``: absolute time or ``None``."""

    seq: int
    prompt: tuple[int, ...]
    adapter: str | None
    use_default: bool
    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    priority: int = 0
    deadline: float | None = None
    siblings: tuple[int, ...] = ()


class Cancel(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Nobody wants this sequence any more. ``reason`` becomes its terminal reason."""

    seq: int
    reason: str = "cancelled"


class Stop(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A stop string matched in the text of a sequence: end it as ``stop``."""

    seq: int


class Plan(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """All events at hand are in: decide what to run next. Sent by the shell once per turn."""


class RowDone(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Result of one row: the sampled token, -1 if the row did not sample, or a failure."""

    seq: int
    token: int
    failure: Failure | None = None


class StepDone(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The step ran; ``rows`` in the order of the planned rows."""

    step: int
    rows: tuple[RowDone, ...]


class StepFailed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The whole step failed. ``fatal``: the device is dead."""

    step: int
    failure: Failure
    fatal: bool


class SpillDone(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The sequence's blocks are in host memory."""

    seq: int


class SpillFailed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The copy to host memory failed; nothing is kept of it. ``fatal``: the device is dead."""

    seq: int
    failure: Failure
    fatal: bool = False


class RestoreDone(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The sequence's blocks are back; the host's copy is gone."""

    seq: int


class RestoreFailed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The copy back failed, and the host's copy is gone. ``fatal``: the device is dead."""

    seq: int
    failure: Failure
    fatal: bool = False


class Load(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Bring a new name into a slot from ``source`` (an id the shell knows)."""

    command: int
    name: str
    source: int
    pin: bool = False


class Register(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Make a name known without loading it: it is promoted on the first request that misses."""

    command: int
    name: str
    source: int


class Replace(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A new version of a known name; sequences of the old version finish on the old version."""

    command: int
    name: str
    source: int


class Promote(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Make ``name`` resident in a cache slot; ``source`` is needed when the name is not known."""

    command: int
    name: str
    source: int | None = None


class Swap(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A new version of ``name`` into slot ``slot``, once that slot has no lease."""

    command: int
    name: str
    source: int
    slot: int


class Rotate(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Change the default adapter (``None``: base) for requests submitted from now on."""

    command: int
    name: str | None


class Unload(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Forget ``name``: refuse new requests, let running ones finish until ``deadline`` (absolute
    time), then cancel what is left if ``cancel_late``, else answer ``still-draining``."""

    command: int
    name: str
    deadline: float
    cancel_late: bool = False


class Pin(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Make a resident adapter's slot no victim (``pinned``) or a victim again."""

    command: int
    name: str
    pinned: bool


class Prefetch(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Stage a known (or, with ``source``, new) name into the host image cache only."""

    command: int
    name: str
    source: int | None = None


class Resize(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Another pool: ``max_loras`` slots of ``max_rank``, once nothing is in flight; refused if
    that is not so by ``deadline`` (absolute time)."""

    command: int
    max_loras: int
    max_rank: int
    deadline: float


class RelayoutDone(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The new pool stands, its slots and its arena of ``arena_bytes`` empty. ``annexes``: how many
    of them each resident that was named to the device will need."""

    arena_bytes: int = 0
    annexes: tuple[int, ...] = ()


class RelayoutFailed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The device kept the old pool and all that is in it."""

    failure: Failure
    fatal: bool = False


class CancelCommand(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Nobody waits for this command's answer any more. Its work goes on; its effects stay."""

    command: int


class StageDone(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A slot image is ready in host memory. ``image`` may be one that was already cached.

    ``reusable``: a later stage can find this image by what its source looks like, without reading
    it; one that no version uses is then still worth its place in the cache. ``rank``: the highest
    of its pairs. ``annex``: bytes it needs in the arena, beside its slot."""

    stage: int
    image: int
    digest: str
    nbytes: int
    reusable: bool = False
    rank: int = 0
    annex: int = 0


class StageFailed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Staging ended without an image; no slot was touched."""

    stage: int
    failure: Failure


class CommitDone(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The image is in the slot and the table cells point at it."""

    commit: int


class CommitFailed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The device failed while writing the slot: the slot's content is undefined, so it is empty."""

    commit: int
    failure: Failure
    fatal: bool = False


class Tick(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Time has reached :meth:`Core.next_wake`."""


class Close(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End everything: nothing new is accepted, what runs ends after its step."""


Command = Load | Register | Replace | Promote | Swap | Rotate | Unload | Pin | Prefetch | Resize
Event = (
    Submit
    | Cancel
    | Stop
    | Plan
    | StepDone
    | StepFailed
    | SpillDone
    | SpillFailed
    | RestoreDone
    | RestoreFailed
    | Command
    | CancelCommand
    | StageDone
    | StageFailed
    | CommitDone
    | CommitFailed
    | RelayoutDone
    | RelayoutFailed
    | Tick
    | Close
)
