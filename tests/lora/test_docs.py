"""docs/reject-codes.md is complete, and every code it lists is tested."""

from __future__ import annotations

import ast
import re
from typing import Any

from rota.gpu.lora import config as config_module

# Helpers of the room that take a code as a positional argument, and where.
HELPERS = {"_refuse": 0, "_bad": 0, "too_large": 0}
PATTERN_HELPER = 1  # patterns._bad(why, code, key)


def codes_in_source(kit: Any) -> set[str]:
    found: set[str] = set()
    for path in sorted((kit.root / "gpu/lora").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            for keyword in node.keywords:
                if keyword.arg == "code":
                    found |= strings(keyword.value)
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            if name == "_bad" and path.name == "safefile.py":
                continue  # its first argument is the message; its code is fixed inside
            place = PATTERN_HELPER if path.name == "patterns.py" else HELPERS.get(name)
            if name in HELPERS and place is not None and len(node.args) > place:
                found |= strings(node.args[place])
    fields = set(config_module._KNOWN - config_module._NEUTRAL)
    return found | fields | set(config_module._MUTATING_INITS)


def strings(node: ast.expr) -> set[str]:
    """String constants of an expression: one, or the two of ``a if c else b``."""
    return {
        part.value
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    }


def codes_in_docs(kit: Any) -> set[str]:
    text = (kit.root / "docs/reject-codes.md").read_text()
    return set(re.findall(r"^\| `([a-z0-9_-]+)` \|", text, re.MULTILINE))


def test_every_code_is_documented_and_none_is_invented(kit: Any) -> None:
    source, docs = codes_in_source(kit), codes_in_docs(kit)
    assert len(source) > 70
    assert source - docs == set()
    # Codes chosen by a variable (targets.check_targets) are constants elsewhere in its file.
    rest = docs - source
    text = (kit.root / "gpu/lora/targets.py").read_text()
    assert all(f'"{code}"' in text for code in rest), rest


def test_every_documented_code_is_tested(kit: Any) -> None:
    text = "".join(
        path.read_text()
        for path in sorted((kit.root / "tests/lora").glob("test_*.py"))
        if path.name != "test_docs.py"
    )
    assert {code for code in codes_in_docs(kit) if f'"{code}"' not in text} == set()
