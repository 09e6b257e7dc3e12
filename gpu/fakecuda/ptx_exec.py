"""Runs PTX on the CPU: one numpy lane for each CUDA thread, many blocks at once.

What it owns: modules it has decoded (`programs_of`), and nothing else beyond one launch. Lanes with
the lowest program counter go first, so that branches join again as early as possible; while all
lanes agree (the usual case) there is one counter. Blocks are independent and run in batches, last
block first when asked, so that a result that depends on the order of blocks shows.

Judged: every global access (`Arena`), shared accesses (range, alignment, races between warps that
no barrier separates), barriers not all threads of a block reach, shuffles from lanes that do not
take part, two lanes or two blocks that store to one address, kernels that begin early (`overlap`).
Not judged: speed, memory order between blocks, races inside a warp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

from .arena import AccessError, Arena
from .overlap import Early, Store, Trail
from .ptx_ops import ALL, SPECIAL, Lanes, Op, Select, State, build
from .ptx_parse import PARAM_BYTES, KernelCode, parse_module

LANES_AT_ONCE: Final = 1 << 15
MAX_STEPS: Final = 2_000_000
"""Instructions one batch of blocks may take; more is a loop without end."""

Dim3 = tuple[int, int, int]


class Program:
    """One kernel, decoded once and launched often."""

    def __init__(self, code: KernelCode) -> None:
        self.code = code
        self.ops: list[Op] = [build(code, at) for at in range(len(code.code))]

    def launch(
        self,
        grid: Dim3,
        block: Dim3,
        args: Sequence[bytes],
        shared_bytes: int,
        arena: Arena,
        *,
        backwards: bool = False,
        ahead: Trail | None = None,
    ) -> list[Store]:
        """Run the whole grid; ``args`` are the raw bytes of each parameter. Returns what it stored.

        ``ahead``: what the kernel before it stored, if this one may begin before that has ended.

        Raises:
            AccessError: what a GPU would not survive, with the instruction.
        """
        threads = block[0] * block[1] * block[2]
        blocks = grid[0] * grid[1] * grid[2]
        if threads > self.code.max_threads:
            raise AccessError(f"{self.code.name}: more threads than its launch bounds", 701)
        params = {}
        for (kind, name), raw in zip(self.code.params, args, strict=True):
            wide = "u8" if PARAM_BYTES[kind] == 8 else "u4"
            params[name] = np.frombuffer(raw, wide)[0]
        batch = max(1, LANES_AT_ONCE // threads)
        firsts = range(0, blocks, batch)
        stores: list[Store] = []
        waited = ahead is None
        for first in reversed(firsts) if backwards else firsts:
            count = min(batch, blocks - first)
            state = self._state(grid, block, first, count, params, shared_bytes, arena)
            if ahead is not None:
                state.early = Early(ahead, state.lanes)
            with np.errstate(all="ignore"):
                _Run(self, state).run()
            stores += state.stores
            waited = waited or bool(state.early and state.early.waited.any())
        if not waited:
            raise AccessError(
                f"{self.code.name}: no thread waits for the kernel before: others may overtake it"
            )
        _judge_stores(self.code.name, stores)
        return stores

    def _state(
        self,
        grid: Dim3,
        block: Dim3,
        first: int,
        count: int,
        params: dict[str, np.generic],
        shared_bytes: int,
        arena: Arena,
    ) -> State:
        threads = block[0] * block[1] * block[2]
        lane = np.arange(threads * count)
        t, b = lane % threads, lane // threads + first
        u4 = np.uint32
        special: dict[str, Lanes] = {
            "%tid.x": (t % block[0]).astype(u4),
            "%tid.y": (t // block[0] % block[1]).astype(u4),
            "%tid.z": (t // (block[0] * block[1])).astype(u4),
            "%ctaid.x": (b % grid[0]).astype(u4),
            "%ctaid.y": (b // grid[0] % grid[1]).astype(u4),
            "%ctaid.z": (b // (grid[0] * grid[1])).astype(u4),
            "%laneid": (t % 32).astype(u4),
            **{f"%ntid.{axis}": u4(size) for axis, size in zip("xyz", block, strict=True)},
            **{f"%nctaid.{axis}": u4(size) for axis, size in zip("xyz", grid, strict=True)},
        }
        assert set(special) == SPECIAL
        return State(
            name=self.code.name,
            lanes=len(lane),
            thread=t,
            block=lane // threads,
            first_block=first,
            threads=threads,
            special=special,
            params=params,
            arena=arena,
            shared_bytes=self.code.shared_bytes + shared_bytes,
            blocks=count,
        )


@lru_cache(maxsize=256)
def programs_of(ptx: str) -> Mapping[str, Program]:
    """Every entry of a PTX text, decoded. A program never changes, so machines may share one.

    Raises:
        AccessError: as `parse_module`.
    """
    return MappingProxyType({name: Program(code) for name, code in parse_module(ptx).items()})


class _Run:
    """The program counters of one batch of blocks."""

    def __init__(self, program: Program, state: State) -> None:
        self.ops = program.ops
        self.end = len(program.ops)
        self.state = state
        self.pcs = np.zeros(state.lanes, np.int64)
        self.waiting = np.zeros(state.lanes, bool)
        self.pc = 0
        self.alive: Select = ALL  # all lanes that have not returned, while they agree
        self.agree = True

    def run(self) -> None:
        """Until every lane has returned."""
        for _ in range(MAX_STEPS):
            if self.agree:
                if self.pc >= self.end or len(self.state.ids(self.alive)) == 0:
                    return
                self._together()
            elif not self._apart():
                return
        raise AccessError(f"{self.state.name}: a loop without end", 702)

    def _together(self) -> None:
        op, state = self.ops[self.pc], self.state
        if op.kind == "alu" and op.predicate is None:
            op.run(state, ALL)  # what lanes that returned compute is never seen
            self.pc += 1
        elif op.predicate is not None:
            taken = self._taken(op, self.alive)
            if taken.all():
                self._issue_together(op, self.alive)
            elif not taken.any():
                self.pc += 1
            else:
                self._split()
                self._issue_apart(op, state.ids(self.alive), taken)
        else:
            self._issue_together(op, self.alive)

    def _taken(self, op: Op, sel: Select) -> npt.NDArray[np.bool_]:
        assert op.predicate is not None
        values = self.state.regs.get(op.predicate)
        if values is None:
            raise AccessError(f"{self.state.name}: `{op.text}`: predicate never written", 715)
        if not isinstance(values, np.ndarray):
            values = np.full(len(self.state.ids(sel)), bool(values))
        elif sel is not ALL:
            values = values[sel]
        return ~values if op.negated else values

    def _issue_together(self, op: Op, sel: Select) -> None:
        if op.kind == "branch":
            self.pc = op.target
        elif op.kind == "return":
            self.pc = self.end
        elif op.kind == "barrier":
            self._barrier(self.state.ids(sel))
            self.pc += 1
        else:
            op.run(self.state, sel)
            self.pc += 1

    def _split(self) -> None:
        ids = self.state.ids(self.alive)
        self.pcs[:] = self.end
        self.pcs[ids] = self.pc
        self.waiting[:] = False
        self.agree = False

    def _apart(self) -> bool:
        """One step of lanes that do not agree; false when none is left."""
        waiting = bool(self.waiting.any())
        turns = np.where(self.waiting, self.end, self.pcs) if waiting else self.pcs.copy()
        at = int(turns.min())
        if at == self.end:
            if not waiting:
                return False
            ids = np.flatnonzero(self.waiting)
            if len(np.unique(self.pcs[ids])) > 1:
                raise AccessError(f"{self.state.name}: threads wait at different barriers", 719)
            self._barrier(ids)
            self.pcs[ids] += 1
            self.waiting[:] = False
            return True
        ids = np.flatnonzero(turns == at)
        # Straight on with this group until it branches or comes where others wait for their turn.
        turns[ids] = self.end
        limit = int(turns.min())
        if limit == self.end and not waiting:
            self.pc, self.agree = at, True
            self.alive = ALL if len(ids) == self.state.lanes else ids
            return True
        while at < limit and (op := self.ops[at]).kind in ("alu", "exact"):
            chosen = ids if op.predicate is None else ids[self._taken(op, ids)]
            if len(chosen):
                op.run(self.state, chosen)
            at += 1
        self.pcs[ids] = at
        if at < limit:
            op = self.ops[at]
            taken = np.ones(len(ids), bool) if op.predicate is None else self._taken(op, ids)
            self._issue_apart(op, ids, taken)
        return True

    def _issue_apart(
        self, op: Op, ids: npt.NDArray[np.int64], taken: npt.NDArray[np.bool_]
    ) -> None:
        chosen = ids[taken]
        if op.kind == "barrier":
            self.waiting[chosen] = True
            self.pcs[ids[~taken]] += 1
            return
        self.pcs[ids] += 1
        if op.kind == "branch":
            self.pcs[chosen] = op.target
        elif op.kind == "return":
            self.pcs[chosen] = self.end
        elif len(chosen):
            op.run(self.state, chosen)

    def _barrier(self, ids: npt.NDArray[np.int64]) -> None:
        state = self.state
        counts = np.bincount(state.block[ids], minlength=state.blocks)
        partial = (counts > 0) & (counts < state.threads)
        if partial.any():
            at = int(np.flatnonzero(partial)[0])
            raise AccessError(
                f"{state.name}: block {at + state.first_block}: only {counts[at]} of "
                f"{state.threads} threads reach a barrier",
                719,
            )
        state.epoch[counts > 0] += 1


def _judge_stores(name: str, stores: list[Store]) -> None:
    """Two blocks of one launch must not store to one address: their order is nobody's."""
    if not stores:
        return
    addresses = np.concatenate([store.addresses for store in stores])
    blocks = np.concatenate([store.blocks for store in stores])
    order = np.argsort(addresses, kind="stable")
    addresses, blocks = addresses[order], blocks[order]
    clash = (addresses[1:] == addresses[:-1]) & (blocks[1:] != blocks[:-1])
    if clash.any():
        at = int(np.flatnonzero(clash)[0])
        raise AccessError(
            f"{name}: blocks {blocks[at]} and {blocks[at + 1]} both store to {addresses[at]:#x}"
        )
