"""The base model's token matrices as numpy arrays, for staging.

What it owns: nothing but references to the weights. Invariant: the arrays are read only.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


class BaseMatrices:
    """Implements `gpu.lora.overlay.BaseRows`."""

    def __init__(self, embed: torch.Tensor, head: torch.Tensor) -> None:
        self._embed, self._head = _array(embed), _array(head)

    def embed(self) -> npt.NDArray[np.generic]:
        """``[vocab, hidden]``: float32, or BF16 bit patterns in uint16."""
        return self._embed

    def head(self) -> npt.NDArray[np.generic]:
        """lm_head in the same form (the embedding itself when tied)."""
        return self._head


def _array(tensor: torch.Tensor) -> npt.NDArray[np.generic]:
    plain = tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor
    array: npt.NDArray[np.generic] = plain.numpy()
    array = array.view()
    array.flags.writeable = False
    return array
