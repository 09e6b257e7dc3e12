"""Kernels compiled by numba once per machine: native entry points with their code kept on disk.

A kernel takes scalars only (addresses, counts, strides, factors). The object code of its entry
point is kept by :class:`~rota.gpu.codecache.CodeCache` under a key of every kernel source, the
compiler's versions and the processor, and linked back in at the next start. numba's own disk cache
looks at one file only, so it would go stale when a helper changes, and it stores pickles; nothing
is pickled here. Imports numba.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding
import msgspec
import numba
from numba.core.environment import Environment
from numba.core.registry import cpu_target
from numba.core.runtime.nrt import rtsys

from ..codecache import CodeCache, default_folder

logger = logging.getLogger("rota.gpu.kernels")


@cache
def _say_compiling() -> None:
    """Tell once a process why a start takes so long."""
    logger.info("compiling kernels, once on this machine: about a quarter of a minute in all")


class _Stored(msgspec.Struct, array_like=True):
    """One compiled entry point: the library's name, object code and bitcode, the symbol of its
    Python wrapper and of its environment cell."""

    library: str
    code: bytes
    bitcode: bytes
    wrapper: str
    environment: str


@cache
def _fingerprint() -> str:
    """Changes with anything compiled code depends on: sources, compilers, processor."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    features = llvmlite.binding.get_host_cpu_features()
    for text in (
        numba.__version__,
        llvmlite.__version__,
        llvmlite.binding.get_host_cpu_name(),
        ",".join(sorted(name for name, on in features.items() if on)),
    ):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:32]


class Compiled:
    """A kernel ``function(tag, *scalars)``; ``tag`` picks the element type (int 0: bf16, float 0.0:
    fp32), and the types of the first call's arguments are those of every call of that tag.

    ``device`` is the form other kernels call.
    """

    def __init__(self, function: Callable[..., Any], store: CodeCache | None = None) -> None:
        self.device = numba.njit(nogil=True, error_model="numpy")(function)
        self.__name__ = function.__name__
        self._function = function
        self._store = store if store is not None else CodeCache(default_folder())
        self._entries: dict[type, Any] = {}

    def __call__(self, tag: float, *scalars: float) -> Any:
        entry = self._entries.get(type(tag))
        if entry is None:
            entry = self._entries[type(tag)] = self._load((tag, *scalars))
        return entry(tag, *scalars)

    def entry(self, tag: float) -> Any:
        """The compiled code for tags like this, which a call has needed before."""
        return self._entries[type(tag)]

    def _load(self, arguments: tuple[float, ...]) -> Any:
        kinds: list[type] = [float if isinstance(a, float) else int for a in arguments]
        letters = "".join("d" if kind is float else "q" for kind in kinds)
        key = f"{self.__name__}-{letters}-{_fingerprint()}"
        entry = self._restore(self._store.read(key))
        return self._compile(kinds, key) if entry is None else entry

    def _restore(self, body: bytes | None) -> Any:
        """The entry point from kept code, put together as numba's own context does it."""
        if body is None:
            return None
        try:
            stored = msgspec.msgpack.decode(body, type=_Stored)
            context: Any = cpu_target.target_context
            codegen = context.codegen()
            if b"NRT_" in stored.code:
                # Code that may raise frees the exception's parts; compiling would have made those
                # functions known, linking leaves calls to nowhere.
                rtsys.initialize(context)
            library = codegen.unserialize_library(
                (stored.library, "object", (stored.code, stored.bitcode))
            )
            address = library.get_pointer_to_function(stored.wrapper)
            environment = Environment(self._function.__globals__)
            codegen.set_env(stored.environment, environment)
            module = import_module(self._function.__module__)
            dynfunc: Any = import_module("numba._dynfunc")
            return dynfunc.make_function(
                module, self.__name__, "", address, environment, (library,)
            )
        except Exception as error:  # numba's insides: whatever they say, compiling still works
            logger.warning("kept code of %s cannot be loaded: %s", self.__name__, error)
            return None

    def _compile(self, kinds: list[type], key: str) -> Any:
        _say_compiling()
        wanted = tuple(numba.types.float64 if k is float else numba.types.int64 for k in kinds)
        self.device.compile(wanted)
        made: Any = self.device.overloads[wanted]
        try:
            library, _, (code, bitcode) = made.library.serialize_using_object_code()
            stored = _Stored(
                library,
                code,
                bitcode,
                made.fndesc.llvm_cpython_wrapper_name,
                made.fndesc.env_name,
            )
            self._store.write(key, msgspec.msgpack.encode(stored))
        except Exception as error:  # numba's insides again: keeping code is a help, not a need
            logger.warning("code of %s was not kept: %s", self.__name__, error)
        return made.entry_point
