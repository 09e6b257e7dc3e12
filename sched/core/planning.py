"""The planner: which rows make the next step, and what a finished step means.

Decode rows first (they are what streams wait for), then prefill of admitted sequences, then
admission from the lanes, within a token budget that bounds the gap between tokens.
"""

from __future__ import annotations

from . import adapters, ahead, resize, samples, spill
from .config import least_prefill
from .effects import DropState, OpenSequence, Row, Token
from .events import Failure, RowDone, StepDone, StepFailed
from .identity import BASE_ID
from .lanes import Lane
from .prefix import Node
from .sequences import Sequence
from .state import State, Step
from .tables import SeqEvent, SeqState


def plan(state: State) -> None:
    """Plan a step if none is in flight, and one ahead of it if nothing speaks against it."""
    if state.dead is not None:
        return
    if not state.steps:
        _plan(state)
    if state.config.step_depth > 1:
        ahead.plan(state)


def _plan(state: State) -> None:
    rows: list[Row] = []
    size = state.config.block_size
    for seq in [s for s in state.running.values() if s.state is SeqState.DECODE]:
        length = len(seq.tokens)
        # An earlier row of this step may have preempted it to find a block.
        if length <= len(seq.blocks) * size or (
            seq.state is SeqState.DECODE and _grow(state, seq, length, rows)
        ):
            rows.append(_row(state, seq, length))
    budget = _prefill_budget(state, len(rows))
    for seq in [s for s in state.running.values() if s.state is SeqState.PREFILL]:
        if budget <= 0:
            break
        if seq.state is SeqState.PREFILL:  # an earlier row of this step may have preempted it
            budget -= _prefill(state, seq, budget, rows)
    _admit(state, budget, rows)
    state.slots.offer()
    if rows:
        ahead.dispatch(state, rows)


def _prefill_budget(state: State, decoding: int) -> int:
    """Tokens of prefill beside ``decoding`` rows. However many decode, a block's worth is left (or
    half of ``mixed_step_tokens``), or who waits to be prefilled would wait until they end."""
    config = state.config
    if not decoding:
        return config.max_step_tokens
    return max(
        config.mixed_step_tokens - decoding,
        least_prefill(config.mixed_step_tokens, config.block_size),
    )


def _row(state: State, seq: Sequence, end: int) -> Row:
    start, known = seq.computed, seq.tokens
    tokens = (known[start],) if end - start == 1 else tuple(known[start:end])
    blocks = tuple(seq.blocks)
    memory = state.memory
    load, save = memory.copies(seq, end) if memory.recurrent else (-1, -1)
    sample = end == len(known)
    return Row(seq.id, seq.slot, seq.adapter_id, start, tokens, blocks, sample, load, save)


def _prefill(state: State, seq: Sequence, budget: int, rows: list[Row]) -> int:
    """Add a chunk of ``seq``; returns its tokens (0 if no block could be had)."""
    end = min(len(seq.tokens), seq.computed + budget)
    end = state.memory.snapshots.cut(seq.prompt_len, seq.computed, end)
    if not _grow(state, seq, end, rows):
        return 0
    rows.append(_row(state, seq, end))
    return end - seq.computed


def _grow(state: State, seq: Sequence, length: int, rows: list[Row]) -> bool:
    """Make ``seq`` hold blocks for ``length`` tokens, preempting others if it must; false if
    ``seq`` itself had to give way."""
    memory = state.memory
    while memory.missing(seq, length) > 0:
        victim = _preemption_victim(state, rows)
        if victim is None:
            return False
        _preempt(state, victim)
        if victim is seq:
            return False
    memory.grow(seq, length)
    return True


def _preemption_victim(state: State, rows: list[Row]) -> Sequence | None:
    """The running sequence to put back: least urgent, then last admitted; never one that already
    has a row in the step being planned."""
    planned = {row.seq for row in rows}
    best: Sequence | None = None
    for seq in state.running.values():
        if seq.id in planned or seq.state not in (SeqState.PREFILL, SeqState.DECODE):
            continue
        if best is None or seq.priority >= best.priority:
            best = seq
    return best


def _preempt(state: State, seq: Sequence) -> None:
    """Back to waiting: copied to host memory, or to be recomputed later as far as the prefix cache
    has lost its blocks by then. Its lease is kept: the version must not change."""
    state.counters.preempted += 1
    if spill.is_cheaper(state, seq):
        spill.begin(state, seq)
        return
    seq.move(SeqEvent.PREEMPT, state.log)
    state.memory.give_back(seq)
    del state.running[seq.id]
    state.lanes.add(seq, front=True)
    if state.config.recurrent:
        state.out.append(DropState(seq.id))


def _admit(state: State, budget: int, rows: list[Row]) -> None:
    """Admit waiting sequences in lane order while tokens, places and blocks last."""
    progress = True
    while progress and budget > 0 and len(state.running) < state.config.max_running:
        progress = False
        for lane, seq in state.lanes.leased() if state.held else state.lanes.heads():
            if budget <= 0 or len(state.running) >= state.config.max_running:
                break
            if (
                not seq.leased
                and seq.adapter is not None
                and not adapters.leasable(state, seq.adapter)
            ):
                _miss(state, lane, seq.adapter)
                continue
            found = _fit(state, seq)
            if found is None:
                # Nobody jumps ahead of a sequence that waits for memory: it would starve.
                return
            _start(state, seq, found)
            state.lanes.took_turn(lane)
            if seq.state is SeqState.PREFILL:
                budget -= _prefill(state, seq, budget, rows)
            progress = True


def _miss(state: State, lane: Lane, name: str) -> None:
    state.lanes.park(lane)
    adapters.miss(state, name)


def _fit(state: State, seq: Sequence) -> list[Node] | None:
    """The cached prefix ``seq`` would begin behind, or ``None`` if there is no memory for it."""
    memory = state.memory
    found = memory.find(seq, _identity(state, seq))
    # What others lease costs nothing; what nobody does is no longer available to anyone else.
    need = memory.need(len(seq.tokens) + 1) - sum(1 for node in found if node.leases)
    spare = state.config.watermark_blocks if state.running else 0
    return found if need + spare <= memory.available else None


def _identity(state: State, seq: Sequence) -> int:
    """The ``adapter_id`` that ``seq`` runs under, or will if it is admitted now."""
    if seq.leased or seq.adapter is None:
        return seq.adapter_id
    version = state.names.names[seq.adapter].current
    return version.adapter_id if version is not None else BASE_ID


def _start(state: State, seq: Sequence, found: list[Node]) -> None:
    state.lanes.remove(seq)
    if seq.state is SeqState.SPILLED:
        spill.restore(state, seq, found)
        return
    if not seq.leased:
        version = None if seq.adapter is None else state.names.names[seq.adapter].current
        assert version is not None or seq.adapter is None
        state.lease(seq, version)
    seq.move(SeqEvent.ADMIT, state.log)
    state.running[seq.id] = seq
    state.memory.admit(seq, found)
    if not seq.admitted:
        seq.admitted = True
        state.counters.prompt_tokens += seq.prompt_len
        state.count_prefix(seq)
        state.out.append(OpenSequence(seq.id))


def step_done(state: State, event: StepDone) -> None:
    step = _take_step(state, event.step)
    if len(event.rows) != len(step.rows):
        raise state.log.broken("step", f"{len(event.rows)} results for {len(step.rows)} rows")
    for index, (row, done) in enumerate(zip(step.rows, event.rows, strict=True)):
        if done.seq != row.seq:
            raise state.log.broken("step", f"row {index}: {done.seq} instead of {row.seq}")
        _row_done(state, step, index, row, done)
    if state.suspect:
        state.suspect = False
        state.memory.prefix.drop_idle()


def _row_done(state: State, step: Step, index: int, row: Row, done: RowDone) -> None:
    seq = state.seqs[row.seq]
    seq.in_flight -= 1
    if seq.state is SeqState.CLOSING:
        state.memory.snapshots.give_back(row.save)
        _wasted(state, seq)
        return
    if done.failure is not None:
        state.memory.snapshots.give_back(row.save)
        state.end(seq, "error", done.failure)
        return
    seq.computed += len(row.tokens)
    if seq.resume is not None:
        state.memory.begun(seq)
    if seq.state is SeqState.PREFILL:
        state.memory.publish(seq)
    if row.save >= 0:
        state.memory.keep(seq, row)
    if not row.sample:
        seq.move(SeqEvent.CHUNK, state.log)
        return
    if seq.state is not SeqState.DECODE:  # where the table leaves it, one row of every step
        seq.move(SeqEvent.SAMPLED, state.log)
    if seq.followers:
        samples.lead_on(state, seq)
    tokens, token = seq.tokens, done.token
    position = len(tokens) - seq.prompt_len
    tokens.append(token)
    state.counters.tokens += 1
    state.out.append(Token(seq.id, token, position, seq.adapter_id, step.id, index))
    reason = seq.finish_reason()
    if reason is not None:
        state.end(seq, reason)


def _wasted(state: State, seq: Sequence) -> None:
    """A row of ``seq``, which had ended, is over: its sample is dropped, and ``seq`` leaves with
    the last such row."""
    state.counters.wasted_rows += 1
    if not seq.in_flight:
        state.settle(seq)


def step_failed(state: State, event: StepFailed) -> None:
    step = _take_step(state, event.step)
    for row in step.rows:
        seq = state.seqs[row.seq]
        seq.in_flight -= 1
        state.memory.snapshots.give_back(row.save)
        if seq.state is SeqState.CLOSING:
            _wasted(state, seq)
        else:
            state.end(seq, "error", event.failure)
    # What a failing device may have touched is not read again; a step behind it holds on to some.
    state.suspect = bool(state.steps)
    state.memory.prefix.drop_idle()
    if event.fatal:
        device_dead(state, event.failure)


def device_dead(state: State, failure: Failure) -> None:
    """The device is gone: everything ends by name, nothing new is accepted."""
    if state.dead is None:
        state.dead = failure
    resize.give_up(state, failure)
    for seq in list(state.seqs.values()):
        state.end(seq, "error", failure)
    state.memory.prefix.disable()
    adapters.fail_all(state, failure)


def _take_step(state: State, ident: int) -> Step:
    if not state.steps or state.steps[0].id != ident:
        raise state.log.broken("step", f"result of step {ident}, which is not the one that runs")
    step = state.steps.popleft()
    state.progress.step_over(step.planned, state.now)
    return step
