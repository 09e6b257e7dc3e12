"""What staging saw of adapters, by name, for who asks later.

Owns the newest report of each name, of the names staged last. Invariants: what is told of a name is
of bytes that were staged under it, which ``digest`` names; nothing is told of a name that is not
known, and one that is known again begins with nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

import msgspec

from ..gpu.lora.report import LoadReport

KEPT: Final = 1024
"""Names remembered; the one staged longest ago goes first."""


class StagedReport(msgspec.Struct, frozen=True):
    """What staging saw: ``digest`` (hex SHA-256 of config and tensors), and the audit's report
    (``None`` where the source gave none)."""

    digest: str
    report: LoadReport | None


class Seen:
    """See the module. ``known``: whether there is a name now."""

    def __init__(self, known: Callable[[str], bool]) -> None:
        self._known = known
        self._by_name: OrderedDict[str, StagedReport] = OrderedDict()

    def note(self, name: str, staged: Any) -> None:
        """``staged``: a :class:`~rota.sched.staging.Staged`. Its name may be gone by now."""
        if not self._known(name):
            return
        self._by_name[name] = StagedReport(staged.digest, staged.report)
        self._by_name.move_to_end(name)
        if len(self._by_name) > KEPT:
            self._by_name.popitem(last=False)

    def check(self, name: str | None) -> None:
        """The name may have gone: forget it if it has."""
        if name is not None and not self._known(name):
            self._by_name.pop(name, None)

    def of(self, name: str) -> StagedReport | None:
        """``None``: not staged since it is known, or too long ago."""
        return self._by_name.get(name)
