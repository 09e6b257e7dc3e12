"""``create_app(engine, settings) -> Starlette``: every route, over one running engine.

Owns the routing table. The engine's life is the caller's: it is entered before the first request
and left after the last (or by ``lifespan``, see :func:`create_app`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ... import __version__
from ...errors import RequestError, RotaError
from .admin import Admin
from .auth import Guard
from .backend import text_of
from .failures import error_response, json_response
from .generate import Generating
from .metrics import HttpMetrics, wall_clock
from .openapi import describe
from .settings import HttpSettings
from .shapes import adapter_model, base_model
from .tracing import tell
from .ui import Page

_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


class Looking:
    """Routes that only look: models, health, version, metrics."""

    def __init__(
        self,
        engine: Any,
        settings: HttpSettings,
        metrics: HttpMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._text = text_of(engine)
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._created = int(clock())

    async def models(self, request: Request) -> Response:
        stats = await self._text.stats()
        name = self._settings.model_name
        data = [base_model(name, self._created, self._engine.info, stats)]
        data += [adapter_model(a, name, self._created, stats) for a in stats.adapters]
        return json_response({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        wanted, name = request.path_params["name"], self._settings.model_name
        stats = await self._text.stats()
        if wanted == name:
            return json_response(base_model(name, self._created, self._engine.info, stats))
        for adapter in stats.adapters:
            if adapter.name == wanted:
                return json_response(adapter_model(adapter, name, self._created, stats))
        raise RequestError("no model of this name", code="unknown-adapter", subject=wanted)

    async def health(self, request: Request) -> Response:
        try:
            await self._text.ping()
        except RotaError as error:
            answer = error_response(error)
            answer.status_code = 503
            return answer
        return json_response({"status": "ok"})

    async def version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    async def openapi(self, request: Request) -> Response:
        return json_response(describe())

    async def metrics(self, request: Request) -> Response:
        try:
            stats = await self._text.stats()
        except RotaError:
            stats = None
        page = self._metrics.render(stats, self._settings.metrics_adapters, self._clock)
        return Response(page, media_type=_PROMETHEUS)


async def _rota_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RotaError)
    tell(request.scope, error__type=error.code)
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    codes = {404: "not-found", 405: "method-not-allowed"}
    code = codes.get(error.status_code, "bad-request")
    answer = error_response(RequestError(error.detail, code=code, subject=request.url.path[:200]))
    for name, value in (error.headers or {}).items():
        answer.headers[name] = value
    return answer


def create_app(
    engine: Any,
    settings: HttpSettings | None = None,
    *,
    manage: bool = False,
    clock: Callable[[], float] = wall_clock,
    tracer: Any = None,
) -> Starlette:
    """The application.

    Args:
        engine: an Engine, or a Client of one, on the event loop that will serve.
        settings: see :class:`HttpSettings`.
        manage: enter ``engine`` when the application starts and leave it when it stops; else the
            caller does.
        clock: seconds since the epoch, for ``created`` and the metrics' time stamp.
        tracer: an OpenTelemetry tracer, for spans of requests and adapter commands.
    """
    settings = settings or HttpSettings()
    metrics = HttpMetrics()
    text = text_of(engine)
    generating = Generating(engine, text, settings, metrics)
    looking = Looking(engine, settings, metrics, clock)
    page = Page(engine, text, settings, metrics).routes() if settings.ui else []
    routes = [
        Route("/v1/chat/completions", generating.chat, methods=["POST"]),
        Route("/v1/completions", generating.completions, methods=["POST"]),
        Route("/v1/models", looking.models, methods=["GET"]),
        Route("/v1/models/{name:path}", looking.model, methods=["GET"]),
        *Admin(engine, text, settings, metrics).routes(),
        *page,
        Route("/health", looking.health, methods=["GET"]),
        Route("/version", looking.version, methods=["GET"]),
        Route("/openapi.json", looking.openapi, methods=["GET"]),
        Route("/metrics", looking.metrics, methods=["GET"]),
    ]
    return Starlette(
        routes=routes,
        middleware=[
            Middleware(
                Guard,
                settings=settings,
                metrics=metrics,
                tracer=tracer,
                known=frozenset(route.path for route in routes if "{" not in route.path),
            )
        ],
        exception_handlers={RotaError: _rota_error, HTTPException: _http_error},
        lifespan=_lifespan(engine) if manage else None,
    )


def _lifespan(
    engine: Any,
) -> Callable[[Starlette], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with engine:
            yield

    return lifespan
