"""Every limit of an IPC connection, with its unit and default."""

from __future__ import annotations

from typing import Annotated

import msgspec

_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Seconds = Annotated[float, msgspec.Meta(gt=0.0)]


class IpcLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``max_connections``: frontends at a time. ``max_frame``: bytes of one message to the server;
    ``max_reply``: to the client. ``max_hello``: of the first message. ``max_requests``,
    ``max_calls``: of one connection at a time. ``max_credit``: events of one request under way.
    ``high_water``: bytes of output of one connection above which its requests pause.
    ``max_uploads`` at a time per connection, of ``max_upload_bytes`` together. ``chunk``: upload
    bytes of one message. ``hello_timeout_s``: for the handshake. ``send_timeout_s``: a frontend
    that takes nothing for so long is taken for dead. ``stats_adapters``: answers to commands carry
    a snapshot while it lists at most this many names."""

    max_connections: _Positive = 64
    max_frame: _Positive = 8 << 20
    max_reply: _Positive = 64 << 20
    max_hello: _Positive = 64 << 10
    max_requests: _Positive = 4096
    max_calls: _Positive = 64
    max_credit: _Positive = 4096
    high_water: _Positive = 1 << 20
    max_uploads: _Positive = 4
    max_upload_bytes: _Positive = 2 << 30
    chunk: _Positive = 256 << 10
    hello_timeout_s: _Seconds = 5.0
    send_timeout_s: _Seconds = 300.0
    stats_adapters: _Positive = 1024
