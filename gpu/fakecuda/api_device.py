"""Entry points of the fake driver: start, devices, contexts, memory, modules.

Owns nothing: functions over `FakeDriver`, and `ENTRIES`, which gives each its name and the C types
the stub's callback takes.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from .driver import INVALID_VALUE, NOT_FOUND, OUT_OF_MEMORY, DriverError, FakeDriver
from .ptx_exec import programs_of

VERSION: Final = 13000
NAME: Final = b"rota test device (no GPU)"
PTR, SIZE, INT, UINT, U64 = c.c_void_p, c.c_size_t, c.c_int, c.c_uint, c.c_ulonglong
POUT, PINT, PSIZE, PU64 = c.POINTER(PTR), c.POINTER(INT), c.POINTER(SIZE), c.POINTER(U64)
CONTEXT: Final = 0xC0
NO_DEVICE: Final = 100
INVALID_DEVICE: Final = 101
INVALID_PTX: Final = 218
NO_BINARY_FOR_GPU: Final = 209

MAX_THREADS, MAX_SHARED, WARP, PROCESSORS, MAJOR, MINOR, MAX_SHARED_OPTIN = 1, 8, 10, 16, 75, 76, 97
"""CUdevice_attribute numbers."""


@dataclass(frozen=True)
class Entry:
    """One driver function: its C argument types and what it does."""

    types: tuple[Any, ...]
    run: Callable[..., int | None]


def init(d: FakeDriver, flags: int) -> int:
    """cuInit."""
    return NO_DEVICE if d.devices == 0 else 0


def version(d: FakeDriver, out: Any) -> None:
    """cuDriverGetVersion."""
    out[0] = VERSION


def device_count(d: FakeDriver, out: Any) -> None:
    """cuDeviceGetCount."""
    out[0] = d.devices


def device_get(d: FakeDriver, out: Any, ordinal: int) -> int:
    """cuDeviceGet."""
    if not 0 <= ordinal < d.devices:
        return INVALID_DEVICE
    out[0] = ordinal
    return 0


def device_name(d: FakeDriver, out: int, size: int, device: int) -> None:
    """cuDeviceGetName."""
    text = NAME[: size - 1] + b"\0"
    c.memmove(out, text, len(text))


def device_attribute(d: FakeDriver, out: Any, attribute: int, device: int) -> int:
    """cuDeviceGetAttribute, for the attributes the engine asks."""
    known = {
        MAX_THREADS: 1024,
        MAX_SHARED: 48 << 10,
        WARP: 32,
        PROCESSORS: d.processors,
        MAJOR: d.capability[0],
        MINOR: d.capability[1],
        MAX_SHARED_OPTIN: 227 << 10,
    }
    if attribute not in known:
        return INVALID_VALUE
    out[0] = known[attribute]
    return 0


def device_memory(d: FakeDriver, out: Any, device: int) -> None:
    """cuDeviceTotalMem."""
    out[0] = d.total_memory


def context_retain(d: FakeDriver, out: Any, device: int) -> int:
    """cuDevicePrimaryCtxRetain."""
    if d.sticky:
        return d.sticky
    d.retained += 1
    out[0] = CONTEXT
    return 0


def context_release(d: FakeDriver, device: int) -> int:
    """cuDevicePrimaryCtxRelease: the last one frees all that is left, lost context or not."""
    if not d.retained:
        return 201
    d.retained -= 1
    if d.retained == 0:
        for left in d.arena.live():
            d.arena.free(left.start, left.kind)
        for table in (d.streams, d.events, d.modules, d.functions, d.graphs, d.execs):
            table.clear()
        d.captures.clear()
    return 0


def context_set(d: FakeDriver, context: int | None) -> int:
    """cuCtxSetCurrent."""
    if context not in (None, CONTEXT):
        return 201
    d.set_current(context or 0)
    return d.sticky


def context_get(d: FakeDriver, out: Any) -> None:
    """cuCtxGetCurrent."""
    out[0] = d.current


def context_synchronize(d: FakeDriver) -> None:
    """cuCtxSynchronize."""
    d.unsafe()
    for stream in list(d.streams.values()):
        d.finish(stream)


def memory_info(d: FakeDriver, free: Any, total: Any) -> None:
    """cuMemGetInfo."""
    d.need_context()
    free[0], total[0] = d.total_memory - d.arena.used, d.total_memory


def mem_alloc(d: FakeDriver, out: Any, nbytes: int) -> int:
    """cuMemAlloc."""
    d.unsafe()
    if nbytes == 0:
        return INVALID_VALUE
    made = d.arena.alloc(nbytes, "device")
    if made is None:
        return OUT_OF_MEMORY
    out[0] = made.start
    return 0


def mem_free(d: FakeDriver, address: int) -> int:
    """cuMemFree: queued work that still uses the memory will fail, the strictest reading."""
    d.unsafe()
    return 0 if d.arena.free(address, "device") else INVALID_VALUE


def host_alloc(d: FakeDriver, out: Any, nbytes: int, flags: int) -> int:
    """cuMemHostAlloc."""
    d.unsafe()
    if nbytes == 0:
        return INVALID_VALUE
    made = d.arena.alloc(nbytes, "pinned")
    if made is None:
        return OUT_OF_MEMORY
    out[0] = made.start
    return 0


def host_free(d: FakeDriver, address: int | None) -> int:
    """cuMemFreeHost."""
    d.unsafe()
    return 0 if d.arena.free(address or 0, "pinned") else INVALID_VALUE


def module_load(d: FakeDriver, out: Any, image: int) -> int:
    """cuModuleLoadData: PTX text only; a cubin has no machine to run on here."""
    d.unsafe()
    if c.string_at(image, 4) == b"\x7fELF":
        return NO_BINARY_FOR_GPU
    try:
        text = c.string_at(image).decode("ascii")
    except UnicodeDecodeError:
        return INVALID_PTX
    programs = programs_of(text)
    handle = d.new_handle()
    d.modules[handle] = programs
    out[0] = handle
    return 0


def module_function(d: FakeDriver, out: Any, module: int | None, name: bytes) -> int:
    """cuModuleGetFunction."""
    program = d.get(d.modules, module).get(name.decode("ascii"))
    if program is None:
        return NOT_FOUND
    handle = d.new_handle()
    d.functions[handle] = (module or 0, program)
    out[0] = handle
    return 0


def module_unload(d: FakeDriver, module: int | None) -> None:
    """cuModuleUnload."""
    d.get(d.modules, module)
    d.unsafe()
    del d.modules[module or 0]
    for handle in [h for h, (owner, _) in d.functions.items() if owner == module]:
        del d.functions[handle]


def function_attribute(d: FakeDriver, out: Any, attribute: int, function: int | None) -> None:
    """cuFuncGetAttribute: shared bytes (1) as declared; registers and local memory unknown (0)."""
    _, program = d.get(d.functions, function)
    out[0] = {0: program.code.max_threads, 1: program.code.shared_bytes}.get(attribute, 0)


def function_set(d: FakeDriver, function: int | None, attribute: int, value: int) -> None:
    """cuFuncSetAttribute (8: dynamic shared memory)."""
    d.get(d.functions, function)
    if attribute == 8:
        if not 0 <= value <= 227 << 10:
            raise DriverError(INVALID_VALUE)
        d.shared_limits[function or 0] = value


ENTRIES: Final[Mapping[str, Entry]] = MappingProxyType(
    {
        "cuInit": Entry((UINT,), init),
        "cuDriverGetVersion": Entry((PINT,), version),
        "cuDeviceGetCount": Entry((PINT,), device_count),
        "cuDeviceGet": Entry((PINT, INT), device_get),
        "cuDeviceGetName": Entry((PTR, INT, INT), device_name),
        "cuDeviceGetAttribute": Entry((PINT, INT, INT), device_attribute),
        "cuDeviceTotalMem": Entry((PSIZE, INT), device_memory),
        "cuDevicePrimaryCtxRetain": Entry((POUT, INT), context_retain),
        "cuDevicePrimaryCtxRelease": Entry((INT,), context_release),
        "cuCtxSetCurrent": Entry((PTR,), context_set),
        "cuCtxGetCurrent": Entry((POUT,), context_get),
        "cuCtxSynchronize": Entry((), context_synchronize),
        "cuMemGetInfo": Entry((PSIZE, PSIZE), memory_info),
        "cuMemAlloc": Entry((PU64, SIZE), mem_alloc),
        "cuMemFree": Entry((U64,), mem_free),
        "cuMemHostAlloc": Entry((POUT, SIZE, UINT), host_alloc),
        "cuMemFreeHost": Entry((PTR,), host_free),
        "cuModuleLoadData": Entry((POUT, PTR), module_load),
        "cuModuleGetFunction": Entry((POUT, PTR, c.c_char_p), module_function),
        "cuModuleUnload": Entry((PTR,), module_unload),
        "cuFuncGetAttribute": Entry((PINT, INT, PTR), function_attribute),
        "cuFuncSetAttribute": Entry((PTR, INT, INT), function_set),
    }
)
