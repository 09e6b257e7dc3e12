"""Answers in OpenAI's shapes: chat completions, completions, chunks of both, models.

Source: OpenAI's API reference. Owns nothing: engine events and snapshots in, plain JSON data out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ..core.snapshot import AdapterStats, Stats
from ..streams import GenerationEvent

#: Level of an adapter (see ``AdapterStats``) to the state a client sees.
STATES = {"device": "resident", "host": "staged", "cold": "cold"}


class Pieces:
    """Tokens as text and bytes, by id, for one response's log-probabilities."""

    def __init__(self, by_id: dict[int, bytes]) -> None:
        self._by_id = by_id

    def text(self, token: int) -> str:
        return self._by_id[token].decode("utf-8", "replace")

    def raw(self, token: int) -> list[int]:
        return list(self._by_id[token])


def ids_of(events: Sequence[GenerationEvent]) -> list[int]:
    """Every token id whose text a response with log-probabilities shows."""
    ids: dict[int, None] = {}
    for event in events:
        if event.token_id is not None:
            ids[event.token_id] = None
            ids.update(dict.fromkeys(token for token, _ in event.top_logprobs))
    return list(ids)


def usage(prompt: int, completion: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def chat_logprobs(events: Sequence[GenerationEvent], pieces: Pieces) -> dict[str, Any]:
    def one(token: int, logprob: float | None) -> dict[str, Any]:
        return {
            "token": pieces.text(token),
            "logprob": -9999.0 if logprob is None else logprob,
            "bytes": pieces.raw(token),
        }

    content = []
    for event in events:
        if event.token_id is not None:
            top = [one(token, logprob) for token, logprob in event.top_logprobs]
            content.append(one(event.token_id, event.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def text_logprobs(events: Sequence[GenerationEvent], pieces: Pieces, offset: int) -> dict[str, Any]:
    """``offset``: characters of this choice's text before the first of these tokens."""
    tokens, values, top, offsets = [], [], [], []
    for event in events:
        if event.token_id is None:
            offset += len(event.text)
            continue
        tokens.append(pieces.text(event.token_id))
        values.append(event.logprob)
        top.append({pieces.text(token): logprob for token, logprob in event.top_logprobs})
        offsets.append(offset)
        offset += len(event.text)
    return {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": top,
        "text_offset": offsets,
    }


_encode = msgspec.json.Encoder().encode


class Shape:
    """One response's envelope. ``kind``: ``chat`` or ``text``. A streamed piece comes as the JSON
    bytes of its chunk, of which the envelope is encoded once."""

    def __init__(self, kind: str, ident: str, created: int, model: str) -> None:
        self.chat = kind == "chat"
        self._ident = ident
        self._created = created
        self._model = model
        self._head = _encode(self._envelope(True))[:-1] + b',"choices":['

    def _envelope(self, chunk: bool) -> dict[str, Any]:
        if self.chat:
            name = "chat.completion.chunk" if chunk else "chat.completion"
        else:
            name = "text_completion"
        return {
            "id": self._ident,
            "object": name,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": None,
        }

    def logprobs(
        self, events: Sequence[GenerationEvent], pieces: Pieces | None, offset: int
    ) -> dict[str, Any] | None:
        if pieces is None:
            return None
        if self.chat:
            return chat_logprobs(events, pieces)
        return text_logprobs(events, pieces, offset)

    def choice(
        self, index: int, text: str, finish: str | None, logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        """A finished choice."""
        body: dict[str, Any] = {"index": index, "finish_reason": finish, "logprobs": logprobs}
        if self.chat:
            body["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            body["text"] = text
        return body

    def whole(self, choices: list[dict[str, Any]], used: dict[str, int]) -> dict[str, Any]:
        return self._envelope(False) | {"choices": choices, "usage": used}

    def chunk(
        self,
        index: int,
        text: str | None,
        finish: str | None,
        logprobs: dict[str, Any] | None,
        *,
        first: bool = False,
        with_usage: bool = False,
    ) -> bytes:
        """One streamed piece of a choice; ``first`` opens a chat choice with its role."""
        body: dict[str, Any] = {"index": index, "finish_reason": finish, "logprobs": logprobs}
        if self.chat:
            delta: dict[str, Any] = {"role": "assistant"} if first else {}
            if text is not None:
                delta["content"] = text
            body["delta"] = delta
        else:
            body["text"] = text or ""
        return self._head + _encode(body) + (b'],"usage":null}' if with_usage else b"]}")

    def usage_chunk(self, used: dict[str, int]) -> bytes:
        """The last chunk of who asked for it: no choice, and what all of them used."""
        return self._head + b'],"usage":' + _encode(used) + b"}"


def base_model(name: str, created: int, info: Any, stats: Stats) -> dict[str, Any]:
    """The base as an entry of ``/v1/models``."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "rota",
        "root": name,
        "parent": None,
        "max_model_len": int(info.context_length),
        "state": "base",
        "default": stats.default_adapter is None,
    }


def adapter_model(adapter: AdapterStats, base: str, created: int, stats: Stats) -> dict[str, Any]:
    """An adapter as an entry of ``/v1/models``; ``state``: resident, staged or cold."""
    slot = stats.slots[adapter.slot] if adapter.slot >= 0 else None
    return {
        "id": adapter.name,
        "object": "model",
        "created": created,
        "owned_by": "rota",
        "root": adapter.name,
        "parent": base,
        "state": STATES[adapter.level],
        "generation": adapter.generation,
        "slot": adapter.slot,
        "pinned": slot.pinned if slot is not None else False,
        "leases": slot.leases if slot is not None else 0,
        "loading": adapter.jobs > 0,
        "default": stats.default_adapter == adapter.name,
    }
