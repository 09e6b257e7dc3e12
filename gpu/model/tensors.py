"""Reading tensors of a checkpoint in the engine's dtype.

What it owns: the count of bytes read. Invariant: every tensor is a copy, since the file may change
or be cut after loading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from .checkpoint import Checkpoint

Linear = Callable[[torch.Tensor], torch.Tensor]
"""y = x W^T + b: ``[m, k_in]`` to ``[m, n_out]``."""


Progress = Callable[[int, int], None]
"""Told (tensors read or being read, tensors in all), on the thread that loads."""


class Packer(Protocol):
    """Takes a linear's matrix and bias, in ``dtype``, and makes the operation."""

    @property
    def dtype(self) -> torch.dtype:
        """Of every matrix."""
        ...

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """The operation; the caller may drop the matrix."""
        ...

    def experts(self, weights: Iterator[torch.Tensor], count: int) -> Sequence[Linear]:
        """The operations of ``count`` matrices of one shape, taken one by one."""
        ...


class TensorLoader:
    """Tensors of one checkpoint, whose names, shapes and dtypes were checked before.

    Attributes:
        nbytes: bytes of everything read so far, in the dtype it is served in.
        total: tensors there are to read, once that is known.
    """

    def __init__(
        self, checkpoint: Checkpoint, kernels: Packer, told: Progress | None = None
    ) -> None:
        self.checkpoint, self.kernels, self._told = checkpoint, kernels, told
        self.nbytes = self.total = 0
        self._names: set[str] = set()

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor in the engine's dtype, contiguous."""
        return self._kept(self._read(name).to(self.kernels.dtype, copy=True))

    def wide(self, name: str) -> torch.Tensor:
        """A tensor in float32."""
        return self._kept(self._read(name).to(torch.float32, copy=True))

    def stacked(self, names: Sequence[str]) -> torch.Tensor:
        """Tensors joined along their rows, in the engine's dtype."""
        parts = [self._read(name) for name in names]
        rows = sum(part.shape[0] for part in parts)
        made = torch.empty((rows, *parts[0].shape[1:]), dtype=self.kernels.dtype)
        at = 0
        for part in parts:
            made[at : at + part.shape[0]].copy_(part)
            at += part.shape[0]
        return self._kept(made)

    def linear(
        self,
        names: Sequence[str],
        bias: torch.Tensor | None = None,
        *,
        order: torch.Tensor | None = None,
    ) -> Linear:
        """A linear of the stacked weights, packed; ``order``: int64, rows of the stack to take."""
        weight = self._matrix(names)
        if order is not None:
            weight = weight.index_select(0, order)
        return self.kernels.linear(weight, bias)

    def _matrix(self, names: Sequence[str]) -> torch.Tensor:
        return self.tensor(names[0]) if len(names) == 1 else self.stacked(names)

    def experts(self, name: str) -> Sequence[Linear]:
        """A linear of each matrix of a 3-D tensor, packed one by one."""
        whole, dtype = self._read(name), self.kernels.dtype
        each = (self._kept(matrix.to(dtype, copy=True)) for matrix in whole)
        return self.kernels.experts(each, whole.shape[0])

    def experts_of(self, names: Sequence[Sequence[str]]) -> Sequence[Linear]:
        """The same, of each expert's tensors stacked."""
        return self.kernels.experts((self._matrix(own) for own in names), len(names))

    def _read(self, name: str) -> torch.Tensor:
        self._names.add(name)
        if self._told is not None:
            self._told(len(self._names), self.total)
        return self.checkpoint.read(name)

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        made = tensor.contiguous()
        self.nbytes += made.nbytes
        return made
