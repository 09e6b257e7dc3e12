"""One step's rows, checked and laid out for the kernels.

What it owns: the fixed arrays of one step (`StepBatch`) and what the step before sampled, which
rows may be fed. Invariants: nothing is written to KV memory
unless every row passed `StepBatch.fill`; tokens of a row lie side by side, rows in call order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
import torch

from ...errors import InternalError
from ..kernels.rope import BLOCK_TOKENS
from .rows import RowLike, RowOutput

IN_FLIGHT: Final = -2
"""In place of a token that its step has yet to choose: the device will have it."""


class Limits(msgspec.Struct, frozen=True):
    """Bounds a row is checked against; ``context`` in tokens."""

    max_step_tokens: int
    max_sequences: int
    context: int
    num_blocks: int
    vocab: int


class StepBatch:
    """Arrays of one step at fixed addresses.

    Attributes after `fill` (cut to the step by the caller):
        tokens, positions: int64 and int32 ``[tokens]``.
        slot_mapping: int64 ``[tokens]``, block * 16 + offset of each token's KV.
        row_seq: int32 ``[tokens]``, row of ``block_tables``.
        lens: int32 ``[tokens]``, keys each token sees (position + 1).
        block_tables: int32 ``[rows, blocks]``.
        slots: slot of each token. last: index of each row's last token.
        unfed: rows that name a row of the step before that sampled nothing. They are fed token 0,
            so that the others run, and are to be answered with an error.
        fed: (row, row of the step before) of rows whose token that step has yet to choose. They
            are fed token 0 here; the device has the token before it begins.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        size = limits.max_step_tokens
        table = -(-limits.context // BLOCK_TOKENS)
        self.tokens = torch.zeros(size, dtype=torch.int64)
        self.positions = torch.zeros(size, dtype=torch.int32)
        self.slot_mapping = torch.zeros(size, dtype=torch.int64)
        self.row_seq = torch.zeros(size, dtype=torch.int32)
        self.lens = torch.zeros(size, dtype=torch.int32)
        self.block_tables = torch.zeros((limits.max_sequences, table), dtype=torch.int32)
        self._tokens, self._positions = self.tokens.numpy(), self.positions.numpy()
        self._mapping, self._row_seq = self.slot_mapping.numpy(), self.row_seq.numpy()
        self._lens, self._tables = self.lens.numpy(), self.block_tables.numpy()
        self.slots: list[int] = []
        self.last: list[int] = []
        self.unfed: list[int] = []
        self.fed: list[tuple[int, int]] = []
        self._sampled: list[tuple[int, int]] = []

    def sampled(self, outputs: Sequence[RowOutput]) -> None:
        """Remember what the step sampled, for rows of the next one."""
        self._sampled = [(output.seq, output.token) for output in outputs]

    def queued(self, rows: Sequence[RowLike]) -> None:
        """Remember that the step of these rows is queued and has sampled nothing yet."""
        self._sampled = [(row.seq, IN_FLIGHT if row.sample else -1) for row in rows]

    def fill(self, rows: Sequence[RowLike]) -> int:
        """Check every row, write the arrays, return the number of tokens.

        Raises:
            InternalError: bad-row (the subject names the sequence, and the message the fault).
        """
        # A step that fails has sampled nothing.
        before, self._sampled = self._sampled, []
        self._check(rows)
        unfed: list[int] = []
        fed: list[tuple[int, int]] = []
        slots: list[int] = []
        last: list[int] = []
        at = 0
        tokens, positions, mapping = self._tokens, self._positions, self._mapping
        for index, row in enumerate(rows):
            count, start = len(row.tokens), row.start
            used = -(-(start + count) // BLOCK_TOKENS)
            self._tables[index, :used] = row.blocks[:used]
            if count == 1:
                token = row.tokens[0]
                if token < 0:
                    source = ~token
                    token = self._fed(row, source, before)
                    if token == IN_FLIGHT:
                        fed.append((index, source))
                        token = 0
                    elif token < 0:
                        unfed.append(index)
                        token = 0
                tokens[at], positions[at] = token, start
                block = row.blocks[start // BLOCK_TOKENS]
                mapping[at] = block * BLOCK_TOKENS + start % BLOCK_TOKENS
                slots.append(row.slot)
            else:
                end = at + count
                tokens[at:end] = row.tokens
                where = np.arange(start, start + count)
                positions[at:end] = where
                blocks = self._tables[index, where // BLOCK_TOKENS].astype(np.int64)
                mapping[at:end] = blocks * BLOCK_TOKENS + where % BLOCK_TOKENS
                slots.extend([row.slot] * count)
            self._row_seq[at : at + count] = index
            at += count
            last.append(at - 1)
        np.add(positions[:at], 1, out=self._lens[:at])
        self.slots, self.last, self.unfed, self.fed = slots, last, unfed, fed
        if at and not 0 <= int(tokens[:at].min()) <= int(tokens[:at].max()) < self.limits.vocab:
            raise self._bad("a token id outside the vocabulary", None, self.limits.vocab, None)
        return at

    def _fed(self, row: RowLike, index: int, before: list[tuple[int, int]]) -> int:
        """What row ``index`` of the step before sampled, -1 if nothing."""
        if index >= len(before):
            return -1
        seq, token = before[index]
        if seq != row.seq:
            raise self._bad("a row is fed another sequence's token", row, row.seq, seq)
        return token

    def _check(self, rows: Sequence[RowLike]) -> None:
        limits = self.limits
        if not 1 <= len(rows) <= limits.max_sequences:
            raise self._bad("too many rows, or none", None, limits.max_sequences, len(rows))
        total = 0
        seqs: set[int] = set()
        written: set[int] = set()
        for row in rows:
            count = len(row.tokens)
            end = row.start + count
            total += count
            if count < 1 or row.start < 0 or end > limits.context:
                found = f"{row.start}..{end - 1}"
                raise self._bad("positions outside the context", row, limits.context, found)
            if row.seq in seqs:
                raise self._bad("a sequence has two rows", row, "one row", row.seq)
            seqs.add(row.seq)
            blocks = row.blocks
            used = -(-end // BLOCK_TOKENS)
            if len(blocks) < used:
                raise self._bad("too few blocks for the positions", row, used, len(blocks))
            if not 0 <= min(blocks[:used]) <= max(blocks[:used]) < limits.num_blocks:
                raise self._bad("a block outside the KV memory", row, limits.num_blocks, blocks)
            for block in blocks[row.start // BLOCK_TOKENS : used]:
                if block in written:
                    raise self._bad("a block is written twice", row, "one writer", block)
                written.add(block)
        if total > limits.max_step_tokens:
            raise self._bad("too many tokens in a step", None, limits.max_step_tokens, total)

    @staticmethod
    def _bad(message: str, row: RowLike | None, expected: object, found: object) -> InternalError:
        return InternalError(
            message,
            code="bad-row",
            subject=None if row is None else f"sequence {row.seq}",
            expected=expected,
            found=str(found)[:200],
        )
