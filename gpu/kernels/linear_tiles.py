"""Linear layers of bf16 on matrix tiles: weights packed once, and the way to the kernel.

`TilePacker` owns blocks of memory that packed weights are laid in one after the other, so that
they lie on huge pages and what follows a weight is the next one; a linear keeps its block. The
kernel is in `linear_tiles_kernel`.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from ..host_memory import HUGE_PAGE
from . import linear_tiles_kernel as kernel
from .memory import Scratch

BLOCK_BYTES: Final = 64 << 20
"""Memory taken at once; pages that nothing is laid in are never touched."""
_LINE: Final = 64


class TileLinear:
    """y = x W^T + b in bf16. Made by `TilePacker`.

    ``place``: address and bytes of the weights. `y[i]` depends on x[i] alone. A step calls some
    hundred of them: hence slots, and no calls on the way to the kernel.
    """

    __slots__ = ("_entry", "_memory", "_packed", "_scratch", "dtype", "k_in", "n_out", "place")

    def __init__(self, memory: torch.Tensor, n_out: int, k_in: int, scratch: Scratch) -> None:
        self.n_out = n_out
        self.k_in = k_in
        self.dtype = torch.bfloat16
        self._memory = memory
        self._packed = memory.data_ptr()
        self.place = self._packed, memory.nbytes
        self._scratch = scratch
        self._entry: Any = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + b.

        Args:
            x: [m, k_in] bf16, columns contiguous.

        Returns:
            [m, n_out], newly allocated, contiguous.
        """
        rows, n_out, scratch = x.shape[0], self.n_out, self._scratch
        out = torch.empty((rows, n_out), dtype=torch.bfloat16)
        if rows == 0:
            return out
        if rows > kernel.FEW_ROWS:
            scratch.at_least(kernel.scratch_bytes(self.k_in, rows))
        (self._entry or self._start)(
            0,
            self._packed,
            scratch.address,
            x.data_ptr(),
            x.stride(0),
            out.data_ptr(),
            n_out,
            rows,
        )
        return out

    def _start(self, *scalars: int) -> None:
        """The first call: it may compile. Later ones go straight to the compiled code."""
        kernel.tile_linear_kernel(*scalars)
        self._entry = kernel.tile_linear_kernel.entry(0)


class TilePacker:
    """Packs weights for tiles. `has_tiles` must have said yes.

    Args:
        scratch: of the one thread that calls the linears.
    """

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch
        scratch.at_least(kernel.scratch_bytes(kernel.DEPTH, 1))
        self._block = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    @staticmethod
    def fits(n_out: int, k_in: int) -> bool:
        """Whether the kernel knows this shape."""
        return n_out > 0 and k_in > 0 and n_out % kernel.ROWS == 0 and k_in % kernel.DEPTH == 0

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> TileLinear:
        """Pack `weight`; the caller may drop it and `bias` afterwards.

        Args:
            weight: [n_out, k_in] bf16 of a shape that `fits`.
            bias: [n_out] bf16 or None.
        """
        n_out, k_in = weight.shape
        end = kernel.HEADER_BYTES + 2 * n_out * k_in
        memory = self._take(end + 2 * n_out)
        fields = [k_in, n_out, int(bias is not None), kernel.chunk_rows(k_in)]
        header = torch.tensor(fields, dtype=torch.int64)
        memory[: header.nbytes].view(torch.int64).copy_(header)
        # [panel, output, step, pair, 2] to [panel, step, pair, output, 2].
        panels = weight.reshape(n_out // kernel.ROWS, kernel.ROWS, k_in // kernel.DEPTH, -1, 2)
        target = memory[kernel.HEADER_BYTES : end].view(torch.bfloat16)
        panels = panels.permute(0, 2, 3, 1, 4)
        target.view(panels.shape).copy_(panels)
        if bias is not None:
            memory[end:].view(torch.bfloat16).copy_(bias)
        return TileLinear(memory, n_out, k_in, self._scratch)

    def _take(self, nbytes: int) -> torch.Tensor:
        """The next `nbytes` of the block, from a line on; a block of its own where that is most of
        one."""
        if nbytes > BLOCK_BYTES // 2:
            return _aligned(nbytes)
        if self._used + nbytes > self._block.nbytes:
            self._block, self._used = _aligned(BLOCK_BYTES), 0
        start = self._used
        self._used = -(-(start + nbytes) // _LINE) * _LINE
        return self._block[start : start + nbytes]


def _aligned(nbytes: int) -> torch.Tensor:
    """Memory that begins with a huge page."""
    memory = torch.empty(nbytes + HUGE_PAGE, dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE_PAGE
    return memory[start : start + nbytes]
