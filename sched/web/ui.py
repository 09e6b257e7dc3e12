"""``/ui``: a page that shows the engine live and acts on it, without a build step.

Owns the files of the page (read once) and the newest snapshot, kept for a moment so that many open
pages cost the engine one look. Invariants: what ``/ui/state`` answers is bounded; the page holds
nothing secret and asks for keys itself; nothing is loaded from another host (the policy forbids
it). Names of adapters reach the page as JSON data and are never written as HTML.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ... import __version__
from ...errors import RequestError
from ..core.snapshot import AdapterStats, Stats
from .backend import Text
from .failures import json_response
from .metrics import HttpMetrics
from .settings import HttpSettings

_KEEP_S = 0.1
_SLOTS, _ADAPTERS = 256, 256
_FOLDER = Path(__file__).parent / "page"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_NEAREST = {"device": 0, "host": 1, "cold": 2}


class Page:
    """The routes, over one engine."""

    def __init__(
        self, engine: Any, text: Text, settings: HttpSettings, metrics: HttpMetrics
    ) -> None:
        self._engine = engine
        self._text = text
        self._settings = settings
        self._pulse = metrics.pulse
        self._files = {
            path.name: (path.read_bytes(), _TYPES[path.suffix]) for path in _FOLDER.iterdir()
        }
        self._shown: dict[str, Any] = {}
        self._shown_until = float("-inf")

    def routes(self) -> list[Route]:
        return [
            Route("/ui", self.page, methods=["GET"]),
            Route("/ui/state", self.state, methods=["GET"]),
            Route("/ui/{name}", self.file, methods=["GET"]),
        ]

    async def page(self, request: Request) -> Response:
        return self._file("index.html")

    async def file(self, request: Request) -> Response:
        return self._file(request.path_params["name"])

    def _file(self, name: str) -> Response:
        found = self._files.get(name)
        if found is None:
            raise RequestError("no such file", code="not-found", subject=name[:200])
        return Response(found[0], headers=_HEADERS, media_type=found[1])

    async def state(self, request: Request) -> Response:
        """What the page draws. ``since``: the last second of the pulse it has."""
        since = request.query_params.get("since", "-1")
        try:
            second = int(since[:20])
        except ValueError as error:
            raise RequestError(
                "not a second", code="bad-since", subject="since", found=since[:20]
            ) from error
        now = time.monotonic()
        if now >= self._shown_until:
            self._shown = self._show(await self._text.stats())
            self._shown_until = now + _KEEP_S
        pulse = self._pulse.since(second)
        return json_response(self._shown | {"pulse": pulse}, headers={"Cache-Control": "no-store"})

    def _show(self, stats: Stats) -> dict[str, Any]:
        info = self._engine.info
        nearest = sorted(stats.adapters, key=_rank)[:_ADAPTERS]
        leased = sum(s.leases for s in stats.slots)
        return {
            "object": "rota.ui",
            "version": __version__,
            "model": self._settings.model_name,
            "family": info.family,
            "dtype": info.dtype,
            "context": info.context_length,
            "admin": bool(self._settings.admin_keys),
            "default": stats.default_adapter,
            "slots": [
                {
                    "index": s.index,
                    "state": s.state,
                    "name": s.name,
                    "generation": s.generation,
                    "leases": s.leases,
                    "pinned": s.pinned,
                    "coming": s.coming,
                }
                for s in stats.slots[:_SLOTS]
            ],
            "slots_total": len(stats.slots),
            "adapters": [msgspec.to_builtins(a) for a in nearest],
            "adapters_total": len(stats.adapters),
            "levels": {level: sum(a.level == level for a in stats.adapters) for level in _NEAREST},
            "waiting": stats.waiting,
            "running": stats.prefilling + stats.decoding,
            "leased": leased,
            "kv_used": stats.blocks_total - stats.blocks_free - stats.blocks_cached,
            "kv_cached": stats.blocks_cached,
            "kv_total": stats.blocks_total,
            "image_bytes": stats.image_bytes,
            "arena_used": stats.arena.used,
            "arena_total": stats.arena.total,
            "tokens": stats.tokens,
            "steps": stats.steps,
            "commits": stats.commits,
            "evicted": stats.evicted,
            "stage_failures": stats.stage_failures,
            "dead": None if stats.dead is None else stats.dead.code,
        }


def _rank(adapter: AdapterStats) -> tuple[bool, int]:
    """What moves first, then the nearest to the device."""
    return (not adapter.jobs, _NEAREST[adapter.level])
