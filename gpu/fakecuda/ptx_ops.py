"""What each PTX instruction does to the lanes of a batch of blocks.

Owns nothing: `build` turns one instruction into an `Op`, a closure over decoded operands. Registers
hold an array (one value a lane) or one numpy scalar (the same value in every lane), as unsigned
bits, or bool for predicates. Arrays are never changed in place, so two registers may share one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .arena import AccessError, Arena
from .overlap import Early, Store
from .ptx_parse import Instruction, KernelCode

TYPES: Final[dict[str, type[np.generic]]] = {
    "b8": np.uint8, "u8": np.uint8, "s8": np.int8,
    "b16": np.uint16, "u16": np.uint16, "s16": np.int16,
    "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "f32": np.float32,
    "b64": np.uint64, "u64": np.uint64, "s64": np.int64, "f64": np.float64,
    "pred": np.bool_,
}  # fmt: skip
SPECIAL: Final = frozenset(
    {f"%{name}.{axis}" for name in ("tid", "ctaid", "ntid", "nctaid") for axis in "xyz"}
    | {"%laneid"}
)

Lanes = Any
"""A register's content: numpy array or numpy scalar, of any type."""
Select = slice | npt.NDArray[np.int64]
ALL: Final = slice(None)
Reader = Callable[["State", Select], Lanes]


@dataclass
class State:
    """Registers, shared memory and identity of the lanes of one batch of blocks."""

    name: str
    lanes: int
    thread: npt.NDArray[np.int64]
    block: npt.NDArray[np.int64]
    first_block: int
    threads: int
    special: dict[str, Lanes]
    params: dict[str, np.generic]
    arena: Arena
    shared_bytes: int
    blocks: int
    regs: dict[str, Lanes] = field(default_factory=dict)
    stores: list[Store] = field(default_factory=list)
    early: Early | None = None

    def __post_init__(self) -> None:
        cells = self.blocks * self.shared_bytes  # of one block after the other
        self.shared = np.full(cells, 0xFF, np.uint8)
        # Last writing warp and reading warp of each shared byte, and the barrier count at the time.
        self.wrote, self.wrote_at = np.full(cells, -1, np.int32), np.full(cells, -1, np.int32)
        self.readers, self.read_at = np.full(cells, -1, np.int32), np.full(cells, -1, np.int32)
        self.epoch = np.zeros(self.blocks, np.int32)
        self._everyone = np.arange(self.lanes)

    def ids(self, sel: Select) -> npt.NDArray[np.int64]:
        """Numbers of the selected lanes."""
        return self._everyone if isinstance(sel, slice) else sel

    def put(self, name: str, value: Lanes, sel: Select) -> None:
        """Write a register in the selected lanes."""
        if value.ndim == 0:
            value = value[()]  # a scalar, also where numpy made an array of no dimensions
        if value.dtype != np.bool_:
            value = value.view(f"u{value.dtype.itemsize}")
        if isinstance(sel, slice):
            self.regs[name] = value
            return
        old = self.regs.get(name)
        if old is None or old.dtype != value.dtype:
            new = np.zeros(self.lanes, value.dtype)
        elif isinstance(old, np.ndarray):
            new = old.copy()
        else:
            new = np.full(self.lanes, old)
        new[sel] = value
        self.regs[name] = new


@dataclass
class Op:
    """One decoded instruction. ``alu`` touches registers only; ``exact`` must know its lanes."""

    kind: str
    predicate: str | None
    negated: bool
    text: str
    run: Callable[[State, Select], None]
    target: int = 0


def _reader(operand: str, kind: str, code: KernelCode) -> Reader:
    """How to read an operand as this type."""
    want = np.dtype(TYPES[kind])
    if operand in SPECIAL:

        def special(state: State, sel: Select) -> Lanes:
            value = state.special[operand]
            value = value[sel] if isinstance(value, np.ndarray) else value
            return value.astype(want)

        return special
    if operand.startswith("%"):

        def register(state: State, sel: Select) -> Lanes:
            value = state.regs.get(operand)
            if value is None:
                raise AccessError(f"{code.name}: register {operand} is read before it is written")
            if isinstance(value, np.ndarray) and not isinstance(sel, slice):
                value = value[sel]
            if value.dtype == want:
                return value
            if value.dtype.itemsize == want.itemsize:
                return value.view(want)
            return value.astype(f"u{want.itemsize}").view(want)

        return register
    constant = _constant(operand, want, code)
    return lambda state, sel: constant


def _constant(operand: str, want: np.dtype[Any], code: KernelCode) -> np.generic:
    if operand in code.shared:
        value = code.shared[operand]
    elif operand[:2] in ("0f", "0F"):
        value = int(operand[2:], 16)
    elif operand[:2] in ("0d", "0D"):
        value = int(operand[2:], 16)
    else:
        try:
            value = int(operand, 0)
        except ValueError:
            raise AccessError(f"{code.name}: unknown operand {operand}", 218) from None
    size = want.itemsize
    raw = (value & ((1 << (8 * size)) - 1)).to_bytes(size, "little")
    made: np.generic = np.frombuffer(raw, want)[0]
    return made


COMPARE: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lo": lambda a, b: a < b,
    "ls": lambda a, b: a <= b,
    "hi": lambda a, b: a > b,
    "hs": lambda a, b: a >= b,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "equ": lambda a, b: ~((a < b) | (a > b)),
    "neu": lambda a, b: a != b,
}
BINARY: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "min": np.fmin,
    "max": np.fmax,
}
WIDER: Final = {"s32": "s64", "u32": "u64", "u16": "u32", "s16": "s32"}


def _shift(name: str, value: Lanes, by: Lanes, want: np.dtype[Any]) -> Lanes:
    bits = 8 * want.itemsize
    safe = np.minimum(by, bits - 1).astype(want)
    moved = np.left_shift(value, safe) if name == "shl" else np.right_shift(value, safe)
    if name == "shr" and want.kind == "i":
        return moved  # a shift by bits - 1 is what a longer arithmetic shift gives
    return np.where(by >= bits, want.type(0), moved).astype(want)


def _alu(code: KernelCode, op: tuple[str, ...], o: tuple[str, ...]) -> Callable[..., None] | None:
    """The closure of an instruction that only touches registers; ``None`` if it is not known."""
    name, kind = op[0], op[-1]
    how = op[1] if len(op) > 1 else ""
    if kind not in TYPES:
        return None
    want = np.dtype(TYPES[kind])

    def r(at: int, as_kind: str = kind) -> Reader:
        return _reader(o[at], as_kind, code)

    if name == "mov" and len(o) == 2 and o[1].startswith("{"):
        half = f"b{4 * want.itemsize}"
        parts = [_reader(x.strip(), half, code) for x in o[1].strip("{}").split(",")]
        by = np.dtype(TYPES[f"u{8 * want.itemsize}"])

        def pack(s: State, sel: Select) -> None:
            lo, high = (part(s, sel).astype(by) for part in parts)
            s.put(o[0], lo | (high << by.type(4 * by.itemsize)), sel)

        return pack
    if name == "mov" and o[0].startswith("{"):
        half = f"u{4 * want.itemsize}"
        names = [x.strip() for x in o[0].strip("{}").split(",")]
        whole = _reader(o[1], f"u{8 * want.itemsize}", code)

        def unpack(s: State, sel: Select) -> None:
            value = whole(s, sel)
            for at, target in enumerate(names):
                if target != "_":
                    shifted = value >> value.dtype.type(4 * want.itemsize * at)
                    s.put(target, shifted.astype(TYPES[half]), sel)

        return unpack
    if name in ("mov", "cvta"):
        a = r(1)
        return lambda s, sel: s.put(o[0], a(s, sel), sel)
    if name in BINARY and len(op) <= 3 and (len(op) == 2 or how == "rn"):
        a, b, f = r(1), r(2), BINARY[name]
        return lambda s, sel: s.put(o[0], f(a(s, sel), b(s, sel)), sel)
    if name == "mul" and how == "wide":
        a, b, to = r(1), r(2), TYPES[WIDER[kind]]
        return lambda s, sel: s.put(o[0], a(s, sel).astype(to) * b(s, sel).astype(to), sel)
    if name == "mul" and how == "hi" and want.itemsize == 4:
        a, b, to = r(1), r(2), TYPES[WIDER[kind]]

        def mul_high(s: State, sel: Select) -> None:
            product = a(s, sel).astype(to) * b(s, sel).astype(to)
            s.put(o[0], (product >> to(32)).astype(want), sel)

        return mul_high
    if name == "mul" and how in ("lo", "rn", kind):
        a, b = r(1), r(2)
        return lambda s, sel: s.put(o[0], a(s, sel) * b(s, sel), sel)
    if name == "mad" and how == "wide":
        a, b, to = r(1), r(2), TYPES[WIDER[kind]]
        c = r(3, WIDER[kind])
        return lambda s, sel: s.put(
            o[0], a(s, sel).astype(to) * b(s, sel).astype(to) + c(s, sel), sel
        )
    if name == "mad" and how == "lo":
        a, b, c = r(1), r(2), r(3)
        return lambda s, sel: s.put(o[0], a(s, sel) * b(s, sel) + c(s, sel), sel)
    if name == "fma" and how == "rn" and kind == "f32":
        # The product is exact in float64; the sum is rounded twice, which can differ from a GPU
        # in the last bit once in about 2**29 operations.
        a, b, c = r(1), r(2), r(3)
        f8 = np.float64
        return lambda s, sel: s.put(
            o[0],
            (a(s, sel).astype(f8) * b(s, sel).astype(f8) + c(s, sel).astype(f8)).astype(want),
            sel,
        )
    if name in ("div", "rem") and want.kind in "iu":
        a, b = r(1), r(2)

        def divide(s: State, sel: Select) -> None:
            x, y = a(s, sel), b(s, sel)
            if want.kind == "u":
                s.put(o[0], x // y if name == "div" else x % y, sel)
                return
            quotient = (np.sign(x) * np.sign(y) * (np.abs(x) // np.abs(y))).astype(want)
            s.put(o[0], quotient if name == "div" else (x - quotient * y).astype(want), sel)

        return divide
    if name == "div" and how == "rn":
        a, b = r(1), r(2)
        return lambda s, sel: s.put(o[0], a(s, sel) / b(s, sel), sel)
    if name in ("shl", "shr"):
        a, by_ = r(1), r(2, "u32")
        return lambda s, sel: s.put(o[0], _shift(name, a(s, sel), by_(s, sel), want), sel)
    if name == "cvt" and len(op) == 3 and how in TYPES:
        a, to = r(1), TYPES[how]
        if np.dtype(to).kind == "f" and want.kind == "f" and np.dtype(to).itemsize < want.itemsize:
            return None  # needs a rounding mode
        return lambda s, sel: s.put(o[0], a(s, sel).astype(to), sel)
    if name == "cvt" and len(op) == 4 and how in ("rn", "rzi") and op[2] in TYPES:
        a, to = r(1), TYPES[op[2]]
        return lambda s, sel: s.put(o[0], a(s, sel).astype(to), sel)
    if name in ("neg", "abs", "not"):
        a = r(1)
        f1: Callable[[Any], Any] = {"neg": np.negative, "abs": np.abs, "not": np.invert}[name]
        return lambda s, sel: s.put(o[0], f1(a(s, sel)), sel)
    if name == "popc":
        a = r(1)
        return lambda s, sel: s.put(o[0], np.bitwise_count(a(s, sel)).astype(np.uint32), sel)
    if name == "setp" and len(op) == 3 and how in COMPARE:
        a, b, f = r(1), r(2), COMPARE[how]
        return lambda s, sel: s.put(o[0], np.bool_(f(a(s, sel), b(s, sel))), sel)
    if name == "selp":
        a, b, q = r(1), r(2), r(3, "pred")
        choose: Callable[[Any, Any, Any], Any] = np.where
        return lambda s, sel: s.put(o[0], choose(q(s, sel), a(s, sel), b(s, sel)).astype(want), sel)
    return None


def build(code: KernelCode, at: int) -> Op:
    """Decode instruction ``at``; one that is not known raises when it would run."""
    from .ptx_memory import memory_op  # late: it needs the types of this file

    ins: Instruction = code.code[at]
    op, o = ins.op, ins.operands
    made = Op("alu", ins.predicate, ins.negated, ins.text, _nothing)
    if op[0] == "bra":
        made.kind, made.target = "branch", code.labels[o[0]]
        return made
    if op[0] in ("ret", "exit"):
        made.kind = "return"
        return made
    if op[0] in ("bar", "barrier") and o == ("0",):
        made.kind = "barrier"
        return made
    run = memory_op(code, ins)
    if run is not None:
        made.kind = "exact"
    else:
        run = _alu(code, op, o)
    if run is None:

        def unknown(state: State, sel: Select) -> None:
            raise AccessError(f"{code.name}: `{ins.text}`: not known to the interpreter", 715)

        made.kind, run = "exact", unknown
    made.run = run
    return made


def _nothing(state: State, sel: Select) -> None:
    return None
