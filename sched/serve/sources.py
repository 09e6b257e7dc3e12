"""Adapters named on the command line: a directory, or ``peer://host:port/id``.

Owns the secret for peers, the registered memory they are read into and the connections kept to
them; the first two are the same for every peer. Invariant: :meth:`close` comes after the engine has
ended, when nothing is read any more.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from ...errors import RequestError, RotaError
from ...rdma.address import SCHEME, parse_peer_url
from ...rdma.client import Peer
from ...rdma.devices import ANY, parse_devices
from ...rdma.hosts import VerbsClient
from ...rdma.pool import PeerPool
from ...rdma.secret_file import read_secret
from ...rdma.verbs import open_client
from ..face import Source

_log = logging.getLogger("rota.sched.serve.sources")


class Sources:
    """Makes sources out of options.

    Args:
        secret_file: of the peers' secret, or ``None``; white space around it does not count.
        arena_bytes: registered memory for one-sided reads; 0 for TCP alone. Without a verbs device
            everything comes by TCP, with one log line.
        devices: verbs devices, see :func:`~rota.rdma.devices.parse_devices`; these must be there.

    Raises:
        RequestError: ``bad-secret-file``, ``weak-secret``, ``bad-verbs-devices``.
        DeviceError, CapacityError: see :func:`~rota.rdma.verbs.open_client`.
    """

    def __init__(
        self, secret_file: str | None = None, arena_bytes: int = 0, devices: str | None = None
    ) -> None:
        choice = ANY if devices is None else parse_devices(devices)
        if devices is not None and not arena_bytes:
            raise RequestError(
                "verbs devices need memory to read into (peer_arena_bytes)",
                code="bad-verbs-devices",
                subject=devices[:200],
            )
        self._secret = None if secret_file is None else read_secret(Path(secret_file))
        self._transport: VerbsClient | None = (
            open_client(arena_bytes, choice) if arena_bytes else None
        )
        self._pool = PeerPool()

    def of(self, text: str) -> Source:
        """A :class:`~rota.rdma.client.Peer`, or the directory's path as it is."""
        if not text.startswith(SCHEME):
            return text
        address, adapter = parse_peer_url(text)
        return Peer(
            address, adapter, secret=self._secret, transport=self._transport, pool=self._pool
        )

    def all(self, named: Mapping[str, str]) -> dict[str, Source]:
        """:meth:`of` for every name."""
        return {name: self.of(text) for name, text in named.items()}

    def close(self) -> None:
        """Give the connections, the registered memory and the device back. Idempotent."""
        self._pool.close()
        transport, self._transport = self._transport, None
        if transport is None:
            return
        try:
            transport.close()
        except RotaError as error:  # an abandoned stage may still hold a block
            _log.error("the verbs device stays open: %s", error)
