"""Who may call: API keys, admin keys, and counting what was answered. One ASGI middleware.

Owns nothing but the compare. Invariants: keys are compared in time that tells nothing about them;
adapter routes answer nobody while there is no admin key; every error leaves in OpenAI's shape.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...errors import CommandError, InternalError, RequestError, RotaError
from ..ipc.session import same_secret
from . import tracing
from .failures import error_response
from .metrics import HttpMetrics, route_of
from .settings import HttpSettings

_log = logging.getLogger("rota.sched.web")
_KEYED = ("/v1/", "/ui/state")
_ADMIN = ("/v1/lora/", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")


class Guard:
    """Wraps the application; see the module."""

    def __init__(
        self,
        app: ASGIApp,
        settings: HttpSettings,
        metrics: HttpMetrics,
        known: frozenset[str],
        tracer: Any = None,
    ) -> None:
        self._app = app
        self._settings = settings
        self._metrics = metrics
        self._known = known
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        begin = time.perf_counter()
        span = tracing.begin(self._tracer, scope)
        route = route_of(scope["path"], self._known)
        try:
            await self._answer(scope, receive, counted)
        except Exception as error:
            # A bug. If the answer has begun there is nothing left to say but to break it off.
            _log.exception("a request failed unexpectedly")
            if status:
                raise
            bug = InternalError("a bug in the server", found=type(error).__name__)
            await error_response(bug)(scope, receive, counted)
        finally:
            if span is not None:
                tracing.end(span, status)
            self._metrics.requests.labels(route, str(status or 499)).inc()
            self._metrics.seconds.labels(route).observe(time.perf_counter() - begin)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await error_response(refusal)(scope, receive, send)

    def _refusal(self, scope: Scope) -> RotaError | None:
        path: str = scope["path"]
        settings = self._settings
        if not path.startswith(_KEYED):
            return None
        given = _bearer(scope)
        admin = _any(given, settings.admin_keys)
        if path.startswith(_ADMIN):
            if not settings.admin_keys:
                return CommandError(
                    "adapter routes are off: the server was started without an admin key",
                    code="admin-disabled",
                )
            return None if admin else _unauthorized("an admin key")
        if not settings.api_keys or admin or _any(given, settings.api_keys):
            return None
        return _unauthorized("an API key")


def _bearer(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"authorization":
            kind, _, key = value.decode("latin-1").partition(" ")
            return key.strip() if kind.lower() == "bearer" else None
    return None


def _any(given: str | None, keys: Sequence[str]) -> bool:
    # Every key is compared, whichever matches.
    return any([same_secret(given, key) for key in keys])


def _unauthorized(what: str) -> RequestError:
    return RequestError(
        "the key is missing or wrong", code="unauthorized", expected=f"Authorization: Bearer {what}"
    )
