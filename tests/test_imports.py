"""The import rules of docs/architecture.md, read from the syntax tree of every file in the package.

Three rooms (`sched`, `gpu`, `rdma`) and `rota.errors`; `sched` may import the other two, never the
other way. from one import to a complaint, so that each rule can be shown to complain.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("sched", "gpu", "rdma")
BLOCK = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"blocked: {{name}}", name=name)
sys.meta_path.insert(0, Blocker())
"""


@dataclass(frozen=True)
class Import:
    """One imported module, by its full name, and the module that imports it."""

    by: str
    what: str
    line: int

    @property
    def top(self) -> str:
        return self.what.split(".")[0]


def module_name(path: Path) -> str:
    """``gpu/lora/pool.py`` is ``rota.gpu.lora.pool``; a package is named by its folder."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[:2] == ["src", "rota"]:
        parts = parts[2:]
    if parts and parts[-1] == "__init__":
        parts.pop()
    return ".".join(["rota", *parts])


def imports_of(source: str, by: str, *, package: bool) -> list[Import]:
    """Every import anywhere in the source, relative ones resolved.

    ``from a import b`` counts as ``a`` and as ``a.b``: b may be a module.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [Import(by, alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = by.split(".")
                kept = parts[: len(parts) - node.level + package]
                base = ".".join([*kept, *([node.module] if node.module else [])])
            found.append(Import(by, base, node.lineno))
            found += [Import(by, f"{base}.{alias.name}", node.lineno) for alias in node.names]
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("__import__", "import_module", "importlib.import_module")
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            found.append(Import(by, str(node.args[0].value), node.lineno))
    return found


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def core_is_pure(found: Import) -> str | None:
    """`rota.sched.core` imports the standard library, msgspec, `rota.errors` and itself."""
    if not inside(found.by, "rota.sched.core"):
        return None
    if found.top in sys.stdlib_module_names and found.top != "sched":
        return None
    if found.top == "msgspec" or inside(found.what, "rota.sched.core"):
        return None
    return None if inside(found.what, "rota.errors") else "the core may not import this"


def core_has_no_clock_and_no_world(found: Import) -> str | None:
    """Time, I/O, threads and logs come to the core as arguments or not at all."""
    world = {"asyncio", "datetime", "io", "logging", "os", "pathlib", "secrets", "socket"}
    world |= {"subprocess", "tempfile", "threading", "time"}
    wrong = inside(found.by, "rota.sched.core") and found.top in world
    return "the core has no clock and no world" if wrong else None


def arrows_go_one_way(found: Import) -> str | None:
    """`gpu` and `rdma` never import `sched`, nor the standard library module of that name."""
    if inside(found.by, "rota.gpu") or inside(found.by, "rota.rdma"):
        if inside(found.what, "rota.sched") or found.top == "sched":
            return "only sched may import sched"
    return None


def cuda_stays_in_cuda_files(found: Import) -> str | None:
    """Only ``gpu/cuda*.py`` imports `cuda`."""
    parts = found.by.split(".")
    in_cuda_file = parts[:2] == ["rota", "gpu"] and len(parts) == 3 and parts[2].startswith("cuda")
    return "only gpu/cuda*.py may import cuda" if found.top == "cuda" and not in_cuda_file else None


def verbs_stay_in_one_file(found: Import) -> str | None:
    """Only ``rdma/verbs.py`` imports `pyverbs`."""
    wrong = found.top == "pyverbs" and found.by != "rota.rdma.verbs"
    return "only rdma/verbs.py may import pyverbs" if wrong else None


def fast_hash_stays_in_one_file(found: Import) -> str | None:
    """Only ``rdma/hashes.py`` imports `blake3` and `xxhash`, which may be absent."""
    wrong = found.top in ("blake3", "xxhash") and found.by != "rota.rdma.hashes"
    return f"only rdma/hashes.py may import {found.top}" if wrong else None


def errors_stand_alone(found: Import) -> str | None:
    """`rota.errors` needs only the standard library."""
    if found.by == "rota.errors" and found.top not in sys.stdlib_module_names:
        return "rota.errors imports only the standard library"
    return None


def rooms_are_imported_relatively(found: Import) -> str | None:
    """A bare ``gpu`` or ``rdma`` is no installed package."""
    return "import it relatively" if found.top in ("gpu", "rdma") else None


RULES = (
    core_is_pure,
    core_has_no_clock_and_no_world,
    arrows_go_one_way,
    cuda_stays_in_cuda_files,
    verbs_stay_in_one_file,
    fast_hash_stays_in_one_file,
    errors_stand_alone,
    rooms_are_imported_relatively,
)


def package_files() -> list[Path]:
    files = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    return files + sorted((ROOT / "src" / "rota").glob("*.py"))


def test_every_room_is_seen():
    names = {module_name(path) for path in package_files()}
    assert {"rota", "rota.errors", "rota.sched", "rota.gpu.device", "rota.rdma"} <= names


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps_the_rule(rule):
    broken = []
    for path in package_files():
        source = path.read_text(encoding="utf-8")
        package = path.name == "__init__.py"
        for found in imports_of(source, module_name(path), package=package):
            complaint = rule(found)
            if complaint is not None:
                where = f"{path.relative_to(ROOT)}:{found.line}"
                broken.append(f"{where}: {found.what}: {complaint}")
    assert broken == []


BREACHES = [
    (core_is_pure, "rota.sched.core.state", "import torch"),
    (core_is_pure, "rota.sched.core.state", "def f():\n    import numpy"),
    (core_is_pure, "rota.sched.core.state", "from ...gpu import device"),
    (core_is_pure, "rota.sched.core.state", "from ..shell import Shell"),
    (core_is_pure, "rota.sched.core.state", "from ... import gpu"),
    (core_is_pure, "rota.sched.core.state", "import anyio"),
    (core_is_pure, "rota.sched.core.state", "import importlib; importlib.import_module('torch')"),
    (core_has_no_clock_and_no_world, "rota.sched.core.state", "from time import monotonic"),
    (core_has_no_clock_and_no_world, "rota.sched.core.state", "import logging"),
    (arrows_go_one_way, "rota.gpu.host", "from ..sched import core"),
    (arrows_go_one_way, "rota.gpu.host", "from .. import sched"),
    (arrows_go_one_way, "rota.gpu.lora.pool", "from ...sched.core import slots"),
    (arrows_go_one_way, "rota.rdma.peer", "import rota.sched"),
    (arrows_go_one_way, "rota.rdma.peer", "import sched"),
    (cuda_stays_in_cuda_files, "rota.gpu.host", "from cuda.bindings import driver"),
    (cuda_stays_in_cuda_files, "rota.gpu.model.cuda_graphs", "import cuda"),
    (verbs_stay_in_one_file, "rota.rdma.peer", "from pyverbs.qp import QP"),
    (fast_hash_stays_in_one_file, "rota.rdma.verify", "from blake3 import blake3"),
    (fast_hash_stays_in_one_file, "rota.rdma.store", "import xxhash"),
    (errors_stand_alone, "rota.errors", "import msgspec"),
    (rooms_are_imported_relatively, "rota.sched.engine", "import gpu.device"),
]


@pytest.mark.parametrize(("rule", "by", "source"), BREACHES)
def test_each_rule_complains_of_a_breach(rule, by, source):
    assert any(rule(found) is not None for found in imports_of(source, by, package=False))


ALLOWED = [
    ("rota.sched.core.state", "from ...errors import RotaError\nimport heapq, msgspec\n"),
    ("rota.sched.core.state", "from .slots import Slot\nfrom . import events"),
    ("rota.sched.engine", "from ..gpu.device import Device\nimport torch, anyio"),
    ("rota.gpu.cuda", "from cuda.bindings import driver"),
    ("rota.gpu.cuda_graphs", "import cuda.bindings"),
    ("rota.rdma.verbs", "import pyverbs.qp"),
    ("rota.rdma.hashes", "from blake3 import blake3"),
    ("rota.gpu.lora.pool", "from ..device import Device\nfrom ...errors import DeviceError"),
]


@pytest.mark.parametrize(("by", "source"), ALLOWED)
def test_no_rule_complains_of_what_is_allowed(by, source):
    found = imports_of(source, by, package=False)
    assert found
    assert [(rule.__name__, one) for rule in RULES for one in found if rule(one)] == []


def test_a_package_resolves_its_relative_imports_from_itself():
    found = imports_of("from .slots import Slot", "rota.sched.core", package=True)
    assert found[0].what == "rota.sched.core.slots"


def test_no_module_is_named_after_a_stdlib_one():
    clashes = [
        str(path.relative_to(ROOT))
        for path in package_files()
        if module_name(path) != "rota.sched"
        and module_name(path).split(".")[-1] in sys.stdlib_module_names
    ]
    assert clashes == []
    folders = {path.parent.name for path in package_files()} - {"sched"}
    assert sorted(folders & sys.stdlib_module_names) == []


def run_python(code: str) -> str:
    """Run code in a fresh interpreter outside the checkout; its stdout."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT.anchor,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_rota_and_the_device_work_without_cuda_and_pyverbs():
    code = BLOCK.format(blocked={"cuda", "pyverbs"}) + (
        "import rota, rota.sched, rota.gpu, rota.rdma\n"
        "from rota.gpu.device import open_device\n"
        "from rota.errors import DeviceError\n"
        "device = open_device('auto'); print(device.name); device.close()\n"
        "try:\n    open_device('cuda')\nexcept DeviceError as error:\n    print(error.code)\n"
    )
    assert run_python(code).split() == ["host", "cuda-unavailable"]


def test_the_blocker_blocks():
    code = BLOCK.format(blocked={"json"}) + (
        "try:\n    import json\nexcept ModuleNotFoundError as error:\n    print(error)\n"
    )
    assert run_python(code).strip() == "blocked: json"


@pytest.mark.parametrize("module", ["rota", "rota.errors", "rota.sched.core"])
def test_the_core_loads_no_heavy_library(module):
    heavy = ("torch", "numpy", "numba", "safetensors", "tokenizers", "cuda", "pyverbs")
    code = f"import sys, {module}\nprint(*[name for name in {heavy!r} if name in sys.modules])"
    assert run_python(code).split() == []


def test_the_device_protocol_loads_no_heavy_library():
    code = (
        "import sys, rota.gpu.host\n"
        "print(*[name for name in ('torch', 'numpy', 'numba', 'cuda') if name in sys.modules])"
    )
    assert run_python(code).split() == []
