"""Paged KV memory of a tensor space.

What it owns: one device allocation with the keys and values of every layer. Invariants: it is
allocated once and never moves, so graphs may hold its addresses; one block more than the core gives
out lies at its end, for what padding rows write.
"""

from __future__ import annotations

import torch

from ..device import Device
from ..kernels.rope import BLOCK_TOKENS
from ..tensors import TensorSpace
from .config import ModelConfig
from .kv import check_blocks, kv_bytes_per_block


class TorchKv:
    """Keys and values of every layer that attends, in the order of `ModelConfig.kv_layers`:
    ``[(num_blocks + 1) * 16, kv_heads, head_dim]`` each.

    Attributes:
        blocks: the same memory as ``[layers, 2, num_blocks + 1, 16, kv_heads, head_dim]``.
        waste_cell: where padding rows write.
        zero_cell: a cell that is zero and that nobody writes: what is read in place of cells a row
            may not see, whose contents could be another row's NaN.

    Args:
        num_blocks: blocks to give out, 1 or more.

    Make it inside ``space.computing``.

    Raises:
        DeviceError: kv-too-small, and what `Device.alloc` raises.
    """

    def __init__(
        self,
        device: Device,
        space: TensorSpace,
        config: ModelConfig,
        dtype: torch.dtype,
        num_blocks: int,
    ) -> None:
        check_blocks(num_blocks)
        self._device = device
        self.num_blocks = num_blocks
        self.waste_cell = num_blocks * BLOCK_TOKENS
        self.zero_cell = self.waste_cell + 1
        self.nbytes = (num_blocks + 1) * kv_bytes_per_block(config, dtype)
        self._address: int | None = device.alloc(self.nbytes, label="kv cache")
        cells = (num_blocks + 1) * BLOCK_TOKENS
        layers = len(config.kv_layers)
        shape = (layers, 2, cells, config.kv_heads, config.head_dim)
        whole = space.view(self._address, shape, dtype)
        self.keys = [whole[layer, 0] for layer in range(layers)]
        self.values = [whole[layer, 1] for layer in range(layers)]
        whole[:, :, self.waste_cell :] = 0
        self.blocks = whole.view(layers, 2, num_blocks + 1, BLOCK_TOKENS, *shape[3:])

    def close(self) -> None:
        """Drop the tensors and free the memory, once. End the work that uses it first."""
        address, self._address = self._address, None
        if address is not None:
            self.keys, self.values = [], []
            del self.blocks
            self._device.free(address)
