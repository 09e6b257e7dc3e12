"""The laws of copies between KV blocks and host memory, judged from events and effects alone."""

from __future__ import annotations

from collections.abc import Callable

from ..core import CoreConfig
from ..core import effects as fx
from ..core import events as ev

Need = Callable[[bool, str, str], None]


class Copies:
    """Which sequences are in host memory or on their way; ``need(truth, law, what)`` reports."""

    def __init__(self, config: CoreConfig, need: Need) -> None:
        self._config = config
        self._need = need
        #: Sequences being copied out, and back; blocks in host memory by sequence.
        self.going: set[int] = set()
        self.coming: set[int] = set()
        self.held: dict[int, int] = {}

    def away(self, seq: int) -> bool:
        """Whether no step may read the sequence."""
        return seq in self.going or seq in self.coming or seq in self.held

    def event(self, event: ev.Event) -> None:
        match event:
            case ev.SpillDone(seq):
                self._need(seq in self.going, "spill", f"seq {seq} is out, was not going")
                self.going.discard(seq)
            case ev.SpillFailed(seq, failure):
                self._need(not failure.code.startswith("sim-"), "device", failure.message)
                self.going.discard(seq)
                self.held.pop(seq, None)
            case ev.RestoreDone(seq):
                self._need(seq in self.coming, "spill", f"seq {seq} is back, was not coming")
                self.coming.discard(seq)
                self.held.pop(seq, None)
            case ev.RestoreFailed(seq, failure):
                self._need(not failure.code.startswith("sim-"), "device", failure.message)
                self.coming.discard(seq)
                self.held.pop(seq, None)
            case _:
                pass

    def spill(self, effect: fx.Spill, computed: int, in_step: bool) -> None:
        """``computed``: tokens of the sequence in KV; ``in_step``: a step in flight reads it."""
        seq, size = effect.seq, self._config.block_size
        self._need(not self.away(seq), "spill", f"seq {seq} spilled twice")
        self._need(not in_step, "quiescence", f"seq {seq} spilled under its own step")
        whole = len(effect.blocks) == -(-computed // size)
        self._need(whole, "spill", f"seq {seq}: {len(effect.blocks)} blocks of {computed} tokens")
        self.going.add(seq)
        self.held[seq] = len(effect.blocks)
        state = self._config.state_blocks if self._config.recurrent else 0
        total = sum(count + state for count in self.held.values())
        self._need(total <= self._config.spill_blocks, "limit", f"{total} blocks in host memory")

    def restore(self, effect: fx.Restore) -> None:
        seq, places = effect.seq, effect.places
        ready = seq in self.held and seq not in self.going and seq not in self.coming
        self._need(ready, "spill", f"seq {seq} comes back, is not out")
        indexes, blocks = [i for i, _ in places], {b for _, b in places}
        last = self.held.get(seq, 0)
        tail = indexes == list(range(last - len(places), last))
        self._need(tail and len(blocks) == len(places), "spill", f"seq {seq}: places {places}")
        self.coming.add(seq)

    def closed(self, seq: int) -> None:
        """The sequence has left the device for good."""
        busy = seq in self.going or seq in self.coming
        self._need(not busy, "quiescence", f"seq {seq} closed under its own copy")
        self.held.pop(seq, None)
