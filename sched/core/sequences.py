"""Sequences: one request's run. Owns the per-sequence record; transitions go through the table."""

from __future__ import annotations

from dataclasses import dataclass, field

from .events import Submit
from .prefix import Node
from .story import Log
from .tables import SEQ_TABLE, SeqEvent, SeqState


@dataclass(slots=True, eq=False)
class Sequence:
    """``tokens`` = prompt then output; ``computed`` of them are in KV; ``slot`` is the leased slot
    or -1 (base, or not admitted yet: then ``leased`` is false)."""

    id: int
    tokens: list[int]
    prompt_len: int
    adapter: str | None
    max_len: int
    stop_ids: frozenset[int]
    min_len: int
    priority: int
    deadline: float | None
    state: SeqState = SeqState.WAITING
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    nodes: list[Node] = field(
        default_factory=list
    )  #: of the prefix cache, leased: blocks it shares
    slot: int = -1
    leased: bool = False
    adapter_id: int = 0
    #: What was found in the prefix cache while it waits, and for which question.
    found: list[Node] = field(default_factory=list)
    sought: tuple[int, ...] | None = None
    resume: Node | None = None  #: its next row loads the snapshot of this node, its last
    host_tokens: int = 0  #: of its tokens whose KV is in host memory, or on its way there or back
    leader: Sequence | None = None  #: of the samples of its prompt, while this one follows
    followers: list[Sequence] = field(default_factory=list)
    admitted: bool = False  #: has been on the device at least once
    in_flight: int = 0  #: steps it has a row in, or its copy, that are not over

    @classmethod
    def of(cls, event: Submit, ident: int, adapter: str | None, max_context: int) -> Sequence:
        prompt_len = len(event.prompt)
        return cls(
            id=ident,
            tokens=list(event.prompt),
            prompt_len=prompt_len,
            adapter=adapter,
            max_len=min(prompt_len + event.max_tokens, max_context),
            stop_ids=frozenset(event.stop_ids),
            min_len=prompt_len + event.min_tokens,
            priority=event.priority,
            deadline=event.deadline,
        )

    def move(self, event: SeqEvent, log: Log) -> None:
        target = SEQ_TABLE.get((self.state, event))
        if target is self.state:
            return
        subject = f"seq {self.id}"
        if target is None:
            raise log.broken(subject, f"{event.value} in state {self.state.value}")
        log.add(subject, f"{self.state.value} -{event.value}-> {target.value}")
        self.state = target

    def finish_reason(self) -> str | None:
        """Why the last sampled token ends the sequence, or ``None``."""
        length = len(self.tokens)
        if self.stop_ids and length >= self.min_len and self.tokens[-1] in self.stop_ids:
            return "stop"
        return "length" if length >= self.max_len else None
