"""The pure core: state and events in, effects out. Imports only the standard library, msgspec and
:mod:`rota.errors`; :class:`Core` is the door."""

from .config import CoreConfig
from .core import Core
from .identity import BASE_ID, adapter_id
from .snapshot import AdapterStats, SlotStats, Stats

__all__ = ["BASE_ID", "AdapterStats", "Core", "CoreConfig", "SlotStats", "Stats", "adapter_id"]
