"""A Starlette application with an engine inside: rota's OpenAI routes beside routes of its own.

    python examples/embed_in_starlette.py MODEL sql=DIR      then: curl localhost:8000/llm/v1/models

The engine lives as long as the application: it opens in the lifespan and closes after the last
request, so there is no second process and no second configuration.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route

import rota
from rota.sched.web.app import create_app
from rota.sched.web.settings import HttpSettings


def build(model: str, adapters: Mapping[str, Any], **options: Any) -> Starlette:
    """The whole application."""
    engine = rota.Engine(model, adapters, **options)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with engine:
            yield

    async def ask(request: Request) -> Response:
        """A route of our own: no HTTP between it and the engine."""
        question = request.query_params["q"]
        adapter = request.query_params.get("adapter")
        params = rota.SamplingParams(max_tokens=32)
        return PlainTextResponse(await engine.complete(question, adapter, params))

    openai_routes = create_app(engine, HttpSettings(model_name="base"))
    return Starlette(
        routes=[Route("/ask", ask), Mount("/llm", app=openai_routes)], lifespan=lifespan
    )


if __name__ == "__main__":
    import uvicorn

    uvicorn.run(build(sys.argv[1], dict(a.split("=", 1) for a in sys.argv[2:])))
