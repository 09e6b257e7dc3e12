"""``/v1/chat/completions`` and ``/v1/completions``, whole and streamed.

Owns one request's generations. Invariants: a refusal comes as a status before anything is streamed;
every generation ends when its request does, for whatever reason (answer, error, disconnect).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import anyio
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...errors import RotaError
from ..face import Default
from ..streams import GenerationEvent
from .backend import Text
from .body import read
from .failures import ParamError, error_object, json_response, status_of
from .metrics import HttpMetrics
from .samples import Sample, samples_of
from .schemas import (
    ChatRequest,
    CompletionRequest,
    adapter_of,
    choices_of,
    refuse_unsupported,
    sampling_of,
    wants_usage,
)
from .settings import HttpSettings
from .shapes import Pieces, Shape, ids_of, usage
from .tracing import tell, traced, version_of
from .waiting import Gone, watch, while_connected

_BATCH = 64


class _Choice:
    """One sample of a generation and what has been sent of it."""

    def __init__(self, index: int, sample: Sample) -> None:
        self.index = index
        self.sample = sample
        self.tokens = 0
        self.offset = 0
        self.finish: str | None = None
        self.last_at: float | None = None


class _Job:
    """A request, read and checked, whose generations run."""

    def __init__(
        self,
        shape: Shape,
        choices: list[_Choice],
        prompt_tokens: int,
        logprobs: bool,
        with_usage: bool,
        text: Text,
        metrics: HttpMetrics,
        scope: Scope,
    ) -> None:
        self.shape = shape
        self.choices = choices
        self.prompt_tokens = prompt_tokens
        self.logprobs = logprobs
        self.with_usage = with_usage
        self._text = text
        self._metrics = metrics
        self._scope = scope
        self._begin = time.perf_counter()

    def cancel(self) -> None:
        for choice in self.choices:
            choice.sample.cancel()

    def usage(self) -> dict[str, int]:
        return usage(self.prompt_tokens, sum(c.tokens for c in self.choices))

    async def take(self, choice: _Choice) -> list[GenerationEvent]:
        """A choice's next events, as many as are at hand; none after the last. Raises RotaError."""
        events = await choice.sample.take(_BATCH)
        if events:
            now = time.perf_counter()
            made = sum(e.token_id is not None for e in events)
            if choice.last_at is None:
                self._metrics.first_token.observe(now - self._begin)
                self._metrics.tokens(made, None)
                if traced(self._scope):
                    await self._told_version(events[0].adapter_id, now - self._begin)
            elif made:
                self._metrics.tokens(made, (now - choice.last_at) / made)
            choice.last_at = now
            choice.tokens += made
            choice.finish = events[-1].finish_reason
            if choice.finish and traced(self._scope):
                done = sum(c.tokens for c in self.choices)
                tell(self._scope, gen_ai__usage__output_tokens=done)
            if choice.finish in ("deadline", "cancelled"):
                raise ParamError(
                    "the request took longer than it may"
                    if choice.finish == "deadline"
                    else "the request was cancelled",
                    code=choice.finish,
                )
        return events

    async def _told_version(self, ident: int, seconds: float) -> None:
        name, generation = version_of(await self._text.stats(), ident)
        tell(
            self._scope,
            gen_ai__usage__input_tokens=self.prompt_tokens,
            rota__adapter=name,
            rota__generation=generation,
            rota__adapter_id=str(ident),
            rota__time_to_first_token_s=seconds,
        )

    async def pieces(self, events: Sequence[GenerationEvent]) -> Pieces | None:
        if not self.logprobs:
            return None
        ids = ids_of(events)
        return Pieces(dict(zip(ids, await self._text.pieces(ids), strict=True)))


async def _whole_choice(job: _Job, choice: _Choice, out: dict[int, Any]) -> None:
    events: list[GenerationEvent] = []
    while batch := await job.take(choice):
        events.extend(batch)
    logprobs = job.shape.logprobs(events, await job.pieces(events), 0)
    text = "".join([e.text for e in events])
    out[choice.index] = job.shape.choice(choice.index, text, choice.finish, logprobs)


async def _whole(job: _Job) -> dict[str, Any]:
    """The answer in one piece; the first error ends all choices."""
    out: dict[int, Any] = {}
    failed: list[RotaError] = []

    async def one(choice: _Choice, scope: anyio.CancelScope) -> None:
        try:
            await _whole_choice(job, choice, out)
        except RotaError as error:
            failed.append(error)
            scope.cancel()

    try:
        async with anyio.create_task_group() as tasks:
            for choice in job.choices:
                tasks.start_soon(one, choice, tasks.cancel_scope)
    finally:
        job.cancel()
    if failed:
        raise failed[0]
    return job.shape.whole([out[c.index] for c in job.choices], job.usage())


class _Events(Response):
    """Server-sent events of a job. ``first``: what has been read to know that it was accepted."""

    def __init__(self, job: _Job, first: dict[int, list[GenerationEvent]]) -> None:
        super().__init__(
            None,
            200,
            {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
            "text/event-stream",
        )
        del self.headers["content-length"]
        self._job = job
        self._first = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watch, receive, tasks.cancel_scope)
                start = {"type": "http.response.start", "status": self.status_code}
                await send(start | {"headers": self.raw_headers})
                try:
                    await self._send_all(send)
                except OSError:  # the server noticed the disconnect before we did
                    pass
                tasks.cancel_scope.cancel()
        finally:
            self._job.cancel()

    async def _send_all(self, send: Send) -> None:
        job = self._job
        failed: list[RotaError] = []

        async def one(choice: _Choice, scope: anyio.CancelScope) -> None:
            try:
                await self._choice(choice, send)
            except RotaError as error:
                failed.append(error)
                scope.cancel()

        if len(job.choices) == 1:
            await one(job.choices[0], anyio.CancelScope())
        else:
            async with anyio.create_task_group() as tasks:
                for choice in job.choices:
                    tasks.start_soon(one, choice, tasks.cancel_scope)
        if failed:
            error = error_object(failed[0], status_of(failed[0]))
            await _data(send, msgspec.json.encode(error))
        elif job.with_usage:
            await _data(send, job.shape.usage_chunk(job.usage()))
        end = {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False}
        await send(end)

    async def _choice(self, choice: _Choice, send: Send) -> None:
        job, shape = self._job, self._job.shape
        if shape.chat:
            opening = shape.chunk(
                choice.index, "", None, None, first=True, with_usage=job.with_usage
            )
            await _data(send, opening)
        if first := self._first.pop(choice.index, None):
            await self._batch(choice, first, send)
        if choice.finish is None:
            while events := await job.take(choice):
                await self._batch(choice, events, send)

    async def _batch(self, choice: _Choice, events: list[GenerationEvent], send: Send) -> None:
        job, shape = self._job, self._job.shape
        text = "".join([e.text for e in events])
        logprobs = None
        if job.logprobs:
            logprobs = shape.logprobs(events, await job.pieces(events), choice.offset)
        choice.offset += len(text)
        if text or logprobs is not None or (choice.finish and not shape.chat):
            finish = None if shape.chat else choice.finish
            body = shape.chunk(choice.index, text, finish, logprobs, with_usage=job.with_usage)
            await _data(send, body)
        if choice.finish and shape.chat:
            body = shape.chunk(choice.index, None, choice.finish, None, with_usage=job.with_usage)
            await _data(send, body)


async def _data(send: Send, body: bytes) -> None:
    """``body``: JSON, in one line as JSON encoders write it."""
    data = b"data: " + body + b"\n\n"
    await send({"type": "http.response.body", "body": data, "more_body": True})


class Generating:
    """The two routes, over one engine."""

    def __init__(
        self, engine: Any, text: Text, settings: HttpSettings, metrics: HttpMetrics
    ) -> None:
        self._engine = engine
        self._text = text
        self._settings = settings
        self._metrics = metrics

    async def chat(self, request: Request) -> Response:
        body = await read(request, self._settings, ChatRequest)
        refuse_unsupported(body)
        prompts = [await self._text.chat(body.messages)]
        return await self._answer(request, body, prompts, "chat")

    async def completions(self, request: Request) -> Response:
        body = await read(request, self._settings, CompletionRequest)
        refuse_unsupported(body)
        prompts = [await self._text.encode(p) if isinstance(p, str) else p for p in _prompts(body)]
        return await self._answer(request, body, prompts, "text")

    async def _answer(
        self,
        request: Request,
        body: ChatRequest | CompletionRequest,
        prompts: list[list[int]],
        kind: str,
    ) -> Response:
        job = self._start(body, prompts, kind, request.scope)
        try:
            if not body.stream:
                whole = partial(_whole, job)
                return json_response(await while_connected(request.receive, whole))
            first = await while_connected(request.receive, partial(_first, job))
            return _Events(job, first)
        except Gone:
            job.cancel()
            return Response(status_code=499)
        except BaseException:
            job.cancel()
            raise

    def _start(
        self,
        body: ChatRequest | CompletionRequest,
        prompts: list[list[int]],
        kind: str,
        scope: Scope,
    ) -> _Job:
        settings = self._settings
        n = choices_of(body, len(prompts), settings.max_choices)
        adapter = adapter_of(body, settings.model_name)
        room = int(self._engine.info.context_length) - max(len(p) for p in prompts)
        sampling = sampling_of(body, n, room)
        shape = Shape(
            kind,
            ("chatcmpl-" if kind == "chat" else "cmpl-") + secrets.token_hex(12),
            int(time.time()),
            settings.model_name if adapter is None or isinstance(adapter, Default) else adapter,
        )
        choices: list[_Choice] = []
        try:
            for prompt in prompts:
                generation = self._engine.generate(
                    prompt,
                    adapter,
                    sampling,
                    priority=body.priority or 0,
                    deadline_s=settings.request_timeout_s,
                )
                for sample in samples_of(generation, n):
                    choices.append(_Choice(len(choices), sample))
        except BaseException:
            for choice in choices:
                choice.sample.cancel()
            raise
        return _Job(
            shape,
            choices,
            sum(len(p) for p in prompts),
            sampling.logprobs is not None,
            wants_usage(body),
            self._text,
            self._metrics,
            scope,
        )


async def _first(job: _Job) -> dict[int, list[GenerationEvent]]:
    """The first events of the first choice: when they are there, the request was accepted."""
    choice = job.choices[0]
    return {choice.index: await job.take(choice)}


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    """One prompt or several, text or token ids. Raises ParamError ``bad-prompt``."""
    given = body.prompt
    if isinstance(given, str):
        return [given]
    if given and all(isinstance(item, int) for item in given):
        return [[item for item in given if isinstance(item, int)]]
    several = [item for item in given if not isinstance(item, int)]
    if not given or len(several) != len(given):
        raise ParamError(
            "not a prompt",
            param="prompt",
            code="bad-prompt",
            expected="text, token ids, or a list of either",
        )
    return several
