"""Decode speed of transformers and PEFT: base, one adapter, eight mixed by ``adapter_names``.

    python bench/peers/peft_decode.py --model DIR --adapters DIR...   (venv: transformers, peft)

A bare forward loop with a ``DynamicCache`` and greedy tokens, so that generate()'s own cost is not
counted. The base case runs the model before PEFT has wrapped anything.
"""

from __future__ import annotations

import os
import time
import warnings
from typing import Any

import common

os.environ["HF_HUB_OFFLINE"] = "1"
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, DynamicCache


def load(options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()


def main() -> None:
    options = common.parse(__doc__.splitlines()[0])
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    with common.quiet_stdout() as output:
        plain = load(options)
        vocab = plain.config.vocab_size
        names = [path.name for path in options.adapters]
        # Left at PEFT's default, which holds the factors in float32: measured faster than bf16.
        wrapped = PeftModel.from_pretrained(load(options), options.adapters[0], names[0])
        for name, path in zip(names[1:], options.adapters[1:], strict=True):
            wrapped.load_adapter(path, name)
        wrapped.eval()
        wrapped.set_adapter(names[0])

        def measure(mode: str, batch: int) -> float:
            model, extra = wrapped, {}
            rows = common.row_adapters(mode, batch, names)
            if mode == "base":
                model = plain
            elif mode != "single":
                extra = {"adapter_names": [name or "__base__" for name in rows]}
            feed = torch.tensor(common.prompts(batch, options.prompt, vocab, options.seed))
            cache = DynamicCache()
            with torch.inference_mode():
                for step in range(options.new + 2):
                    if step == 2:  # after the prefill and one warm decode step
                        start = time.perf_counter()
                    logits = model(
                        input_ids=feed, past_key_values=cache, use_cache=True, **extra
                    ).logits
                    feed = logits[:, -1].argmax(-1, keepdim=True)
            return batch * options.new / (time.perf_counter() - start)

        rows = common.decode_rows(options, measure)
        common.report(
            output,
            "transformers+peft",
            "decode",
            ("transformers", "peft", "torch"),
            options,
            rows,
            dtype="bfloat16",
            attention=plain.config._attn_implementation,
        )


if __name__ == "__main__":
    main()
