"""The base model's matrices as numpy arrays, for staging.

What it owns: references to the token matrices, and the files the linear weights are read from.
Invariant: the arrays are read only, or copies.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from ..lora.dims import TOKEN_MODULES, LoraModule
from ..lora.overlay import token_rows
from .linears import BaseLinears


class BaseMatrices:
    """Implements `gpu.lora.overlay.BaseRows`."""

    def __init__(self, embed: torch.Tensor, head: torch.Tensor, linears: BaseLinears) -> None:
        self._embed, self._head = _array(embed), _array(head)
        self._linears = linears

    def embed(self) -> npt.NDArray[np.generic]:
        """``[vocab, hidden]``: float32, or BF16 bit patterns in uint16."""
        return self._embed

    def head(self) -> npt.NDArray[np.generic]:
        """lm_head in the same form (the embedding itself when tied)."""
        return self._head

    def rows(
        self, layer: int, module: LoraModule, start: int, stop: int, expert: int = 0
    ) -> npt.NDArray[np.float32]:
        """Rows of a linear weight; see `BaseLinears.rows`, and `token_rows`."""
        if module in TOKEN_MODULES:
            return token_rows(self, module, start, stop)
        return self._linears.rows(layer, module, start, stop, expert)

    def bias(self, layer: int, module: LoraModule) -> npt.NDArray[np.float32] | None:
        """A linear's bias; see `BaseLinears.bias`."""
        return self._linears.bias(layer, module)

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._linears.close()


def _array(tensor: torch.Tensor) -> npt.NDArray[np.generic]:
    plain = tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor
    array: npt.NDArray[np.generic] = plain.numpy()
    array = array.view()
    array.flags.writeable = False
    return array
