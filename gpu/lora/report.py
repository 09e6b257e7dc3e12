"""What a load says about itself: counts, notes and times, without names of people or paths.

What it owns: nothing; a frozen value. Invariant: every tensor of the file is either in ``pairs`` /
overlay rows or in ``ignored`` with a reason; nothing is dropped without a line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Report of one staged adapter.

    Attributes:
        tensors: tensors in the file.
        pairs: matched pairs.
        by_module: pairs per module leaf, e.g. ``{"q_proj": 30}``.
        ignored: (key or config field, why) of everything read and not used.
        notes: things worth a human's look that change nothing, e.g. an absent ``use_rslora``.
        ranks: (rank, pairs of that rank), ascending.
        scales: (scale, pairs of that scale), ascending.
        dtypes: tensors per file dtype.
        embed_rows: token rows replaced in the embedding.
        head_rows: token rows replaced in lm_head.
        slot_bytes: bytes the adapter takes in the pool.
        file_bytes: tensor bytes read.
        seconds: wall seconds per phase (read, digest, audit, pack) by the given clock.
    """

    tensors: int
    pairs: int
    by_module: Mapping[str, int]
    ignored: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    ranks: tuple[tuple[int, int], ...]
    scales: tuple[tuple[float, int], ...]
    dtypes: Mapping[str, int]
    embed_rows: int
    head_rows: int
    slot_bytes: int
    file_bytes: int
    seconds: Mapping[str, float]
