"""Errors over HTTP: a status, OpenAI's error object, and rota's code inside it."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from starlette.responses import Response

from ...errors import (
    CapacityError,
    CommandError,
    EngineClosedError,
    RejectError,
    RequestError,
    RotaError,
    StagingError,
)

_BY_CODE = {
    "unknown-adapter": 404,
    "adapter-unloaded": 404,
    "not-found": 404,
    "method-not-allowed": 405,
    "body-timeout": 408,
    "name-exists": 409,
    "adapter-is-default": 409,
    "not-resident": 409,
    "resize-in-progress": 409,
    "pinned-do-not-fit": 409,
    "resident-rank-too-large": 409,
    "resident-annex-too-large": 409,
    "pinned-annexes-do-not-fit": 409,
    "body-too-large": 413,
    "unsupported-media-type": 415,
    "unauthorized": 401,
    "path-not-allowed": 403,
    "admin-disabled": 403,
    "adapter-unreadable": 400,
    "deadline": 504,
    "command-timeout": 504,
}
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


class ParamError(RequestError):
    """A request's field is at fault; ``param`` names it as OpenAI's error object does."""

    default_code = "bad-request"

    def __init__(self, message: str, *, param: str | None = None, **more: Any) -> None:
        super().__init__(message, subject=param, **more)
        self.param = param


def status_of(error: RotaError) -> int:
    """The HTTP status of an error."""
    if error.code in _BY_CODE:
        return _BY_CODE[error.code]
    if isinstance(error, (CapacityError, EngineClosedError)):
        return 503
    if isinstance(error, (RequestError, CommandError, RejectError)):
        return 400
    if isinstance(error, StagingError):
        return 502 if error.retry_after_s is None else 503
    return 500


def error_object(error: RotaError, status: int) -> dict[str, Any]:
    """``{"error": ...}`` in OpenAI's shape; ``rota`` holds the other fields of the error."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {
        "error": {
            "message": str(error),
            "type": _TYPES.get(status, kind),
            "param": getattr(error, "param", None),
            "code": error.code,
            "rota": {
                "kind": type(error).__name__,
                "subject": error.subject,
                "expected": error.expected,
                "found": error.found,
                "retry_after_s": error.retry_after_s,
            },
        }
    }


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(
        msgspec.json.encode(body), status, headers=headers, media_type="application/json"
    )


def error_response(error: RotaError) -> Response:
    """The whole answer; 503, and any refusal that passes, says when to come back."""
    status = status_of(error)
    headers: dict[str, str] = {}
    if status == 503 or error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s or 1.0)))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(error_object(error, status), status, headers)
