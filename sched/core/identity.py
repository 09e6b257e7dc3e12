"""Adapter identity: the u64 that keys every cache.

FNV-1a 64 over the UTF-8 name, then the 8 little-endian generation bytes if the generation is not 0;
a result of 0 becomes 1, because 0 means base. (FNV-1a: Fowler, Noll, Vo; basis and prime below.)
"""

from __future__ import annotations

_BASIS = 0xCBF29CE484222325
_PRIME = 0x100000001B3
_MASK = (1 << 64) - 1
BASE_ID = 0


def adapter_id(name: str, generation: int) -> int:
    """Identity of one version. ``name`` must not be empty; ``generation`` is 0..2**64-1."""
    data = name.encode("utf-8")
    if generation:
        data += generation.to_bytes(8, "little")
    value = _BASIS
    for byte in data:
        value = ((value ^ byte) * _PRIME) & _MASK
    return value or 1
