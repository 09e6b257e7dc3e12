"""uvicorn's HTTP/1.1 protocol with a time limit on request headers, which uvicorn does not have.

Owns one timer a connection: it runs while headers are awaited on a new connection or half of them
have come, and closes the connection when it fires.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


def protocol(header_timeout_s: float) -> type[H11Protocol]:
    """The class for ``uvicorn.Config(http=...)``."""

    class Protocol(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

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
