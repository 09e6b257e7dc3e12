"""Adapter change latency of PEFT: load, switch, hot-swap and delete, page cache warm.

    python bench/peers/peft_swap.py --model DIR --adapters DIR...   (venv: transformers, peft)

No request runs meanwhile: PEFT has no way to serve during any of these.
"""

from __future__ import annotations

import functools
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import common

os.environ["HF_HUB_OFFLINE"] = "1"
import torch
from peft import PeftModel
from peft.utils.hotswap import hotswap_adapter
from transformers import AutoModelForCausalLM


def timed(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def main() -> None:
    options = common.parse(__doc__.splitlines()[0])
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    with common.quiet_stdout() as output:
        base = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()
        first, *others = options.adapters
        # Factors stay in bf16: the default makes float32 of them, which takes longer here.
        keep = {"autocast_adapter_dtype": False}
        model = PeftModel.from_pretrained(base, first, "first", **keep).eval()
        times: dict[str, list[float]] = {}
        for i in range(options.repeats + 1):
            path = others[i % len(others)] if others else first
            round_times = {
                "load_adapter": timed(
                    functools.partial(model.load_adapter, path, "second", **keep)
                ),
                "set_adapter": timed(lambda: model.set_adapter("second")),
                "hotswap_adapter": timed(
                    lambda: hotswap_adapter(model, first, "second", torch_device="cpu")
                ),
            }
            model.set_adapter("first")
            round_times["delete_adapter"] = timed(lambda: model.delete_adapter("second"))
            round_times["load_and_set"] = round_times["load_adapter"] + round_times["set_adapter"]
            if i:  # the first round warms the page cache
                for name, value in round_times.items():
                    times.setdefault(name, []).append(value)
        size = (first / "adapter_model.safetensors").stat().st_size
        common.report(
            output,
            "transformers+peft",
            "swap",
            ("transformers", "peft", "torch"),
            options,
            [common.swap_row(name, values) for name, values in times.items()],
            dtype="bfloat16",
            adapter_bytes=size,
        )


if __name__ == "__main__":
    main()
