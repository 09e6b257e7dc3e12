"""PTX text to instructions, for the subset NVRTC emits for kernels without calls.

Owns nothing: `parse_module` returns frozen descriptions. What it does not know stays in the text of
the instruction and is refused, by name, when it would run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from .arena import AccessError

ENTRY: Final = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)(.*?)\n\{(.*?)\n\}", re.S)
PARAM: Final = re.compile(
    r"\.param\s+\.(\w+)\s+(?:\.ptr\s+(?:\.\w+\s+)*?(?:\.align\s+\d+\s+)?)?([\w$]+)"
)
SHARED: Final = re.compile(r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d*)\]")
LABEL: Final = re.compile(r"^(\$[\w$]+):")
INSTRUCTION: Final = re.compile(r"(?:@(!?)(%\w+)\s+)?([\w.:]+)\s*(.*?);$", re.S)
OPERAND: Final = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
REGISTERS: Final = re.compile(r"\.reg\s+\.[busf](\d+)\s+(%[a-z]+)<")
PARAM_BYTES: Final = {"u64": 8, "s64": 8, "b64": 8, "u32": 4, "s32": 4, "b32": 4, "f32": 4}


@dataclass(frozen=True)
class Instruction:
    """One instruction: ``op`` split at dots, operands as text."""

    predicate: str | None
    negated: bool
    op: tuple[str, ...]
    operands: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class KernelCode:
    """One entry: parameters (type, name), code, labels, and where shared variables lie.

    ``shared_bytes`` is static shared memory; a dynamic array starts there. ``widths`` gives the
    bytes of a register by the letters of its name.
    """

    name: str
    params: tuple[tuple[str, str], ...]
    code: tuple[Instruction, ...]
    labels: dict[str, int]
    shared: dict[str, int]
    shared_bytes: int
    max_threads: int
    widths: dict[str, int]


def parse_module(ptx: str) -> dict[str, KernelCode]:
    """Every entry of a PTX text by name.

    Raises:
        AccessError: code 218 (CUDA_ERROR_INVALID_PTX) when there is no entry or a bad parameter.
    """
    ptx = re.sub(r"//[^\n]*", "", ptx)
    found = {}
    for match in ENTRY.finditer(ptx):
        name, params, directives, body = match.groups()
        found[name] = _entry(ptx, name, params, directives, body)
    if not found:
        raise AccessError("no entry in the PTX", 218)
    return found


def _entry(ptx: str, name: str, params: str, directives: str, body: str) -> KernelCode:
    declared = tuple(PARAM.findall(params))
    for kind, parameter in declared:
        if kind not in PARAM_BYTES:
            raise AccessError(f"{name}: parameter {parameter} has unknown type {kind}", 218)
    shared: dict[str, int] = {}
    size = 0
    sections = sorted(SHARED.findall(ptx), key=lambda found: found[2] == "")
    for align, variable, nbytes in sections:
        if variable not in body:
            continue
        size = -(-size // int(align)) * int(align)
        shared[variable] = size
        size += int(nbytes or 0)
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for raw in re.split(r"\n|(?<=;)", body):
        line = raw.strip()
        while (label := LABEL.match(line)) is not None:
            labels[label.group(1)] = len(code)
            line = line[label.end() :].strip()
        if not line or line.startswith(".") or set(line) <= {"{", "}"}:
            continue
        match = INSTRUCTION.match(line)
        if match is None:
            raise AccessError(f"{name}: cannot read `{line}`", 218)
        negated, predicate, op, rest = match.groups()
        operands = tuple(o.strip() for o in OPERAND.findall(rest) if o.strip())
        code.append(Instruction(predicate, negated == "!", tuple(op.split(".")), operands, line))
    widths = {prefix: int(bits) // 8 for bits, prefix in REGISTERS.findall(body)}
    bound = re.search(r"\.maxntid\s+(\d+)", directives)
    threads = int(bound.group(1)) if bound else 1024
    return KernelCode(name, declared, tuple(code), labels, shared, size, threads, widths)
