"""Every refusal rota makes, as classes with stable codes.

One home for the hierarchy, importable by all three packages (it needs only the standard library).
Nothing in rota, and nothing outside it, should match error text: read ``code``, and the fields.
"""

from __future__ import annotations

from typing import Final


def _sayable(text: str) -> str:
    """``text`` as UTF-8 can carry it: files and file names hold lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode()


class RotaError(Exception):
    """Base of every error rota raises on purpose. All of its text can be encoded, whatever it
    names.

    Attributes:
        code: stable machine-readable code, e.g. ``"unknown-adapter"``.
        subject: the tensor, key, file, request or slot at fault, or ``None``.
        expected: what would have been accepted, or ``None``.
        found: what was there instead, or ``None``.
        retry_after_s: a hint in seconds for refusals that pass, or ``None``.
    """

    default_code = "error"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        subject: str | None = None,
        expected: object = None,
        found: object = None,
        retry_after_s: float | None = None,
    ) -> None:
        self.code = code if code is not None else self.default_code
        self.message = _sayable(message)
        self.subject = None if subject is None else _sayable(subject)
        self.expected = None if expected is None else _sayable(str(expected))
        self.found = None if found is None else _sayable(str(found))
        self.retry_after_s = retry_after_s
        super().__init__(self._text())

    def _label(self) -> str:
        return f"[{self.code}]"

    def _text(self) -> str:
        parts = [f"{self._label()} {self.message}"]
        if self.subject is not None:
            parts.append(f"at {self.subject!r}")
        sides = (("expected", self.expected), ("found", self.found))
        if told := [f"{word} {value}" for word, value in sides if value is not None]:
            parts.append(", ".join(told))
        if self.retry_after_s is not None:
            parts.append(f"retry after {self.retry_after_s:.3f} s")
        return "; ".join(parts)


class RejectError(RotaError):
    """An adapter (its config, keys, tensors or file) was refused: ``REJECT[code]``."""

    default_code = "rejected"

    def _label(self) -> str:
        return f"REJECT[{self.code}]"


class ModelError(RotaError):
    """A base checkpoint cannot be served (unvalidated family, missing tensor, wrong shape)."""

    default_code = "model-refused"


class RequestError(RotaError):
    """A request cannot be served as asked (prompt too long, unknown adapter, bad sampling)."""

    default_code = "bad-request"


class CommandError(RotaError):
    """An adapter command cannot be carried out (unknown name, busy slot, bad slot number)."""

    default_code = "command-refused"


class CapacityError(RotaError):
    """A limit is reached for now (POOL_FULL, QUEUE_FULL); ``retry_after_s`` says when to retry."""

    default_code = "capacity"


class StagingError(RotaError):
    """Staging failed for a reason that is not the adapter's own (I/O, time-out, cancelled)."""

    default_code = "staging-failed"


class DeviceError(RotaError):
    """The device refused or failed an operation (out of memory, use after free, capture rule)."""

    default_code = "device-error"


class EngineClosedError(RotaError):
    """The engine is closing or closed; nothing new is accepted and what ran is ended."""

    default_code = "engine-closed"


class WireError(RotaError):
    """Bytes from the other end of a connection break the protocol, or the ends do not match."""

    default_code = "wire-error"


class InternalError(RotaError):
    """A broken invariant: a bug in rota. Carries the story of the thing that broke."""

    default_code = "internal"


CLASSES: Final[dict[str, type[RotaError]]] = {
    "reject": RejectError,
    "model": ModelError,
    "request": RequestError,
    "command": CommandError,
    "capacity": CapacityError,
    "staging": StagingError,
    "device": DeviceError,
    "closed": EngineClosedError,
    "wire": WireError,
    "internal": InternalError,
}
"""Every class by the name it has as data: on the wires, in the core."""
_NAMES: Final = {cls: name for name, cls in CLASSES.items()}


def class_name(error: RotaError) -> str:
    """The name, in `CLASSES`, of the error's class or the nearest one above it."""
    return next((_NAMES[cls] for cls in type(error).__mro__ if cls in _NAMES), "internal")
