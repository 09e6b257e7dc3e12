"""OpenTelemetry spans of requests and adapter commands; an optional extra (``rota[otel]``).

Owns the spans from a request's first byte to the last of its answer. Invariants: without a tracer
nothing is imported and nothing is done; a span carries names and numbers, never a prompt or a key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from starlette.types import Scope

from ... import __version__
from ...errors import CommandError
from ..core.identity import adapter_id
from ..core.snapshot import Stats
from ..face import AdapterReply

_KEY = "rota.span"
_TRACED = ("/v1/chat/completions", "/v1/completions")
_COMMANDS = ("/v1/lora/", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_MOST_BACK = 64


def open_tracer(endpoint: str) -> tuple[Any, Callable[[], None]]:
    """A tracer that sends spans to an OTLP/HTTP collector at ``endpoint``, and how to end it.

    Raises CommandError ``extra-missing``: the packages are not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise CommandError(
            "traces need more packages: pip install 'rota[otel]'",
            code="extra-missing",
            subject=error.name,
        ) from error
    provider = TracerProvider(
        resource=Resource.create({"service.name": "rota", "service.version": __version__})
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider.get_tracer("rota", __version__), provider.shutdown


def begin(tracer: Any, scope: Scope) -> Any:
    """The span of a request, or ``None`` for one that has none. It continues the caller's trace
    (``traceparent``), if there is one."""
    path: str = scope["path"]
    command = path.startswith(_COMMANDS) and scope["method"] == "POST"
    if tracer is None or not (command or path in _TRACED):
        return None
    from opentelemetry.propagate import extract
    from opentelemetry.trace import SpanKind

    carrier = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
    span = tracer.start_span(
        f"rota.{path.rpartition('/')[2]}" if command else f"POST {path}",
        context=extract(carrier),
        kind=SpanKind.SERVER,
        attributes={"http.request.method": scope["method"], "http.route": path},
    )
    scope[_KEY] = span
    return span


def end(span: Any, status: int) -> None:
    """The last byte of the answer has been sent (``status`` 0: the caller has gone)."""
    from opentelemetry.trace import StatusCode

    span.set_attribute("http.response.status_code", status or 499)
    if status >= 500:
        span.set_status(StatusCode.ERROR)
    span.end()


def tell(scope: Mapping[str, Any], **attributes: str | int | float | bool | None) -> None:
    """Add attributes to the request's span, if it has one; ``__`` in a name is a dot."""
    span = scope.get(_KEY)
    if span is not None:
        for name, value in attributes.items():
            if value is not None:
                span.set_attribute(name.replace("__", "."), value)


def tell_reply(scope: Mapping[str, Any], reply: AdapterReply) -> None:
    """What a command did."""
    if _KEY not in scope:
        return
    tell(
        scope,
        rota__adapter=reply.name,
        rota__generation=reply.generation,
        rota__adapter_id=str(reply.adapter_id),
        rota__slot=reply.slot,
        rota__outcome=reply.outcome,
        rota__evicted=reply.evicted,
    )
    for phase, seconds in (reply.report.seconds if reply.report else {}).items():
        scope[_KEY].set_attribute(f"rota.load.{phase}_s", seconds)


def traced(scope: Mapping[str, Any]) -> bool:
    """Whether anybody wants to know."""
    return _KEY in scope


def version_of(stats: Stats, ident: int) -> tuple[str, int]:
    """Name and generation behind an adapter id: ``("", 0)`` for base, or for a version long gone
    (only the newest generations of known names are tried)."""
    for adapter in stats.adapters if ident else ():
        newest = adapter.generation
        for generation in range(newest, max(0, newest - _MOST_BACK), -1):
            if adapter_id(adapter.name, generation) == ident:
                return adapter.name, generation
    return "", 0
