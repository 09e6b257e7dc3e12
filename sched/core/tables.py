"""Transitions of slots and sequences as literal tables. An absent pair is a bug, never a no-op.

The diagrams in docs/states.md are generated from these tables.
"""

from __future__ import annotations

import enum


class _Fast(enum.Enum):
    """Members are one of a kind, so identity is their hash; Enum's own costs a Python call."""

    __hash__ = object.__hash__


class SlotState(_Fast):
    EMPTY = "EMPTY"
    STAGING = "STAGING"  #: chosen; a commit into it is in flight
    READY = "READY"  #: holds a version, no lease
    IN_USE = "IN_USE"  #: holds a version, at least one lease
    DRAINING = "DRAINING"  #: leases remain, no new ones are given


class SlotEvent(_Fast):
    CHOOSE = "choose"
    COMMITTED = "committed"
    COMMIT_FAILED = "commit_failed"
    LEASE = "lease"
    RELEASE = "release"
    RELEASE_LAST = "release_last"
    DRAIN = "drain"
    UNDRAIN = "undrain"
    RETIRE = "retire"


SLOT_TABLE: dict[tuple[SlotState, SlotEvent], SlotState] = {
    (SlotState.EMPTY, SlotEvent.CHOOSE): SlotState.STAGING,
    (SlotState.READY, SlotEvent.CHOOSE): SlotState.STAGING,
    (SlotState.READY, SlotEvent.LEASE): SlotState.IN_USE,
    (SlotState.READY, SlotEvent.RETIRE): SlotState.EMPTY,
    (SlotState.STAGING, SlotEvent.COMMITTED): SlotState.READY,
    (SlotState.STAGING, SlotEvent.COMMIT_FAILED): SlotState.EMPTY,
    (SlotState.IN_USE, SlotEvent.LEASE): SlotState.IN_USE,
    (SlotState.IN_USE, SlotEvent.RELEASE): SlotState.IN_USE,
    (SlotState.IN_USE, SlotEvent.RELEASE_LAST): SlotState.READY,
    (SlotState.IN_USE, SlotEvent.DRAIN): SlotState.DRAINING,
    (SlotState.DRAINING, SlotEvent.UNDRAIN): SlotState.IN_USE,
    (SlotState.DRAINING, SlotEvent.RELEASE): SlotState.DRAINING,
    (SlotState.DRAINING, SlotEvent.RELEASE_LAST): SlotState.EMPTY,
}


class SeqState(_Fast):
    WAITING = "WAITING"  #: not on the device: new, or preempted (then it keeps its lease)
    FOLLOWING = "FOLLOWING"  #: another sample of its prompt computes that first
    PREFILL = "PREFILL"  #: admitted; some of its tokens are not in KV yet
    DECODE = "DECODE"  #: one new token a step
    SPILLING = "SPILLING"  #: preempted; its blocks are being copied to host memory
    SPILLED = "SPILLED"  #: waits, with its blocks in host memory
    RESTORING = "RESTORING"  #: admitted; its blocks are being copied back
    CLOSING = "CLOSING"  #: ended for its caller; a step or copy it is part of is in flight
    ENDED = "ENDED"


class SeqEvent(_Fast):
    FOLLOW = "follow"
    LED = "led"  #: the prompt is computed, or nobody leads any more
    ADMIT = "admit"
    CHUNK = "chunk"  #: a prefill chunk ran, more to come
    SAMPLED = "sampled"
    PREEMPT = "preempt"
    SPILL = "spill"
    SPILLED = "spilled"
    RESTORE = "restore"
    RESTORED = "restored"
    COPY_FAILED = "copy_failed"
    END = "end"  #: ends with nothing in flight
    END_IN_FLIGHT = "end_in_flight"
    SETTLED = "settled"  #: what was in flight is over


SEQ_TABLE: dict[tuple[SeqState, SeqEvent], SeqState] = {
    (SeqState.WAITING, SeqEvent.ADMIT): SeqState.PREFILL,
    (SeqState.WAITING, SeqEvent.END): SeqState.ENDED,
    (SeqState.WAITING, SeqEvent.FOLLOW): SeqState.FOLLOWING,
    (SeqState.FOLLOWING, SeqEvent.LED): SeqState.WAITING,
    (SeqState.FOLLOWING, SeqEvent.END): SeqState.ENDED,
    (SeqState.PREFILL, SeqEvent.CHUNK): SeqState.PREFILL,
    (SeqState.PREFILL, SeqEvent.SAMPLED): SeqState.DECODE,
    (SeqState.PREFILL, SeqEvent.PREEMPT): SeqState.WAITING,
    (SeqState.PREFILL, SeqEvent.END): SeqState.ENDED,
    (SeqState.PREFILL, SeqEvent.END_IN_FLIGHT): SeqState.CLOSING,
    (SeqState.DECODE, SeqEvent.SAMPLED): SeqState.DECODE,
    (SeqState.DECODE, SeqEvent.PREEMPT): SeqState.WAITING,
    (SeqState.DECODE, SeqEvent.END): SeqState.ENDED,
    (SeqState.DECODE, SeqEvent.END_IN_FLIGHT): SeqState.CLOSING,
    (SeqState.PREFILL, SeqEvent.SPILL): SeqState.SPILLING,
    (SeqState.DECODE, SeqEvent.SPILL): SeqState.SPILLING,
    (SeqState.SPILLING, SeqEvent.SPILLED): SeqState.SPILLED,
    (SeqState.SPILLING, SeqEvent.COPY_FAILED): SeqState.WAITING,
    (SeqState.SPILLING, SeqEvent.END_IN_FLIGHT): SeqState.CLOSING,
    (SeqState.SPILLED, SeqEvent.RESTORE): SeqState.RESTORING,
    (SeqState.SPILLED, SeqEvent.END): SeqState.ENDED,
    (SeqState.RESTORING, SeqEvent.RESTORED): SeqState.PREFILL,
    (SeqState.RESTORING, SeqEvent.COPY_FAILED): SeqState.WAITING,
    (SeqState.RESTORING, SeqEvent.END_IN_FLIGHT): SeqState.CLOSING,
    (SeqState.CLOSING, SeqEvent.SETTLED): SeqState.ENDED,
}
