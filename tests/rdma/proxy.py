"""A TCP proxy that breaks connections on purpose, at a byte, not at a time."""

from __future__ import annotations

import socket
import threading


class Proxy:
    """Forwards to ``target`` until ``limit`` bytes came from it, then does ``what``.

    ``"cut"``: both sides are reset. ``"half-open"``: nothing more is forwarded and nothing closed.
    ``piece``: bytes forwarded at a time.
    """

    def __init__(
        self, target: str, what: str = "", limit: int = 1 << 60, piece: int = 65536
    ) -> None:
        host, _, port = target.rpartition(":")
        self._target, self._what, self._left = (host, int(port)), what, limit
        self._piece = piece
        self._cut_next = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self.connections = 0
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def cut_after(self, limit: int) -> None:
        """From now on: cut once that many more bytes came from the target."""
        self._left, self._what = limit, "cut"

    def cut_at_next_byte(self) -> None:
        """The next byte from a client cuts its connection; later connections are left alone."""
        self._cut_next = True

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            server = socket.create_connection(self._target)
            self._sockets += [client, server]
            for source, sink, limited in ((client, server, False), (server, client, True)):
                thread = threading.Thread(target=self._carry, args=(source, sink, limited))
                self._threads.append(thread)
                thread.start()

    def _carry(self, source: socket.socket, sink: socket.socket, limited: bool) -> None:
        try:
            while data := source.recv(self._piece):
                if self._cut_next and not limited:
                    self._cut_next = False
                    for one in (source, sink):
                        one.shutdown(socket.SHUT_RDWR)
                    return
                if limited and len(data) >= self._left:
                    sink.sendall(data[: self._left])
                    self._left = 0
                    if self._what == "cut":
                        for one in (source, sink):
                            one.shutdown(socket.SHUT_RDWR)
                    return  # half-open: silence
                if limited:
                    self._left -= len(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def close(self) -> None:
        """End every thread."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join(10)
        for one in self._sockets:
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        for thread in self._threads[1:]:
            thread.join(10)
        for one in self._sockets:
            one.close()
