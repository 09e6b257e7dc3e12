"""Every code that is raised has a line in the documentation, and every line a code.

Codes of adapters are the business of tests/lora/test_docs.py. Those of the simulator and of the
test driver are no user's.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("error-codes.md", "reject-codes.md", "rdma.md")
ROOMS = ("gpu", "sched", "rdma")
NOT_HERE = ("gpu/lora/", "gpu/fakecuda/", "sched/sim/")
CODE = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)+|[A-Z]+_FULL")
Trees = dict[str, ast.Module]


@pytest.fixture(scope="module")
def trees() -> Trees:
    found = {}
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith(NOT_HERE):
                found[name] = ast.parse(path.read_text())
    return found


def places(trees: Trees) -> dict[str, int]:
    """Name of a function or class -> where its ``code`` stands among the arguments."""
    found: dict[str, int] = {}
    for tree in trees.values():
        for node in ast.walk(tree):
            names: list[str] = []
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names = [a.arg for a in node.args.args if a.arg not in ("self", "cls")]
            elif isinstance(node, ast.ClassDef):
                fields = (part for part in node.body if isinstance(part, ast.AnnAssign))
                names = [f.target.id for f in fields if isinstance(f.target, ast.Name)]
            if "code" in names and not isinstance(node, ast.Module):
                # What has arguments and is no module has a name.
                found[node.name] = names.index("code")  # type: ignore[attr-defined]
    return found


def strings(node: ast.expr) -> Iterator[str]:
    """The string an expression is, or those it chooses from."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from strings(node.body)
        yield from strings(node.orelse)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        for part in node.args[1:]:  # table.get(key, otherwise)
            yield from strings(part)


def raised(trees: Trees) -> set[str]:
    found: set[str] = set()
    helpers = places(trees)
    for tree in trees.values():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            func = node.func
            name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
            given = [k.value for k in node.keywords if k.arg == "code"]
            place = helpers.get(name)
            if not given and place is not None and place < len(node.args):
                given = [node.args[place]]
            for value in given:
                found |= {text for text in strings(value) if CODE.fullmatch(text)}
    return found


def documented() -> set[str]:
    found: set[str] = set()
    for page in PAGES:
        for line in (ROOT / "docs" / page).read_text().splitlines():
            if line.startswith("| `"):
                found |= set(re.findall(r"`([A-Za-z0-9_-]+)`", line.split("|")[1]))
    return found


def test_every_code_has_a_line(trees: Trees) -> None:
    codes = raised(trees)
    assert len(codes) > 200
    assert codes - documented() == set()


def test_every_line_is_of_a_code(trees: Trees) -> None:
    said = {
        node.value
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    page = (ROOT / "docs" / "error-codes.md").read_text()
    listed = set(re.findall(r"^\| `([A-Za-z0-9_-]+)` \|", page, re.MULTILINE))
    assert len(listed) > 150 and listed - said == set()
