"""Histograms as frozen data, in every snapshot: seconds of commits, barriers and staging phases.

Owns the shape only; they are filled outside the core, which reads no clock (``sched/timings.py``).
"""

from __future__ import annotations

import msgspec

#: Upper edges of the buckets, in seconds; one more bucket is above them all.
EDGES_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
#: What staging a slot image is made of; ``resolve``, ``transfer`` and ``verify`` come from peers.
PHASES = ("resolve", "transfer", "read", "digest", "verify", "audit", "pack")


class Spread(msgspec.Struct, frozen=True):
    """``counts[i]``: values in bucket ``i`` of :data:`EDGES_S`; ``total_s``: their sum."""

    counts: tuple[int, ...] = (0,) * (len(EDGES_S) + 1)
    total_s: float = 0.0


class Times(msgspec.Struct, frozen=True):
    """``barrier``: from a commit's decision until the device thread took it up; ``commit``: its
    work there; ``phases``: staging, one spread for each of :data:`PHASES`."""

    barrier: Spread = Spread()
    commit: Spread = Spread()
    phases: tuple[Spread, ...] = (Spread(),) * len(PHASES)
