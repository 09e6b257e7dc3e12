"""A slot image: one adapter packed for one layout, in host memory.

What it owns: nothing but the buffer it holds. Invariants: the buffer has exactly
``layout.slot_bytes`` bytes, then those of its annex; every byte that is not a value of the adapter
is zero; ``scales[p]`` is 0 where ``present[p]`` is False. Equal adapters give equal
images to the last bit, whichever way the bytes came. Nobody writes to a buffer once its image is
made: on the host a slot may *be* the image (`LoraPool`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .annex import Annex


@dataclass(frozen=True, slots=True, eq=False)
class SlotImage:
    """What `gpu.lora.stage.stage` makes and `gpu.lora.pool.LoraPool.commit` puts in a slot.

    Attributes:
        buffer: uint8 ``[slot_bytes + annex.nbytes]``, contiguous.
        present: per pair index, True where the adapter has the pair.
        scales: float32 ``[n_pairs]``, alpha / r or alpha / sqrt(r); 0 where absent.
        ranks: true rank of each pair, 0 where absent.
        digest: SHA-256 (hex) of the config bytes followed by the tensor bytes.
        fingerprint: of the layout it was packed for.
        embed_rows: used rows of the embedding overlay.
        head_rows: used rows of the lm_head overlay.
        affine: per pair index, True where the pair has a factor and an offset; ``()`` is nowhere.
        lent: the buffer belongs to someone who wants it back (a caller's, a block of a registered
            arena), so a pool copies it even where it could serve from it.
        annex: where its experts, token matrices and overlay lie; ``None`` is without any.
    """

    buffer: npt.NDArray[np.uint8]
    present: tuple[bool, ...]
    scales: npt.NDArray[np.float32]
    ranks: tuple[int, ...]
    digest: str
    fingerprint: str
    embed_rows: int = 0
    head_rows: int = 0
    affine: tuple[bool, ...] = ()
    lent: bool = False
    annex: Annex | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return int(self.buffer.nbytes)

    @property
    def annex_bytes(self) -> int:
        """Bytes it needs in the arena, beside its slot."""
        return 0 if self.annex is None else self.annex.nbytes

    @property
    def address(self) -> int:
        """Host address of the buffer's first byte; valid while this image is alive."""
        return int(self.buffer.__array_interface__["data"][0])
