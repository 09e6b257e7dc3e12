"""What the routes ask of an engine, the same in process and over IPC: every answer awaited."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

import anyio
import anyio.to_thread

from ..core.snapshot import Stats
from ..failures import to_error
from ..ipc.client import Client
from ..seen import StagedReport
from ..text.pieces import token_bytes

_PIECES = 65_536


class Text(Protocol):
    """The text side of an engine."""

    async def chat(self, messages: Sequence[Any]) -> list[int]: ...
    async def encode(self, text: str) -> list[int]: ...
    async def pieces(self, ids: Sequence[int]) -> list[bytes]: ...
    async def stats(self) -> Stats: ...
    async def story(self, subject: str) -> list[str]: ...
    async def staged(self, name: str) -> StagedReport | None: ...
    async def ping(self) -> None: ...


class LocalText:
    """In process. Tokenizing runs on a worker thread: a long prompt holds nobody up."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def chat(self, messages: Sequence[Any]) -> list[int]:
        ids: list[int] = await anyio.to_thread.run_sync(self._engine.chat_prompt, messages)
        return ids

    async def encode(self, text: str) -> list[int]:
        ids: list[int] = await anyio.to_thread.run_sync(self._engine.tokenizer.encode, text)
        return ids

    async def pieces(self, ids: Sequence[int]) -> list[bytes]:
        return [token_bytes(self._engine.tokenizer, i) for i in ids]

    async def stats(self) -> Stats:
        stats: Stats = self._engine.stats()
        return stats

    async def story(self, subject: str) -> list[str]:
        lines: list[str] = self._engine.story(subject)
        return lines

    async def staged(self, name: str) -> StagedReport | None:
        seen: StagedReport | None = self._engine.staged(name)
        return seen

    async def ping(self) -> None:
        _alive(self._engine.stats())


class RemoteText:
    """Over IPC; tokens' bytes are remembered, within a bound."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._known: OrderedDict[int, bytes] = OrderedDict()

    async def chat(self, messages: Sequence[Any]) -> list[int]:
        return await self._client.chat_prompt(messages)

    async def encode(self, text: str) -> list[int]:
        return await self._client.encode(text)

    async def pieces(self, ids: Sequence[int]) -> list[bytes]:
        found = {i: self._known[i] for i in ids if i in self._known}
        missing = [i for i in dict.fromkeys(ids) if i not in found]
        if missing:
            fresh = dict(zip(missing, await self._client.pieces(missing), strict=True))
            found |= fresh
            self._known |= fresh
            while len(self._known) > _PIECES:
                self._known.popitem(last=False)
        return [found[i] for i in ids]

    async def stats(self) -> Stats:
        return await self._client.refresh()

    async def story(self, subject: str) -> list[str]:
        return await self._client.story(subject)

    async def staged(self, name: str) -> StagedReport | None:
        return await self._client.staged(name)

    async def ping(self) -> None:
        _alive(await self._client.refresh())


def _alive(stats: Stats) -> None:
    """Raises the error the device died of."""
    if stats.dead is not None:
        raise to_error(stats.dead)


def text_of(engine: Any) -> Text:
    """The text side of an Engine or a Client."""
    return RemoteText(engine) if isinstance(engine, Client) else LocalText(engine)
