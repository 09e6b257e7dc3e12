"""What the CUDA driver answers, as `DeviceError`s: one place that knows its result codes.

Owns nothing. Every refusal carries the driver's own name for it in ``found`` and the call in the
message. Invariant: results that destroy a context have code ``device-dead`` and nothing else has.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from ..errors import DeviceError

CODES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "CUDA_ERROR_INVALID_VALUE": "bad-argument",
        "CUDA_ERROR_OUT_OF_MEMORY": "out-of-memory",
        "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED": "bad-argument",
        "CUDA_ERROR_INVALID_HANDLE": "bad-handle",
        "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": "launch-failed",
        "CUDA_ERROR_INVALID_PTX": "bad-argument",
        "CUDA_ERROR_NO_BINARY_FOR_GPU": "bad-argument",
        "CUDA_ERROR_INVALID_IMAGE": "bad-argument",
        "CUDA_ERROR_NOT_FOUND": "bad-argument",
        "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": "capture-violation",
        "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED": "capture-invalidated",
        "CUDA_ERROR_STREAM_CAPTURE_MERGE": "capture-violation",
        "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED": "not-capturing",
        "CUDA_ERROR_STREAM_CAPTURE_UNJOINED": "capture-unjoined",
        "CUDA_ERROR_STREAM_CAPTURE_ISOLATION": "capture-violation",
        "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT": "capture-violation",
        "CUDA_ERROR_CAPTURED_EVENT": "capture-violation",
        "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE": "graph-mismatch",
        "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD": "capture-violation",
    }
)
FATAL: Final = frozenset(
    {
        "CUDA_ERROR_ECC_UNCORRECTABLE",
        "CUDA_ERROR_ILLEGAL_ADDRESS",
        "CUDA_ERROR_LAUNCH_TIMEOUT",
        "CUDA_ERROR_ASSERT",
        "CUDA_ERROR_HARDWARE_STACK_ERROR",
        "CUDA_ERROR_ILLEGAL_INSTRUCTION",
        "CUDA_ERROR_MISALIGNED_ADDRESS",
        "CUDA_ERROR_INVALID_ADDRESS_SPACE",
        "CUDA_ERROR_INVALID_PC",
        "CUDA_ERROR_LAUNCH_FAILED",
        "CUDA_ERROR_MPS_CLIENT_TERMINATED",
        "CUDA_ERROR_EXTERNAL_DEVICE",
        "CUDA_ERROR_DEVICE_UNAVAILABLE",
        "CUDA_ERROR_CONTEXT_IS_DESTROYED",
    }
)
"""Results after which the context is lost until the process ends (CUDA driver API, CUresult)."""


def error_name(result: Any) -> str:
    """The driver's name of a CUresult, e.g. ``CUDA_ERROR_ILLEGAL_ADDRESS``."""
    name = getattr(result, "name", None)
    return name if isinstance(name, str) else f"CUresult {int(result)}"


def driver_error(call: str, result: Any, subject: str | None) -> DeviceError:
    """The refusal for a result that is not CUDA_SUCCESS."""
    name = error_name(result)
    code = "device-dead" if name in FATAL else CODES.get(name, "driver-error")
    return DeviceError(f"{call} failed", code=code, subject=subject, found=name)
