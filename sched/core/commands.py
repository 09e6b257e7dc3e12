"""Commands: what an operator may ask for, checked by name, answered exactly once."""

from __future__ import annotations

from . import adapters, resize, retry
from .effects import Reply
from .events import (
    CancelCommand,
    Command,
    Failure,
    Load,
    Pin,
    Prefetch,
    Promote,
    Register,
    Replace,
    Resize,
    Rotate,
    Swap,
    Unload,
)
from .jobs import JobKind, JobState
from .registry import Name
from .state import State, Unloading
from .tables import SlotState

_MAX_NAME = 256


class Refused(Exception):
    """Carries a refusal up to :func:`handle`; never leaves this file."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure


def _refuse(code: str, message: str, name: str | None, **more: str | float | None) -> Refused:
    kind = "capacity" if code in ("QUEUE_FULL", "POOL_FULL") else "command"
    # A failure checks its own fields.
    return Refused(Failure(kind, code, message, name, **more))  # type: ignore[arg-type]


def handle(state: State, event: Command) -> None:
    """Carry out one command, or refuse it by name."""
    source = getattr(event, "source", None)
    try:
        _gate(state, event)
        _handle(state, event)
    except Refused as refused:
        state.refuse(event.command, refused.failure)
        if source is not None:
            state.names.hold_source(source)
            state.drop_sources(state.names.release_source(source))


def _gate(state: State, event: Command) -> None:
    if state.dead is not None:
        raise Refused(state.dead)
    if state.closing:
        raise Refused(Failure("closed", "engine-closed", "the engine is closing"))
    rebuilding = state.resize is not None and state.resize.rebuilding
    if rebuilding and isinstance(event, (Unload, Pin)):
        raise Refused(
            Failure(
                "capacity", "resizing", "the pool is being exchanged", event.name, retry_after_s=0.1
            )
        )
    if len(state.commands) >= state.config.max_commands:
        raise _refuse(
            "QUEUE_FULL",
            "too many commands wait already",
            None,
            expected=f"at most {state.config.max_commands}",
            retry_after_s=retry.commands_full(state),
        )


def _handle(state: State, event: Command) -> None:
    match event:
        case Load(command, name, source, pin):
            _new_name(state, name)
            entry = state.names.add(name, source)
            adapters.add_job(state, entry, JobKind.LOAD, source, command, pin=pin, created=True)
        case Register(command, name, source):
            _new_name(state, name)
            state.names.add(name, source)
            state.out.append(Reply(command, "registered", name))
        case Replace(command, name, source):
            adapters.add_job(state, _known(state, name), JobKind.REPLACE, source, command)
        case Promote(command, name, source):
            _promote(state, command, name, source, JobKind.PROMOTE)
        case Prefetch(command, name, source):
            _promote(state, command, name, source, JobKind.PREFETCH)
        case Swap(command, name, source, slot):
            if not 0 <= slot < len(state.slots):
                raise _refuse(
                    "bad-slot",
                    "no such slot",
                    name,
                    expected=f"0..{len(state.slots) - 1}",
                    found=str(slot),
                )
            entry_or_none = state.names.names.get(name)
            if entry_or_none is None:
                _new_name(state, name)
                entry = state.names.add(name, source)
            else:
                entry = _known(state, name)
            adapters.add_job(
                state,
                entry,
                JobKind.SWAP,
                source,
                command,
                target=slot,
                created=entry_or_none is None,
            )
        case Rotate(command, name_or_none):
            _rotate(state, command, name_or_none)
        case Unload(command, name, deadline, cancel_late):
            _unload(state, command, name, deadline, cancel_late)
        case Resize():
            failure = resize.refusal(state, event)
            if failure is not None:
                raise Refused(failure)
            resize.begin(state, event)
        case Pin(command, name, pinned):
            _pin(state, command, name, pinned)


def _new_name(state: State, name: str) -> None:
    if len(state.slots) == 0:
        raise _refuse("lora-off", "this engine was started with max_loras=0", name)
    if not name or len(name) > _MAX_NAME or any(ord(c) < 32 for c in name):
        raise _refuse(
            "bad-name",
            "an adapter name has 1 to 256 printable characters",
            name[:64],
            found=f"{len(name)} characters",
        )
    if name in state.names.names:
        raise _refuse("name-exists", "the name is taken; replace() changes its content", name)
    if len(state.names.names) >= state.config.max_names:
        raise _refuse(
            "QUEUE_FULL",
            "too many names",
            name,
            expected=f"at most {state.config.max_names}",
            retry_after_s=retry.commands_full(state),
        )


def _known(state: State, name: str) -> Name:
    entry = state.names.names.get(name)
    if entry is None:
        raise _refuse("unknown-adapter", "no adapter of this name", name)
    if len(entry.jobs) >= state.config.max_jobs_per_name:
        raise _refuse(
            "QUEUE_FULL",
            "too many commands for one name wait already",
            name,
            expected=f"at most {state.config.max_jobs_per_name}",
            retry_after_s=retry.commands_full(state),
        )
    return entry


def _promote(state: State, command: int, name: str, source: int | None, kind: JobKind) -> None:
    entry = state.names.names.get(name)
    created = False
    if entry is None:
        if source is None:
            raise _refuse("unknown-adapter", "no adapter of this name", name)
        _new_name(state, name)
        entry, created = state.names.add(name, source), True
    elif source is not None and source != entry.source:
        raise _refuse(
            "name-exists", "the name has another source; replace() changes its content", name
        )
    else:
        _known(state, name)
    same = (JobKind.LOAD, JobKind.PROMOTE, JobKind.MISS)
    for job in entry.jobs:
        if job.kind is kind or (kind is JobKind.PROMOTE and job.kind in same):
            adapters.wait_for(state, job, command)  # single flight
            return
    adapters.add_job(state, entry, kind, entry.source, command, created=created)


def _rotate(state: State, command: int, name: str | None) -> None:
    if name is not None and name not in state.names.names:
        raise _refuse("unknown-adapter", "no adapter of this name", name)
    state.default = name
    state.log.add("default", f"rotated to {name or 'base'}")
    current = state.names.names[name].current if name is not None else None
    if current is None:
        state.out.append(Reply(command, "done", name))
    else:
        state.out.append(
            Reply(command, "done", name, current.slot, current.generation, current.adapter_id)
        )


def _pin(state: State, command: int, name: str, pinned: bool) -> None:
    entry = state.names.names.get(name)
    if entry is None:
        raise _refuse("unknown-adapter", "no adapter of this name", name)
    current = entry.current
    if current is None or current.slot < 0:
        raise _refuse("not-resident", "only a resident adapter can be pinned", name)
    slot = state.slots[current.slot]
    if pinned and slot.drained_for >= 0:
        state.slots.undrain(slot)
        state.lanes.unpark(name)
    state.slots.pin(slot, pinned)
    for job in entry.jobs:
        if job.state is JobState.COMMITTING:  # its next version, which took over what was pinned
            job.pin = pinned
    state.log.add(f"slot {slot.index}", "pinned" if pinned else "unpinned")
    state.out.append(
        Reply(command, "done", name, slot.index, current.generation, current.adapter_id)
    )


def _unload(state: State, command: int, name: str, deadline: float, cancel_late: bool) -> None:
    entry = state.names.names.get(name)
    if entry is None:
        raise _refuse("unknown-adapter", "no adapter of this name", name)
    if state.default == name:
        raise _refuse("adapter-is-default", "rotate the default away first", name)
    gone = Failure("request", "adapter-unloaded", "the adapter was unloaded", name)
    busy = {j.slot for j in state.commits.values() if j.name == name}
    adapters.abandon(state, entry, gone)
    for seq in state.lanes.of_adapter(name):
        if not seq.leased:
            state.end(seq, "error", gone)
    state.drop_sources(state.names.forget(entry))
    state.trim_images()
    for slot in state.slots.slots:
        if slot.version is None or slot.version.name != name:
            continue
        if slot.state is SlotState.READY:
            state.slots.retire(slot)
            state.slot_emptied(slot.index)
            continue
        if slot.state is SlotState.IN_USE:
            state.slots.drain(slot, -1)
        busy.add(slot.index)
    if entry.current is not None:
        state.version_left(entry.current)
    state.log.add(f"adapter {name}", "unloaded")
    state.commands[command] = -1
    state.unloading.append(Unloading(command, name, deadline, cancel_late, busy))


def settle_unloads(state: State) -> None:
    """Answer unloads whose slots are empty, or whose deadline has come."""
    for unload in list(state.unloading):
        if not unload.slots:
            _answer(state, unload, "unloaded")
        elif state.now >= unload.deadline:
            late = [s for s in state.seqs.values() if s.leased and s.slot in unload.slots]
            if unload.cancel_late:
                gone = Failure(
                    "request", "adapter-unloaded", "unloaded before it finished", unload.name
                )
                for seq in late:
                    state.end(seq, "error", gone)
                _answer(state, unload, "cancelled")
            else:
                _answer(state, unload, "still-draining")


def _answer(state: State, unload: Unloading, outcome: str) -> None:
    state.unloading.remove(unload)
    state.reply([unload.command], Reply(-1, outcome, unload.name))


def cancel_command(state: State, event: CancelCommand) -> None:
    """Nobody waits for the answer; the job goes on for the others, and for its effect."""
    ident = state.commands.pop(event.command, None)
    if ident is None or ident < 0:
        return
    job = state.jobs.get(ident)
    if job is not None:
        job.commands.remove(event.command)
