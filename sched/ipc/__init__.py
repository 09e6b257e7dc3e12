"""IPC: one engine process, many frontends, over a Unix socket or TCP.

Owns the wire structs (:mod:`.wire`), the sans-IO protocol (:mod:`.framing`, :mod:`.session`), the
server beside an engine and the client that looks like one. See docs/ipc.md for the protocol.
"""
