"""Errors to data and back: the core and the wire carry :class:`Failure`, callers get exceptions."""

from __future__ import annotations

from ..errors import CLASSES, DeviceError, InternalError, RotaError, class_name
from .core.events import Failure


def to_failure(error: BaseException) -> Failure:
    """Any exception as data; one that is not rota's own is an ``internal`` failure."""
    if not isinstance(error, RotaError):
        return Failure("internal", "internal", f"{type(error).__name__}: {error}")
    return Failure(
        class_name(error),
        error.code,
        error.message,
        error.subject,
        error.expected,
        error.found,
        error.retry_after_s,
    )


def of_device(error: BaseException) -> tuple[Failure, bool]:
    """Any failure of a device job as data, with a code; and whether the device is dead for good
    (CUDA's sticky errors say so in their code)."""
    if not isinstance(error, RotaError):
        error = DeviceError(f"{type(error).__name__}: {error}", code="device-failed")
    fatal = isinstance(error, DeviceError) and error.code in ("device-dead", "device-closed")
    return to_failure(error), fatal


def to_error(failure: Failure) -> RotaError:
    """The exception a caller gets for a failure."""
    return CLASSES.get(failure.kind, InternalError)(
        failure.message,
        code=failure.code,
        subject=failure.subject,
        expected=failure.expected,
        found=failure.found,
        retry_after_s=failure.retry_after_s,
    )
