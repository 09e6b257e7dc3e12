"""Every option of an engine, with its unit and default. Unknown options are refused."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Seconds = Annotated[float, msgspec.Meta(ge=0.0)]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``max_loras``: slots in the pool (0 = LoRA off). ``max_lora_rank``: the largest rank held.
    ``overlay_rows``: embedding and head rows an adapter may override. ``affine``: room in each slot
    for DoRA's factors and for biases (eight bytes per output). ``expert_adapters``: serve pairs of
    routed experts, of ranks up to ``max_expert_rank`` (0: ``max_lora_rank``).
    ``max_embedding_rank``: the largest rank of low-rank embed_tokens and lm_head (0: they are
    refused). ``adapter_arena_bytes``: memory for what all adapters in slots have together of
    experts, token matrices and overridden rows (``None``: the most one can have, for every slot,
    but at most 1 GiB or once, whichever is more). ``kv_bytes``: KV memory, or
    ``None`` to size it from what is free. ``attention``: the way an accelerator attends: "auto"
    tries the paged kernels that are installed and takes the first that agrees with torch's own
    operations ("torch"); one asked for by name is used or refused.
    ``pin_adapters``: start-up adapters are never victims.
    ``prefix_cache``: read KV blocks that an earlier request computed instead of recomputing them.
    ``state_snapshots``: in models with recurrent states, the most copies kept for requests that
    begin alike (0: no prefix cache there; fewer where they would take more than an eighth of the
    free memory). ``snapshot_tokens``: one is taken at the end of each prompt and every so many
    tokens. ``spill_bytes``: host memory for KV blocks and states of preempted sequences; what finds
    no room is recomputed. ``spill_bytes_per_token``: bytes that go out and come back in the time it
    takes to recompute one token, by which the cheaper is chosen.
    ``step_depth``: steps in flight at once, 1 or 2; ``None``: 2 on an accelerator, 1 on the host,
    whose steps are long beside the pause between two.
    ``drain_after_s``: how long an adapter waits for a slot before a busy one is drained.
    ``seed``: of the draws of requests that bring no seed (``None``: from the system)."""

    max_loras: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 8
    max_lora_rank: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 64
    overlay_rows: _Count = 0
    affine: bool = True
    expert_adapters: bool = False
    max_expert_rank: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    max_embedding_rank: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    adapter_arena_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 44)] | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    attention: Literal["auto", "torch", "torch-varlen", "flashinfer"] = "auto"
    kv_bytes: _Positive | None = None
    max_running: _Positive = 64
    max_waiting: _Positive = 4096
    max_step_tokens: _Positive = 512
    mixed_step_tokens: _Positive = 128
    step_depth: Annotated[int, msgspec.Meta(ge=1, le=2)] | None = None
    prefix_cache: bool = True
    state_snapshots: Annotated[int, msgspec.Meta(ge=0, le=16384)] = 32
    snapshot_tokens: _Positive = 1024
    spill_bytes: _Count = 256 << 20
    spill_bytes_per_token: _Positive = 1 << 20
    drain_after_s: _Seconds = 0.5
    image_cache_bytes: _Count = 1 << 30
    stage_workers: _Positive = 2
    pin_adapters: bool = True
    close_timeout_s: _Seconds = 30.0
    use_numba: bool = True
    seed: int | None = None
