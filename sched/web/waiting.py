"""Doing something only while the caller is still there, and only so long."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
from starlette.types import Message

from ...errors import RotaError

_T = TypeVar("_T")


class Gone(Exception):
    """The caller has disconnected; there is nobody to answer."""


async def watch(receive: Callable[[], Awaitable[Message]], scope: anyio.CancelScope) -> None:
    """Cancel ``scope`` when the caller disconnects (after the body has been read)."""
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def while_connected(
    receive: Callable[[], Awaitable[Message]], job: Callable[[], Awaitable[_T]]
) -> _T:
    """``job()``'s result. Raises Gone when the caller left first, and job's own RotaError."""
    box: list[_T] = []
    failed: list[RotaError] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch, receive, tasks.cancel_scope)
        try:
            box.append(await job())
        except RotaError as error:
            failed.append(error)
        tasks.cancel_scope.cancel()
    if failed:
        raise failed[0]
    if not box:
        raise Gone
    return box[0]
