"""The OpenAPI description of the HTTP face, made from the request structs themselves.

Owns the table of operations. Invariant: a route that is not in the table has no description, and a
test says that there is none. Source of the format: the OpenAPI specification, 3.1.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ... import __version__
from .schemas import (
    ActiveBody,
    ChatRequest,
    CompletionRequest,
    LoadBody,
    LoadLoraAdapter,
    NameBody,
    ResizeBody,
    SwapBody,
    UnloadBody,
    UnloadLoraAdapter,
)

_JSON, _TEXT, _SSE = "application/json", "text/plain", "text/event-stream"
_HTML = "text/html"

#: (method, path, summary, key, body, media types of a success)
OPERATIONS: tuple[tuple[str, str, str, str | None, Any, tuple[str, ...]], ...] = (
    ("post", "/v1/chat/completions", "Answer a chat.", "api", ChatRequest, (_JSON, _SSE)),
    ("post", "/v1/completions", "Continue a prompt.", "api", CompletionRequest, (_JSON, _SSE)),
    ("get", "/v1/models", "Base and adapters.", "api", None, (_JSON,)),
    ("get", "/v1/models/{name}", "One of them.", "api", None, (_JSON,)),
    ("post", "/v1/load_lora_adapter", "vLLM's load.", "admin", LoadLoraAdapter, (_TEXT,)),
    ("post", "/v1/unload_lora_adapter", "vLLM's unload.", "admin", UnloadLoraAdapter, (_TEXT,)),
    ("post", "/v1/lora/load", "Load a new adapter.", "admin", LoadBody, (_JSON,)),
    ("post", "/v1/lora/register", "Know it; load on demand.", "admin", LoadBody, (_JSON,)),
    ("post", "/v1/lora/replace", "A new version.", "admin", LoadBody, (_JSON,)),
    ("post", "/v1/lora/promote", "Bring into a slot.", "admin", NameBody, (_JSON,)),
    ("post", "/v1/lora/swap", "Into this very slot.", "admin", SwapBody, (_JSON,)),
    ("post", "/v1/lora/prefetch", "Stage in host memory.", "admin", NameBody, (_JSON,)),
    ("post", "/v1/lora/pin", "Never a victim.", "admin", NameBody, (_JSON,)),
    ("post", "/v1/lora/unpin", "A victim again.", "admin", NameBody, (_JSON,)),
    ("post", "/v1/lora/unload", "Forget it.", "admin", UnloadBody, (_JSON,)),
    ("post", "/v1/lora/resize", "Another pool.", "admin", ResizeBody, (_JSON,)),
    ("post", "/v1/lora/active", "Set the default adapter.", "admin", ActiveBody, (_JSON,)),
    ("get", "/v1/lora/active", "The default adapter.", "admin", None, (_JSON,)),
    (
        "get",
        "/v1/lora/inspect/{name}",
        "Where and what it is; its story.",
        "admin",
        None,
        (_JSON,),
    ),
    ("get", "/health", "Whether the engine serves.", None, None, (_JSON,)),
    ("get", "/version", "Of rota.", None, None, (_JSON,)),
    ("get", "/metrics", "For Prometheus.", None, None, (_TEXT,)),
    ("get", "/ui", "A page to watch and act on.", None, None, (_HTML,)),
    ("get", "/ui/state", "What the page shows.", "api", None, (_JSON,)),
    ("get", "/ui/{name}", "A file of the page.", None, None, ("text/css", "text/javascript")),
    ("get", "/openapi.json", "This.", None, None, (_JSON,)),
)

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
                "rota": {"type": "object"},
            },
        }
    },
}


def describe() -> dict[str, Any]:
    """The whole document, as JSON data."""
    bodies = [body for *_, body, _ in OPERATIONS if body is not None]
    _, components = msgspec.json.schema_components(
        bodies, ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, dict[str, Any]] = {}
    for method, path, summary, key, body, media in OPERATIONS:
        paths.setdefault(path, {})[method] = _operation(path, summary, key, body, media)
    return {
        "openapi": "3.1.0",
        "info": {"title": "rota", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components | {"Error": _ERROR},
            "securitySchemes": {
                "api": {"type": "http", "scheme": "bearer"},
                "admin": {"type": "http", "scheme": "bearer"},
            },
        },
    }


def _operation(
    path: str, summary: str, key: str | None, body: Any, media: tuple[str, ...]
) -> dict[str, Any]:
    failure = {
        "description": "Refused, by name.",
        "content": {_JSON: {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {
            "200": {"description": "Done.", "content": {kind: {} for kind in media}},
            "4XX": failure,
            "5XX": failure,
        },
    }
    if key is not None:
        operation["security"] = [{key: []}]
    if "{name}" in path:
        operation["parameters"] = [
            {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    if path == "/ui/state":
        operation["parameters"] = [
            {"name": "since", "in": "query", "required": False, "schema": {"type": "integer"}}
        ]
    if body is not None:
        reference = {"$ref": f"#/components/schemas/{body.__name__}"}
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": reference}}}
    return operation
