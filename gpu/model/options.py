"""What a runner is asked for, on any device.

What it owns: nothing. Invariant: an instance has sizes a runner can serve; what does not fit the
device is refused when memory is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, get_args

import torch

from ...errors import DeviceError
from ..device import Device
from ..kernels.rope import BLOCK_TOKENS
from ..lora.layout import Elem, SlotLayout
from ..lora.pool import LoraPool
from .config import ModelConfig
from .contract import RunnerInfo
from .kv import blocks_within, kv_bytes_per_block, spare_bytes
from .states import StateArena, state_bytes
from .tensors import Progress
from .torch_attention import AttentionName
from .weights import DtypeName

MAX_STEP_TOKENS: Final = 1 << 16
MAX_SEQUENCES: Final = 1 << 14
MAX_ARENA_BYTES: Final = 1 << 44


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOptions:
    """Options of `Runner.load` and `TorchRunner.load`.

    Attributes:
        dtype: "auto" (the checkpoint's), "bfloat16" or "float32".
        max_loras: slots; 0 is LoRA off.
        max_lora_rank: largest rank a slot has room for.
        overlay_rows: embedding and lm_head rows an adapter may replace.
        affine: room in each slot for DoRA's factors and for biases.
        expert_adapters: serve pairs of routed experts.
        max_expert_rank: of them, where less than ``max_lora_rank``; 0 = ``max_lora_rank``.
        max_embedding_rank: largest rank of embed_tokens and lm_head; 0 = no room for them.
        adapter_arena_bytes: memory for what the adapters in slots have, all together, of experts,
            token matrices and replaced rows; rounded down to 256 bytes. ``None``: as much as the
            largest such adapter may need, in every slot, but at most 1 GiB; or as it needs once.
        num_blocks, kv_bytes: KV memory, one or the other; neither takes half of what is free.
        max_step_tokens: most tokens of a step.
        max_sequences: most rows of a step.
        spill_bytes: host memory for KV blocks and states of preempted sequences, taken as it is
            needed.
        snapshots: of recurrent states; fewer where they would take more than an eighth of what is
            free.
        progress: told of tensors as they are read, on the device thread.
        attention: how an accelerator's runner attends: "auto" takes the first paged kernel that
            agrees with torch's operations, which "torch" names; or a kernel by name.

    Raises:
        DeviceError: bad-argument.
    """

    dtype: DtypeName = "auto"
    max_loras: int = 8
    max_lora_rank: int = 64
    overlay_rows: int = 0
    affine: bool = True
    expert_adapters: bool = False
    max_expert_rank: int = 0
    max_embedding_rank: int = 0
    adapter_arena_bytes: int | None = None
    num_blocks: int | None = None
    kv_bytes: int | None = None
    max_step_tokens: int = 512
    max_sequences: int = 64
    spill_bytes: int = 0
    snapshots: int = 0
    progress: Progress | None = None
    attention: AttentionName = "auto"

    def __post_init__(self) -> None:
        for name, low, high in (
            ("max_loras", 0, 4096),
            ("max_step_tokens", 1, MAX_STEP_TOKENS),
            ("max_sequences", 1, MAX_SEQUENCES),
            ("adapter_arena_bytes", 0, MAX_ARENA_BYTES),
        ):
            value = getattr(self, name)
            if value is None and name == "adapter_arena_bytes":
                continue
            if type(value) is not int or not low <= value <= high:
                raise DeviceError(
                    "a runner parameter is out of range",
                    code="bad-argument",
                    subject=name,
                    expected=f"an integer in {low}..{high}",
                    found=repr(value),
                )
        if self.attention not in (ways := get_args(AttentionName)):
            raise DeviceError(
                "a runner parameter has no such value",
                code="bad-argument",
                subject="attention",
                expected=f"one of {', '.join(ways)}",
                found=repr(self.attention),
            )

    def layout(self, config: ModelConfig, dtype: torch.dtype) -> SlotLayout:
        """The layout of every slot. Raises ModelError bad-layout."""
        return SlotLayout(
            config.to_lora_dims(expert_adapters=self.expert_adapters),
            self.max_lora_rank,
            Elem.BF16 if dtype is torch.bfloat16 else Elem.F32,
            self.overlay_rows,
            self.affine,
            self.max_expert_rank,
            self.max_embedding_rank,
        )

    def blocks(
        self, device: Device, config: ModelConfig, dtype: torch.dtype, model_bytes: int
    ) -> int:
        """KV blocks to take, once everything else has its memory.

        Args:
            model_bytes: of the weights.

        Raises:
            DeviceError: kv-too-small.
        """
        if self.num_blocks is not None:
            return self.num_blocks
        nbytes = self.kv_bytes
        if nbytes is None:
            nbytes = spare_bytes(device, config, dtype, model_bytes, self.max_sequences)
        return blocks_within(config, dtype, nbytes)

    def spill(self, config: ModelConfig, dtype: torch.dtype) -> tuple[int, int]:
        """(KV blocks that host memory may hold, those of them that one recurrent state takes)."""
        block = kv_bytes_per_block(config, dtype)
        return self.spill_bytes // block, -(-state_bytes(config, dtype) // block)

    def info(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        *,
        context: int,
        num_blocks: int,
        model_bytes: int,
        kv_bytes: int,
        pool: LoraPool | None,
        states: StateArena | None,
        attention: str = "host",
        attention_passed: tuple[str, ...] = (),
    ) -> RunnerInfo:
        """What a runner made of these options serves."""
        spill_blocks, state_blocks = self.spill(config, dtype)
        return RunnerInfo(
            family=config.family,
            dtype=str(dtype).removeprefix("torch."),
            vocab_size=config.vocab,
            context_length=context,
            eos_ids=config.eos_ids,
            num_blocks=num_blocks,
            block_size=BLOCK_TOKENS,
            model_bytes=model_bytes,
            kv_bytes=kv_bytes,
            pool_bytes=pool.nbytes if pool else 0,
            max_loras=self.max_loras,
            max_lora_rank=self.max_lora_rank,
            spill_blocks=spill_blocks,
            recurrent=config.recurrent,
            state_bytes=states.nbytes if states else 0,
            snapshots=states.snapshots if states else 0,
            state_blocks=state_blocks,
            attention=attention,
            attention_passed=attention_passed,
            arena_bytes=pool.arena_bytes if pool else 0,
        )
