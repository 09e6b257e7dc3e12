"""Request bodies: bounded in bytes and time, then decoded into a struct that knows its fields."""

from __future__ import annotations

from typing import TypeVar

import anyio
import msgspec
from starlette.requests import ClientDisconnect, Request

from ...errors import RequestError
from .failures import ParamError
from .settings import HttpSettings

_T = TypeVar("_T")


async def read_body(request: Request, settings: HttpSettings) -> bytes:
    """The whole body.

    Raises:
        RequestError: ``unsupported-media-type``, ``body-too-large``, ``body-timeout``,
            ``body-cut-off``.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError(
            "the body is not declared as JSON",
            code="unsupported-media-type",
            expected="application/json",
            found=kind[:100] or "nothing",
        )
    limit = settings.max_body_bytes
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    data = bytearray()
    try:
        with anyio.fail_after(settings.body_timeout_s):
            async for chunk in request.stream():
                data += chunk
                if len(data) > limit:
                    raise _too_large(limit)
    except TimeoutError as error:
        raise RequestError("the body did not come in time", code="body-timeout") from error
    except ClientDisconnect as error:
        raise RequestError("the body was cut off", code="body-cut-off") from error
    return bytes(data)


def _too_large(limit: int) -> RequestError:
    return RequestError(
        "the body is too large", code="body-too-large", expected=f"at most {limit} bytes"
    )


def decode(data: bytes, kind: type[_T]) -> _T:
    """The body as ``kind``.

    Raises:
        ParamError: ``bad-json``; ``bad-request`` naming the field that is unknown or of the wrong
            type.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$.")
        param = path.rstrip("`") or None
        if param is None and "field `" in text:
            param = text.partition("field `")[2].partition("`")[0]
        raise ParamError(text, param=param) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ParamError("the body is not JSON", code="bad-json", found=str(error)) from error


async def read(request: Request, settings: HttpSettings, kind: type[_T]) -> _T:
    """Read and decode."""
    return decode(await read_body(request, settings), kind)
