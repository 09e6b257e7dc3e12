"""rota: serve one base LLM with many LoRA adapters, and change adapters while it serves.

The names below load on first use, so that ``import rota`` is cheap and needs neither a GPU nor
torch at import time.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import (
        CapacityError,
        CommandError,
        DeviceError,
        EngineClosedError,
        InternalError,
        ModelError,
        RejectError,
        RequestError,
        RotaError,
        StagingError,
        WireError,
    )
    from .gpu.lora.source import BytesSource, DirectorySource
    from .gpu.model.params import SamplingParams
    from .rdma.client import Peer
    from .rdma.pool import PeerPool
    from .sched.engine import Engine
    from .sched.face import DEFAULT, AdapterReply
    from .sched.ipc.client import Client, connect
    from .sched.streams import GenerationEvent

__version__ = "0.1.0.dev0"

_HOMES = {
    "AdapterReply": ".sched.face",
    "Client": ".sched.ipc.client",
    "connect": ".sched.ipc.client",
    "DEFAULT": ".sched.face",
    "Engine": ".sched.engine",
    "GenerationEvent": ".sched.streams",
    "Peer": ".rdma.client",
    "PeerPool": ".rdma.pool",
    "SamplingParams": ".gpu.model.params",
    "BytesSource": ".gpu.lora.source",
    "CapacityError": ".errors",
    "CommandError": ".errors",
    "DeviceError": ".errors",
    "DirectorySource": ".gpu.lora.source",
    "EngineClosedError": ".errors",
    "InternalError": ".errors",
    "ModelError": ".errors",
    "RejectError": ".errors",
    "RequestError": ".errors",
    "RotaError": ".errors",
    "StagingError": ".errors",
    "WireError": ".errors",
}

__all__ = [
    "DEFAULT",
    "AdapterReply",
    "BytesSource",
    "CapacityError",
    "Client",
    "CommandError",
    "DeviceError",
    "DirectorySource",
    "Engine",
    "EngineClosedError",
    "GenerationEvent",
    "InternalError",
    "ModelError",
    "Peer",
    "PeerPool",
    "RejectError",
    "RequestError",
    "RotaError",
    "SamplingParams",
    "StagingError",
    "WireError",
    "connect",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'rota' has no attribute {name!r}")
    value = getattr(import_module(home, __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
