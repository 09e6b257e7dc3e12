"""What can be driven: OpenAI's API over HTTP, an engine process, an engine in this process.

Each target turns one request into the moments its tokens came. Owns its connections.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Protocol

import anyio

from ...errors import CommandError, RequestError, RotaError, WireError
from ...gpu.model.params import SamplingParams
from ..web.backend import text_of


class Ask:
    """One request: what to send, and what came of it. Times by ``time.perf_counter``."""

    def __init__(self, adapter: str, prompt: str, tokens: int, most: int) -> None:
        self.adapter = adapter
        self.prompt = prompt
        self.prompt_tokens = tokens
        self.max_tokens = most
        self.due = 0.0
        self.sent = 0.0
        self.came: list[float] = []  #: when something arrived; over HTTP a piece may be two tokens
        self.tokens = 0
        self.error: str | None = None


class Target(Protocol):
    """Something that answers requests."""

    async def ask(self, ask: Ask) -> None:
        """Carry one out. Raises RotaError for a refusal."""
        ...


class EngineTarget:
    """An Engine, or a Client of one. Prompts have exactly the tokens asked for."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._text = text_of(engine)

    async def ask(self, ask: Ask) -> None:
        ids = (await self._text.encode(ask.prompt))[: ask.prompt_tokens]
        ask.prompt_tokens = len(ids)
        params = SamplingParams(max_tokens=ask.max_tokens, temperature=0.0, ignore_eos=True)
        ask.sent = time.perf_counter()
        adapter = None if ask.adapter == "base" else ask.adapter
        async for event in self._engine.generate(ids, adapter, params):
            if event.token_id is not None:
                ask.tokens += 1
                ask.came.append(time.perf_counter())


class HttpTarget:
    """``/v1/completions``, streamed; the server's own count of tokens is believed."""

    def __init__(self, http: Any, base: str) -> None:
        self._http = http
        self._base = base

    async def ask(self, ask: Ask) -> None:
        body = {
            "model": self._base if ask.adapter == "base" else ask.adapter,
            "prompt": ask.prompt,
            "max_tokens": ask.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        ask.sent = time.perf_counter()
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                raise _refusal(answer.status_code, await answer.aread())
            async for line in answer.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    self._piece(ask, json.loads(line[6:]))
        if not ask.tokens:
            raise WireError("the answer ended without its usage", code="no-usage")

    def _piece(self, ask: Ask, piece: Any) -> None:
        if "error" in piece:
            raise RequestError("the stream broke off", code=str(piece["error"].get("code")))
        if any(choice.get("text") for choice in piece["choices"]):
            ask.came.append(time.perf_counter())
        if piece.get("usage"):
            ask.tokens = piece["usage"]["completion_tokens"]
            ask.prompt_tokens = piece["usage"]["prompt_tokens"]


def _refusal(status: int, body: bytes) -> RotaError:
    try:
        error = json.loads(body)["error"]
        code = str(error.get("code") or f"http-{status}")
        return RequestError(str(error.get("message")), code=code)
    except (ValueError, KeyError, TypeError, AttributeError):
        return RequestError("refused", code=f"http-{status}")


@asynccontextmanager
async def http_target(url: str, key: str | None) -> AsyncIterator[HttpTarget]:
    """A server at ``url``. Raises CommandError ``extra-missing``, ``no-server``."""
    try:
        import httpx2
    except ModuleNotFoundError as error:
        raise CommandError(
            "driving a server needs one more package: pip install 'rota[bench]'",
            code="extra-missing",
            subject=error.name,
        ) from error
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx2.AsyncClient(
        base_url=url.removesuffix("/").removesuffix("/v1"),
        headers=headers,
        limits=limits,
        timeout=httpx2.Timeout(600.0, connect=10.0),
    ) as http:
        try:
            answer = await http.get("/v1/models")
        except httpx2.TransportError as error:
            raise CommandError(
                "no server answers", code="no-server", subject=url, found=error
            ) from error
        if answer.status_code != 200:
            raise _refusal(answer.status_code, answer.content)
        yield HttpTarget(http, answer.json()["data"][0]["id"])


@asynccontextmanager
async def engine_target(
    target: str, adapters: dict[str, str], options: dict[str, Any], token: str | None
) -> AsyncIterator[EngineTarget]:
    """An engine of our own over a checkpoint directory, or the engine process at an address."""
    async with AsyncExitStack() as stack:
        engine: Any
        if await anyio.Path(target).is_dir():
            from ..engine import Engine

            engine = Engine(target, adapters, **options)
        else:
            from ..ipc.client import connect

            engine = connect(target, token=token)
        yield EngineTarget(await stack.enter_async_context(engine))
