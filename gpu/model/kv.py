"""Paged KV memory.

What it owns: one device allocation with the key and value caches of every layer. Invariants: it is
allocated once and never moves; block ``b`` of a sequence means the same ``b`` in every layer; the
contents of a block are undefined until a step writes them, and no step reads what none has written.

The core gives out the blocks, so none is kept back here.
"""

from __future__ import annotations

import ctypes

import torch

from ...errors import DeviceError
from ..device import Device
from ..kernels.rope import BLOCK_TOKENS
from .config import ModelConfig

MAX_BLOCKS = 1 << 30


def kv_bytes_per_block(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one block of 16 tokens: keys and values of every layer that attends."""
    per_layer = 2 * config.kv_heads * BLOCK_TOKENS * config.head_dim * dtype.itemsize
    return len(config.kv_layers) * per_layer


def blocks_within(config: ModelConfig, dtype: torch.dtype, nbytes: int) -> int:
    """Blocks that ``nbytes`` bytes hold.

    Raises:
        DeviceError: kv-too-small, when they hold none.
    """
    each = kv_bytes_per_block(config, dtype)
    if nbytes < each:
        raise DeviceError(
            "the KV memory holds no block",
            code="kv-too-small",
            expected=f"at least {each} bytes",
            found=nbytes,
        )
    return min(nbytes // each, MAX_BLOCKS)


def check_blocks(num_blocks: int) -> None:
    """Refuse a number of blocks that no cache has. Raises DeviceError kv-too-small."""
    if not 1 <= num_blocks <= MAX_BLOCKS:
        raise DeviceError(
            "bad number of KV blocks",
            code="kv-too-small",
            expected=f"1..{MAX_BLOCKS}",
            found=num_blocks,
        )


def spare_bytes(
    device: Device, config: ModelConfig, dtype: torch.dtype, model_bytes: int, sequences: int
) -> int:
    """KV bytes when nothing was asked for: half of what is free, or all that can ever be used.

    That is enough for ``sequences`` sequences to fill the context. ``model_bytes``: the weights.
    """
    free, _ = device.memory_info()
    if device.host_addressable:
        # The weights are the same machine's memory and were not taken from the device.
        free -= model_bytes
    each = kv_bytes_per_block(config, dtype)
    enough = sequences * -(-config.context // BLOCK_TOKENS) * each
    return min(max(free, 0) // 2, enough)


class KvCache:
    """Keys and values of every layer that attends, in the order of `ModelConfig.kv_layers`.

    Each is a tensor ``[num_blocks, kv_heads, 16, head_dim]``.

    Args:
        device: host addressable; the memory is given back in `close`.
        num_blocks: 1 or more.

    Raises:
        DeviceError: kv-too-small, not-host-addressable, and what `Device.alloc` raises.
    """

    def __init__(
        self, device: Device, config: ModelConfig, dtype: torch.dtype, num_blocks: int
    ) -> None:
        check_blocks(num_blocks)
        if not device.host_addressable:
            raise DeviceError(
                "the KV cache needs memory the CPU can read",
                code="not-host-addressable",
                subject=device.name,
            )
        self._device = device
        self.num_blocks = num_blocks
        self.nbytes = num_blocks * kv_bytes_per_block(config, dtype)
        self._address: int | None = device.alloc(self.nbytes, label="kv cache")
        layers = len(config.kv_layers)
        shape = (layers, 2, num_blocks, config.kv_heads, BLOCK_TOKENS, config.head_dim)
        raw = (ctypes.c_char * self.nbytes).from_address(self._address)
        whole = torch.frombuffer(raw, dtype=dtype).view(shape)
        self.keys = [whole[layer, 0] for layer in range(layers)]
        self.values = [whole[layer, 1] for layer in range(layers)]

    def close(self) -> None:
        """Drop the tensors and free the memory, once. End the work that uses it first."""
        self.keys, self.values = [], []
        address, self._address = self._address, None
        if address is not None:
            self._device.free(address)
