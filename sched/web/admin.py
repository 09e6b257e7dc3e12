"""Adapter routes: vLLM's dynamic calls, and rota's own under ``/v1/lora``.

Owns nothing. Invariants: a path is taken only from inside the allow-list; a command's caller waits
``command_timeout_s`` at most (the command itself goes on); who may call is decided before this
(:mod:`.auth`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from ...errors import CommandError, EngineClosedError, RequestError, RotaError
from ..face import AdapterReply
from ..paths import allowed_directory
from .backend import Text
from .body import read
from .failures import json_response
from .metrics import HttpMetrics
from .schemas import (
    ActiveBody,
    LoadBody,
    LoadLoraAdapter,
    NameBody,
    ResizeBody,
    SwapBody,
    UnloadBody,
    UnloadLoraAdapter,
)
from .settings import HttpSettings
from .shapes import STATES
from .tracing import tell_reply
from .waiting import Gone, while_connected


def reply_object(kind: str, reply: AdapterReply) -> dict[str, Any]:
    """An AdapterReply as JSON data; ``object`` names what was done."""
    return {
        "object": f"lora.{kind}",
        "outcome": reply.outcome,
        "adapter": reply.name,
        "slot": reply.slot,
        "generation": reply.generation,
        "adapter_id": str(reply.adapter_id),  # u64: more than JSON numbers hold in JavaScript
        "evicted": reply.evicted,
        "seconds": reply.seconds,
        "report": None if reply.report is None else msgspec.to_builtins(reply.report),
    }


class Admin:
    """The routes, over one engine."""

    def __init__(
        self, engine: Any, text: Text, settings: HttpSettings, metrics: HttpMetrics
    ) -> None:
        self._engine = engine
        self._text = text
        self._settings = settings
        self._metrics = metrics

    def routes(self) -> list[Route]:
        """All of them; every one is an admin route."""
        posts: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/v1/load_lora_adapter": self.vllm_load,
            "/v1/unload_lora_adapter": self.vllm_unload,
            "/v1/lora/load": self.load,
            "/v1/lora/register": self.register,
            "/v1/lora/replace": self.replace,
            "/v1/lora/promote": self.promote,
            "/v1/lora/swap": self.swap,
            "/v1/lora/prefetch": self.prefetch,
            "/v1/lora/pin": self.pin,
            "/v1/lora/unpin": self.unpin,
            "/v1/lora/unload": self.unload,
            "/v1/lora/resize": self.resize,
            "/v1/lora/active": self.set_active,
        }
        routes = [Route(path, handler, methods=["POST"]) for path, handler in posts.items()]
        routes.append(Route("/v1/lora/active", self.get_active, methods=["GET"]))
        routes.append(Route("/v1/lora/inspect/{name:path}", self.inspect, methods=["GET"]))
        return routes

    async def _run(
        self, request: Request, job: Callable[[], Awaitable[AdapterReply]]
    ) -> AdapterReply:
        async def bounded() -> AdapterReply:
            try:
                with anyio.fail_after(self._settings.command_timeout_s):
                    return await job()
            except TimeoutError as error:
                raise RequestError(
                    "the command goes on; its caller has waited long enough",
                    code="command-timeout",
                    expected=f"{self._settings.command_timeout_s} s",
                ) from error

        try:
            reply = await while_connected(request.receive, bounded)
            tell_reply(request.scope, reply)
            return reply
        except Gone as error:
            raise EngineClosedError("the caller has gone", code="caller-gone") from error
        except RotaError as error:
            self._metrics.refused.labels(type(error).__name__).inc()
            raise

    def _directory(self, path: str) -> str:
        return allowed_directory(path, self._settings.directories)

    # vLLM's -------------------------------------------------------------------------------------
    async def vllm_load(self, request: Request) -> Response:
        body = await read(request, self._settings, LoadLoraAdapter)
        path = self._directory(body.lora_path)
        name = body.lora_name

        async def job() -> AdapterReply:
            if body.load_inplace:
                try:
                    # The engine may be a client of one: Any.
                    return await self._engine.replace(name, path)  # type: ignore[no-any-return]
                except CommandError as error:
                    if error.code != "unknown-adapter":
                        raise
            # The engine may be a client of one: Any.
            return await self._engine.load(name, path)  # type: ignore[no-any-return]

        self._metrics.loaded(await self._run(request, job))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def vllm_unload(self, request: Request) -> Response:
        body = await read(request, self._settings, UnloadLoraAdapter)
        await self._run(request, lambda: self._engine.unload(body.lora_name))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    # rota's -------------------------------------------------------------------------------------
    async def load(self, request: Request) -> Response:
        body = await read(request, self._settings, LoadBody)
        path = self._directory(body.path)

        def job() -> Awaitable[AdapterReply]:
            if body.slot is None:
                # The engine may be a client of one: Any.
                return self._engine.load(body.name, path, pin=body.pin)  # type: ignore[no-any-return]
            # The engine may be a client of one: Any.
            return self._engine.swap(body.name, path, body.slot)  # type: ignore[no-any-return]

        reply = await self._run(request, job)
        self._metrics.loaded(reply)
        return json_response(reply_object("loaded", reply) | {"loaded": body.name})

    async def register(self, request: Request) -> Response:
        body = await read(request, self._settings, LoadBody)
        path = self._directory(body.path)
        reply = await self._run(request, lambda: self._engine.register(body.name, path))
        return json_response(reply_object("registered", reply))

    async def replace(self, request: Request) -> Response:
        body = await read(request, self._settings, LoadBody)
        path = self._directory(body.path)
        reply = await self._run(request, lambda: self._engine.replace(body.name, path))
        self._metrics.loaded(reply)
        return json_response(reply_object("replaced", reply))

    async def swap(self, request: Request) -> Response:
        body = await read(request, self._settings, SwapBody)
        path = None if body.path is None else self._directory(body.path)
        reply = await self._run(request, lambda: self._engine.swap(body.name, path, body.slot))
        self._metrics.loaded(reply)
        return json_response(reply_object("swapped", reply))

    async def promote(self, request: Request) -> Response:
        return await self._with_path(request, "promoted", self._engine.promote)

    async def prefetch(self, request: Request) -> Response:
        return await self._with_path(request, "prefetched", self._engine.prefetch)

    async def _with_path(
        self, request: Request, kind: str, method: Callable[..., Awaitable[AdapterReply]]
    ) -> Response:
        body = await read(request, self._settings, NameBody)
        path = None if body.path is None else self._directory(body.path)
        reply = await self._run(request, lambda: method(body.name, path))
        self._metrics.loaded(reply)
        return json_response(reply_object(kind, reply))

    async def pin(self, request: Request) -> Response:
        body = await read(request, self._settings, NameBody)
        reply = await self._run(request, lambda: self._engine.pin(body.name))
        return json_response(reply_object("pinned", reply))

    async def unpin(self, request: Request) -> Response:
        body = await read(request, self._settings, NameBody)
        reply = await self._run(request, lambda: self._engine.unpin(body.name))
        return json_response(reply_object("unpinned", reply))

    async def unload(self, request: Request) -> Response:
        body = await read(request, self._settings, UnloadBody)
        reply = await self._run(
            request,
            lambda: self._engine.unload(
                body.name, deadline_s=body.deadline_s, cancel_late=body.cancel_late
            ),
        )
        return json_response(reply_object("unloaded", reply))

    async def resize(self, request: Request) -> Response:
        body = await read(request, self._settings, ResizeBody)
        reply = await self._run(
            request,
            lambda: self._engine.resize(
                max_loras=body.max_loras,
                max_lora_rank=body.max_lora_rank,
                deadline_s=body.deadline_s,
            ),
        )
        return json_response(reply_object("resized", reply))

    async def set_active(self, request: Request) -> Response:
        body = await read(request, self._settings, ActiveBody)
        await self._run(request, lambda: self._engine.rotate(body.adapter))
        return json_response({"object": "lora.active", "active": body.adapter})

    async def get_active(self, request: Request) -> Response:
        stats = await self._text.stats()
        return json_response({"object": "lora.active", "active": stats.default_adapter})

    async def inspect(self, request: Request) -> Response:
        """Where an adapter is, what its newest staging saw, and its story, oldest first."""
        name = request.path_params["name"]
        stats = await self._text.stats()
        adapter = next((a for a in stats.adapters if a.name == name), None)
        if adapter is None:
            raise CommandError("no adapter of this name", code="unknown-adapter", subject=name)
        slots = [msgspec.to_builtins(s) for s in stats.slots if s.name == name]
        for slot in slots:
            slot["adapter_id"] = str(slot["adapter_id"])
        staged = await self._text.staged(name)
        return json_response(
            {
                "object": "lora.adapter",
                "adapter": name,
                "state": STATES[adapter.level],
                "generation": adapter.generation,
                "slots": slots,
                "jobs": adapter.jobs,
                "staged": None if staged is None else msgspec.to_builtins(staged),
                "story": await self._text.story(f"adapter {name}"),
            }
        )
