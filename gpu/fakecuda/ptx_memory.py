"""PTX instructions that need to know exactly which lanes run them: memory, shuffles, waits, traps.

Owns nothing. Each closure judges before it acts, and names the instruction in what it raises.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from .arena import AccessError
from .overlap import Store
from .ptx_ops import TYPES, Lanes, Reader, Select, State, _reader
from .ptx_parse import Instruction, KernelCode

Run = Callable[[State, Select], None]
ADDRESS = re.compile(r"^\[([%\w$.]+)(?:\+(-?\w+))?\]$")


def memory_op(code: KernelCode, ins: Instruction) -> Run | None:
    """The closure of an instruction of this kind, or ``None``."""
    name = ins.op[0]
    if name in ("ld", "st"):
        return _load_store(code, ins)
    if name == "shfl":
        return _shuffle(code, ins)
    if name == "griddepcontrol":
        waits = ins.op[1] == "wait"

        def depend(state: State, sel: Select) -> None:
            if waits and state.early is not None:
                state.early.waited[sel] = True

        return depend
    if name == "trap":

        def trap(state: State, sel: Select) -> None:
            raise AccessError(f"{code.name}: trap")

        return trap
    return None


def _load_store(code: KernelCode, ins: Instruction) -> Run | None:
    op, o = ins.op, ins.operands
    kind = op[-1]
    want = np.dtype(TYPES[kind])
    vector = next((int(part[1]) for part in op if part in ("v2", "v4")), 1)
    loading = op[0] == "ld"
    match = ADDRESS.match(o[1] if loading else o[0])
    if match is None:
        return None
    symbol, offset = match.group(1), int(match.group(2) or "0", 0)
    names = [x.strip() for x in (o[0] if loading else o[1]).strip("{}").split(",")]
    what = f"{code.name}: `{ins.text}`"
    # A signed value loaded into a wider register is extended by its sign.
    width = code.widths.get(names[0].rstrip("0123456789"), 0)
    wide = np.dtype(f"i{width}") if loading and want.kind == "i" and width > want.itemsize else None

    def land(s: State, name: str, value: Lanes, sel: Select) -> None:
        s.put(name, value if wide is None else value.view(want).astype(wide), sel)

    if op[1] == "param":
        return lambda s, sel: land(s, names[0], s.params[symbol], sel)
    where = _reader(symbol, "u64", code)
    values = [] if loading else [_reader(name, kind, code) for name in names]
    access = _shared if "shared" in op else _global
    if "global" not in op and "shared" not in op:
        return None

    def run(s: State, sel: Select) -> None:
        ids = s.ids(sel)
        address = where(s, sel) + np.uint64(offset & (2**64 - 1))
        data = None
        if not loading:
            data = np.stack([np.broadcast_to(v(s, sel), len(ids)) for v in values])
        if s.early is not None and access is _global:
            s.early.judge(
                ids,
                address,
                want.itemsize * vector,
                storing=not loading,
                read_only="nc" in op,
                what=what,
            )
        found = access(s, ids, address, want, vector, data, what)
        if found is not None:
            for name, value in zip(names, found, strict=True):
                if name != "_":
                    land(s, name, value, sel)

    return run


def _global(
    s: State,
    ids: npt.NDArray[np.int64],
    address: Lanes,
    want: np.dtype[np.generic],
    vector: int,
    data: Lanes,
    what: str,
) -> Lanes:
    item = want.itemsize
    same = not isinstance(address, np.ndarray)
    lanes = np.atleast_1d(address)
    s.arena.judge_lanes(lanes, item * vector, what)
    memory = s.arena.view(item)
    # The arena starts on a page, so an aligned address is a whole number of elements from it.
    at = ((lanes - np.uint64(s.arena.base)) // np.uint64(item)).astype(np.int64)
    if data is None:
        found = [memory[at + j] for j in range(vector)]
        return [value[0] for value in found] if same else found
    lanes, at = np.broadcast_to(lanes, len(ids)), np.broadcast_to(at, len(ids))
    bits = data.view(memory.dtype)
    for j in range(vector):
        memory[at + j] = bits[j]
        if (memory[at + j] != bits[j]).any():
            raise AccessError(f"{what}: two lanes store different values to one address")
        s.stores.append(Store(lanes + np.uint64(item * j), s.block[ids] + s.first_block, item))
    return None


def _shared(
    s: State,
    ids: npt.NDArray[np.int64],
    address: Lanes,
    want: np.dtype[np.generic],
    vector: int,
    data: Lanes,
    what: str,
) -> Lanes:
    nbytes = want.itemsize * vector
    start = np.broadcast_to(address, len(ids)).astype(np.int64)
    if (start < 0).any() or (start + nbytes > s.shared_bytes).any():
        raise AccessError(f"{what}: outside the block's {s.shared_bytes} shared bytes", 700)
    if (start % nbytes).any():
        raise AccessError(f"{what}: misaligned {nbytes}-byte shared access", 716)
    block = s.block[ids]
    cells = (block * s.shared_bytes + start)[:, None] + np.arange(nbytes)
    warp = (s.thread[ids] // 32).astype(np.int32)[:, None]
    epoch = s.epoch[block][:, None]
    race = (s.wrote_at.take(cells) == epoch) & (s.wrote.take(cells) != warp)
    # Cells that were read since the last barrier, by another warp: -2 stands for several.
    read = s.read_at.take(cells) == epoch
    other = read & (s.readers.take(cells) != warp)
    if data is not None:
        race |= other
    if race.any():
        at = int(np.flatnonzero(race.any(axis=1))[0])
        raise AccessError(
            f"{what}: race in shared memory between warps (no barrier between the accesses), "
            f"block {int(s.block[ids[at]]) + s.first_block} thread {int(s.thread[ids[at]])}"
        )
    if data is None:
        reader = np.where(other, np.int32(-2), warp)
        s.readers[cells] = reader
        s.read_at[cells] = epoch
        # Two warps that read one cell in this very instruction: the later lane won above.
        s.readers[cells[s.readers.take(cells) != reader]] = -2
        return list(s.shared.take(cells).view(f"u{want.itemsize}").T.copy())
    raw = np.ascontiguousarray(data.T).view(np.uint8).reshape(len(ids), nbytes)
    s.shared[cells] = raw
    s.wrote[cells] = warp
    s.wrote_at[cells] = epoch
    if (s.wrote.take(cells) != warp).any() or (s.shared.take(cells) != raw).any():
        raise AccessError(f"{what}: race in shared memory: two threads store to one address")
    return None


def _shuffle(code: KernelCode, ins: Instruction) -> Run | None:
    o, mode = ins.operands, ins.op[2]
    target, _, flag = o[0].partition("|")
    source: Reader = _reader(o[1], "b32", code)
    by, clamp = _reader(o[2], "u32", code), _reader(o[3], "u32", code)
    mask = _reader(o[4], "u32", code)
    what = f"{code.name}: `{ins.text}`"

    def run(s: State, sel: Select) -> None:
        ids = s.ids(sel)
        if (np.atleast_1d(clamp(s, sel)) != (0 if mode == "up" else 31)).any():
            raise AccessError(f"{what}: shuffles of part of a warp are not modelled", 715)
        lane = s.thread[ids] % 32
        step = np.broadcast_to(by(s, sel), len(ids)).astype(np.int64)
        wanted = {
            "bfly": lane ^ step,
            "down": lane + step,
            "up": lane - step,
            "idx": step,
        }[mode]
        inside = (wanted >= 0) & (wanted < 32)
        from_lane = np.where(inside, wanted, lane)
        masks = np.broadcast_to(mask(s, sel), len(ids))
        # The lanes of each warp that run this now, as bits.
        warp_start = ids - lane
        running = np.zeros(s.lanes, np.uint32)
        np.bitwise_or.at(running, warp_start, np.uint32(1) << lane.astype(np.uint32))
        if (running[warp_start] != masks).any():
            raise AccessError(f"{what}: not all lanes of the mask run the shuffle, or others do")
        values = np.zeros(s.lanes, np.uint32)
        values[ids] = source(s, sel)
        from_id = warp_start + from_lane
        if not (running[warp_start] >> from_lane.astype(np.uint32) & np.uint32(1)).all():
            raise AccessError(f"{what}: a source lane of the shuffle does not run it")
        s.put(target, values[from_id], sel)
        if flag and flag != "_":
            s.put(flag, inside, sel)

    return run
