"""A kernel on the CUDA device: its arguments in memory, and the driver call that launches it.

What it owns: one buffer for the arguments of a kernel, one array of pointers into it and, for
kernels that overlap, one launch configuration; all live as long as the kernel, and the driver
copies them at the call, so a launch allocates nothing. Used under the device's lock.

Source of the forms: CUDA driver API 13.0, cuLaunchKernel and cuLaunchKernelEx; "Programmatic
Dependent Launch and Synchronization" in the CUDA programming guide.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any, Final

from .device import Dim3, KernelSpec

SLOTS: Final = {"p": "Q", "i": "i4x", "l": "q", "f": "f4x"}
"""Each argument takes eight bytes of the buffer, whatever its type."""
DEFAULT_SHARED: Final = 48 << 10
"""Dynamic shared memory a kernel may ask for without opting in."""
OVERLAP_SINCE: Final = (9, 0)
"""The first compute capability with programmatic dependent launch."""


class CudaKernel:
    """A loaded kernel.

    Args:
        spec: what was loaded.
        function: its CUfunction.
        driver: ``cuda.bindings.driver``.
        overlap: launch it so that it may begin while the kernel before it ends.
    """

    __slots__ = (
        "_addresses",
        "_array",
        "_buffer",
        "_config",
        "_packer",
        "function",
        "shared_limit",
        "spec",
    )

    def __init__(self, spec: KernelSpec, function: Any, driver: Any, *, overlap: bool) -> None:
        self.spec = spec
        self.function = function
        self.shared_limit = DEFAULT_SHARED
        self._packer = struct.Struct("<" + "".join(SLOTS[letter] for letter in spec.params))
        self._buffer = ctypes.create_string_buffer(max(8, self._packer.size))
        start = ctypes.addressof(self._buffer)
        count = max(1, len(spec.params))
        self._array = (ctypes.c_void_p * count)(*(start + 8 * i for i in range(count)))
        self._addresses = ctypes.addressof(self._array)
        self._config = _overlapping(driver) if overlap else None

    def pack(self, args: Sequence[int | float]) -> None:
        """Put the arguments into the buffer.

        Raises:
            struct.error, OverflowError, TypeError: they do not fit the spec's letters.
        """
        self._packer.pack_into(self._buffer, 0, *args)

    def call(
        self, grid: Dim3, block: Dim3, shared_bytes: int, stream: Any
    ) -> tuple[str, tuple[Any, ...]]:
        """The driver function that launches what was packed, and its arguments."""
        config = self._config
        if config is None:
            shape = (*grid, *block, shared_bytes, stream)
            return "cuLaunchKernel", (self.function, *shape, self._addresses, 0)
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.sharedMemBytes, config.hStream = shared_bytes, stream
        return "cuLaunchKernelEx", (config, self.function, self._addresses, 0)


def _overlapping(driver: Any) -> Any:
    """A launch configuration with programmatic stream serialisation."""
    attribute = driver.CUlaunchAttribute()
    ids = driver.CUlaunchAttributeID
    attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.attrs = [attribute]
    config.numAttrs = 1
    return config
