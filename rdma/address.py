"""Where a peer is, as text: ``host:port``, and ``peer://host:port/id`` for an adapter on it.

Owns nothing.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import unquote

from ..errors import RequestError

SCHEME: Final = "peer://"


def parse_address(address: str) -> tuple[str, int]:
    """``"host:port"`` or ``"[v6]:port"``. Raises RequestError bad-address."""
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise RequestError(
            "not the address of a peer",
            code="bad-address",
            subject=address[:200],
            expected="host:port",
        )
    return host, int(port)


def parse_peer_url(url: str) -> tuple[str, str]:
    """``peer://host:port/id`` as (``"host:port"``, id). ``%2F`` and the like in the id are decoded.

    Raises:
        RequestError: bad-address, bad-adapter-id.
    """
    address, slash, adapter = url.removeprefix(SCHEME).partition("/")
    parse_address(address)
    name = unquote(adapter)
    if not url.startswith(SCHEME) or not slash or not name or not name.isprintable():
        raise RequestError(
            "not an adapter on a peer",
            code="bad-adapter-id",
            subject=url[:200],
            expected="peer://host:port/id",
        )
    return address, name
