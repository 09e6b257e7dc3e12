"""uvicorn's HTTP/1.1 protocol with limits on request headers, which uvicorn does not have.

Owns one timer a connection: it runs while headers are awaited on a new connection or half of them
have come, and closes the connection when it fires. Headers have a size, too, whether they come in
pieces (h11's own limit) or all at once (ours: h11 takes any that are complete).
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class _Connection(h11.Connection):
    """Refuses complete headers of more than ``limit`` bytes as h11 does incomplete ones."""

    def __init__(self, limit: int) -> None:
        super().__init__(h11.SERVER, limit)
        self._limit = limit

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request):
            size = len(event.method) + len(event.target)
            size += sum(len(name) + len(value) for name, value in event.headers)
            if size > self._limit:
                raise h11.RemoteProtocolError("headers too large", error_status_hint=431)
        return event


def protocol(header_timeout_s: float, max_header_bytes: int) -> type[H11Protocol]:
    """The class for ``uvicorn.Config(http=...)``."""

    class Protocol(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self.conn = _Connection(max_header_bytes)

        # Uvicorn asks for less than asyncio says.
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._await_headers()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is h11.IDLE:
                self._await_headers()
            else:
                self._stop()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def _await_headers(self) -> None:
            if self._timer is None:
                self._timer = self.loop.call_later(header_timeout_s, self._too_late)

        def _stop(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _too_late(self) -> None:
            self._timer = None
            if not self.transport.is_closing():
                self.transport.close()

    return Protocol
