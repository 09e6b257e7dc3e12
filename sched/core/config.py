"""Limits and policy of the core: everything has a limit, and each is here with its unit."""

from __future__ import annotations

import msgspec


def least_prefill(mixed_step_tokens: int, block_size: int) -> int:
    """Tokens of prefill a step has room for however many sequences decode."""
    return max(1, min(mixed_step_tokens // 2, block_size))


def most_step_tokens(
    max_step_tokens: int, mixed_step_tokens: int, max_running: int, block_size: int
) -> int:
    """Most tokens of any step, all of which a device must take: prefill alone, or prefill beside
    all but one that decode."""
    crowded = max_running - 1 + least_prefill(mixed_step_tokens, block_size)
    return max(max_step_tokens, mixed_step_tokens, crowded)


class CoreConfig(msgspec.Struct, frozen=True):
    """``max_loras``: slots (0 = LoRA off). ``num_blocks`` x ``block_size`` tokens of KV.
    ``max_context``: tokens of one sequence. ``max_step_tokens``: tokens of one step when nothing
    decodes; ``mixed_step_tokens``: the same when something does (it bounds the gap between tokens),
    unless so many decode that no block's worth of prefill would be left: see `most_step_tokens`.
    ``drain_after_s``: how long an adapter waits for a slot before a victim is drained.
    ``prefix_cache``: keep KV blocks of computed tokens for requests that begin alike.
    ``spill_blocks``: KV blocks of preempted sequences that host memory may hold (0: preempted
    sequences are recomputed). ``spill_fixed_cost``, ``spill_block_cost``: what spilling a sequence,
    and each of its blocks, out and back costs, in tokens of recompute.
    ``recurrent``: the model's sequences carry a state besides their KV blocks; a preempted
    sequence's is dropped, unless it is spilled. ``snapshots``: copies of states the device keeps
    (0: no prefix is shared), one every ``snapshot_tokens`` tokens and one at a prompt's end.
    ``state_blocks``: host memory of one spilled state, in KV blocks.
    ``watermark_blocks``: KV blocks admission leaves free for running sequences to grow into.
    ``spare_jobs``: adapters staged at once beyond two per slot (each holds a slot image).
    ``max_rank``: the highest rank a slot holds. A resize changes it and ``max_loras``.
    ``arena_bytes``: what all annexes of resident adapters may take together. A resize changes it.
    ``step_depth``: steps in flight at once, 1 or 2; see ``ahead``."""

    max_loras: int
    num_blocks: int
    max_context: int
    block_size: int = 16
    max_running: int = 64
    max_waiting: int = 4096
    max_step_tokens: int = 512
    mixed_step_tokens: int = 128
    watermark_blocks: int = 4
    prefix_cache: bool = True
    spill_blocks: int = 0
    spill_fixed_cost: float = 32.0
    spill_block_cost: float = 1.0
    recurrent: bool = False
    snapshots: int = 0
    snapshot_tokens: int = 1024
    state_blocks: int = 0
    drain_after_s: float = 0.5
    failure_backoff_s: float = 1.0
    max_names: int = 100_000
    max_commands: int = 256
    max_jobs_per_name: int = 64
    image_cache_bytes: int = 1 << 30
    log_size: int = 4096
    max_remembered_generations: int = 65_536
    spare_jobs: int = 8
    max_rank: int = 64
    arena_bytes: int = 0
    step_depth: int = 1

    @property
    def shares_prefixes(self) -> bool:
        """Whether a sequence may begin behind blocks another one computed."""
        return self.prefix_cache and (not self.recurrent or self.snapshots > 0)

    def jobs_in_hand(self) -> int:
        """Most adapter jobs that may hold an image, or be making one, at once."""
        return 2 * self.max_loras + self.spare_jobs
