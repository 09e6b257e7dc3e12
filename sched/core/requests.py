"""Requests coming and going: submit, cancel, stop, deadlines."""

from __future__ import annotations

from . import adapters, retry, samples
from .effects import Ended
from .events import Cancel, Failure, Stop, Submit
from .sequences import Sequence
from .state import State


def _blocks_for(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def _refusal(state: State, event: Submit, adapter: str | None) -> Failure | None:
    config = state.config
    if state.dead is not None:
        return state.dead
    if state.closing:
        return Failure("closed", "engine-closed", "the engine is closing")
    waiting = state.lanes.waiting + state.following
    if waiting + 1 + len(event.siblings) > config.max_waiting:
        return Failure(
            "capacity",
            "QUEUE_FULL",
            "too many requests wait already",
            expected=f"at most {config.max_waiting} waiting",
            found=f"{waiting}, and {1 + len(event.siblings)} more",
            retry_after_s=retry.queue_full(state),
        )
    if not event.prompt:
        return Failure("request", "empty-prompt", "the prompt has no tokens")
    if event.max_tokens < 1:
        return Failure(
            "request", "bad-max-tokens", "nothing to generate", None, ">= 1", str(event.max_tokens)
        )
    length = len(event.prompt)
    if length >= config.max_context:
        return Failure(
            "request",
            "prompt-too-long",
            "the prompt leaves no room for a new token",
            expected=f"fewer than {config.max_context} tokens",
            found=str(length),
        )
    longest = min(length + event.max_tokens, config.max_context)
    need = _blocks_for(longest, config.block_size)
    if need > config.num_blocks:
        return Failure(
            "request",
            "kv-too-small",
            "the request could never finish in this KV memory",
            expected=f"at most {config.num_blocks * config.block_size} tokens",
            found=str(longest),
        )
    if adapter is None:
        return None
    entry = state.names.names.get(adapter)
    if entry is None:
        return Failure("request", "unknown-adapter", "no adapter of this name", subject=adapter)
    return retry.backing_off(state, entry)


def submit(state: State, event: Submit) -> None:
    adapter = state.default if event.use_default else event.adapter
    idents = (event.seq, *event.siblings)
    state.counters.submitted += len(idents)
    failure = _refusal(state, event, adapter)
    if failure is not None:
        state.counters.ended += len(idents)
        for ident in idents:
            state.log.add(f"seq {ident}", f"refused: {failure.code}")
            state.out.append(Ended(ident, "error", 0, failure))
        return
    seqs = [Sequence.of(event, ident, adapter, state.config.max_context) for ident in idents]
    for seq in seqs:
        if seq.id in state.seqs:
            raise state.log.broken(f"seq {seq.id}", "submitted twice")
        state.seqs[seq.id] = seq
        state.watch_deadline(seq)
        state.log.add(f"seq {seq.id}", f"submitted for {adapter or 'base'}")
    samples.join(state, seqs)
    if adapter is not None and not adapters.leasable(state, adapter):
        # Now, not when the planner comes to its lane: with a full batch that may be long.
        adapters.miss(state, adapter)


def cancel(state: State, event: Cancel) -> None:
    """A sequence that has ended already is left alone: its caller may cross with its end."""
    seq = state.seqs.get(event.seq)
    if seq is not None:
        state.end(seq, event.reason)


def stop(state: State, event: Stop) -> None:
    seq = state.seqs.get(event.seq)
    if seq is not None:
        state.end(seq, "stop")


def expire(state: State) -> None:
    """End every sequence whose deadline has come."""
    while (when := state.next_deadline()) is not None and when <= state.now:
        state.end(state.due(), "deadline")
