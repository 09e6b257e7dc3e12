"""Decode speed of llama.cpp (f16) through its native server in the ``xllamacpp`` wheel.

    python bench/peers/llamacpp_decode.py --model DIR --adapters DIR...   (venv: xllamacpp, gguf)

The checkpoint and the adapters are converted to GGUF in a temporary directory first. One server
process with as many slots as the largest batch; each request names its adapters and their scales,
as the server's own API has it. Every prompt is sent once for one token first, so that its slot has
it cached and the timed requests decode only. Rate of a batch: all tokens decoded over the wall time
of all its requests, since slots with unlike adapters take turns rather than share a batch.
"""

from __future__ import annotations

import json
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common
import to_gguf
import xllamacpp


def serve(options: Any, folder: Path) -> Any:
    to_gguf.write_model(options.model, folder / "model.gguf")
    params = xllamacpp.CommonParams()
    params.model.path = str(folder / "model.gguf")
    adapters = []
    for i, path in enumerate(options.adapters):
        file = folder / f"adapter-{i}.gguf"
        to_gguf.write_adapter(path, options.model, file)
        adapters.append(xllamacpp.CommonAdapterLoraInfo(str(file), 1.0))
    params.lora_adapters = adapters
    params.lora_init_without_apply = True
    slots = max(options.batches)
    params.n_parallel = slots
    params.n_ctx = 256 * slots
    params.n_threads_http = slots + 2
    params.cpuparams.n_threads = options.threads
    params.cpuparams_batch.n_threads = options.threads
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    return xllamacpp.Server(params)


def main() -> None:
    options = common.parse(__doc__.splitlines()[0])
    vocab = json.loads((options.model / "config.json").read_text())["vocab_size"]
    names = [path.name for path in options.adapters]
    with common.quiet_stdout() as output, tempfile.TemporaryDirectory() as folder:
        server = serve(options, Path(folder))
        url = f"{server.listening_address}/completion"

        def ask(prompt: list[int], adapter: str | None, slot: int, new: int) -> dict[str, Any]:
            lora = [{"id": i, "scale": float(name == adapter)} for i, name in enumerate(names)]
            body = {
                "prompt": prompt,
                "n_predict": new,
                "temperature": 0.0,
                "ignore_eos": True,
                "cache_prompt": True,
                "id_slot": slot,
                "lora": lora,
            }
            request = urllib.request.Request(
                url, json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=300) as reply:
                timings: dict[str, Any] = json.load(reply)["timings"]
            return timings

        def measure(mode: str, batch: int) -> float:
            texts = common.prompts(batch, options.prompt, vocab, options.seed)
            rows = common.row_adapters(mode, batch, names)
            with ThreadPoolExecutor(batch) as pool:
                slots = range(batch)
                list(pool.map(ask, texts, rows, slots, [1] * batch))
                start = time.perf_counter()
                timings = list(pool.map(ask, texts, rows, slots, [options.new] * batch))
                seconds = time.perf_counter() - start
            return sum(t["predicted_n"] for t in timings) / seconds

        measure("base", 1)
        rows = common.decode_rows(options, measure)
        common.report(output, "llama.cpp", "decode", ("xllamacpp",), options, rows, dtype="float16")


if __name__ == "__main__":
    main()
