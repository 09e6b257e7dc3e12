"""What a load says about itself: counts, notes and times, without names of people or paths.

What it owns: nothing; a frozen value, and the norms computed on demand. Invariant: every tensor of
the file is in a pair or an overlay, and every config field that was not used is in ``ignored``;
nothing is dropped without a line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .image import SlotImage
from .layout import SlotLayout
from .pack import as_f32


@dataclass(frozen=True, slots=True)
class ModuleReport:
    """One kind of module, in all layers together.

    Attributes:
        module: its leaf, e.g. ``"q_proj"``.
        pairs: matched pairs.
        ranks: that occur, ascending.
        scales: that occur, ascending.
    """

    module: str
    pairs: int
    ranks: tuple[int, ...]
    scales: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Report of one staged adapter.

    Attributes:
        tensors: tensors in the file.
        pairs: matched pairs.
        by_module: pairs per module leaf, e.g. ``{"q_proj": 30}``.
        ignored: (config field, why) of everything read and not used.
        notes: things worth a human's look that change nothing, e.g. an absent ``use_rslora``.
        ranks: (rank, pairs of that rank), ascending.
        scales: (scale, pairs of that scale), ascending.
        dtypes: tensors per file dtype.
        embed_rows: token rows replaced in the embedding.
        head_rows: token rows replaced in lm_head.
        vectors: pairs with a factor or offset per output, by what it comes from: dora, lora_bias,
            bias.
        slot_bytes: bytes of its slot.
        annex_bytes: bytes it takes in the arena: experts, token matrices, overlay.
        file_bytes: tensor bytes read.
        seconds: wall seconds per phase by the given clock: read, audit, pack, and digest: all of
            it where the thread that reads takes it, as by a recipe, where the four take turns; else
            what was left to wait for when audit and pack, which it is taken beside, were over.
        modules: rank and scale by kind of module, in walk order; ``()`` from a weight peer that
            does not tell them.
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
    vectors: Mapping[str, int]
    slot_bytes: int
    file_bytes: int
    seconds: Mapping[str, float]
    modules: tuple[ModuleReport, ...] = ()
    annex_bytes: int = 0


def delta_norms(image: SlotImage, layout: SlotLayout) -> npt.NDArray[np.float64]:
    """Frobenius norm of each pair's weight delta, scale * B A: float64 ``[n_pairs]``, 0 if absent.

    ``|BA|^2 = trace((B'B)(AA'))``: two ``[r, r]`` products, never the ``[out, in]`` matrix. Costs
    about ten milliseconds per hundred pairs, so staging leaves it to whoever asks.
    """
    norms = np.zeros(len(layout.pairs), np.float64)
    for index, rank in enumerate(image.ranks):
        if rank == 0:
            continue
        a_view, b_view = layout.pair_views(image.buffer, index, image.annex)
        a = as_f32(a_view[:rank]).astype(np.float64)
        b = as_f32(b_view[:, :rank]).astype(np.float64)
        squared = float(np.sum((b.T @ b) * (a @ a.T)))
        norms[index] = float(image.scales[index]) * max(squared, 0.0) ** 0.5
    return norms
