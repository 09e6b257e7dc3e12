"""The real engine over IPC: the oracle's answers, byte for byte, on both event loops."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

import rota
from rota.sched.inspect_adapter import add_inspect_parser, inspect
from rota.sched.ipc.server import IpcServer

pytestmark = pytest.mark.anyio
ORACLE = Path(__file__).resolve().parents[1] / "data" / "oracle" / "llama"
SMALL: dict[str, Any] = {"dtype": "float32", "max_lora_rank": 16, "kv_bytes": 1 << 22}


async def test_answers_over_ipc_are_the_oracles(tmp_path: Path) -> None:
    cases = json.loads((ORACLE / "ref.json").read_text())["cases"]
    folder = ORACLE / "adapters" / "rslora_r16_bf16"
    tensors = (folder / "adapter_model.safetensors").read_bytes()
    config = (folder / "adapter_config.json").read_bytes()
    got: dict[str, list[int]] = {}
    told = argparse.ArgumentParser()
    add_inspect_parser(told.add_subparsers())

    async def ask(engine: rota.Client, case: str, adapter: str | None) -> None:
        params = rota.SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2)
        events = [e async for e in engine.generate(cases[case]["ids"], adapter, params)]
        assert all(len(e.top_logprobs) == 2 and e.logprob is not None for e in events)
        assert len({e.adapter_id for e in events}) == 1
        got[case] = [e.token_id for e in events if e.token_id is not None]

    async with rota.Engine(ORACLE / "base", **SMALL) as real, anyio.create_task_group() as serving:
        where = await serving.start(IpcServer(real).serve, str(tmp_path / "rota.sock"))
        async with rota.connect(where) as engine:
            by_path = await engine.load("attn_mlp_r8", ORACLE / "adapters" / "attn_mlp_r8")
            assert by_path.report is not None and by_path.report.pairs > 0
            await engine.load("rslora_r16_bf16", (tensors, config))
            # What `rota inspect --json` says of the files, whichever way they came.
            seen = await engine.staged("rslora_r16_bf16")
            assert seen == real.staged("rslora_r16_bf16") and seen is not None
            _, facts = inspect(
                told.parse_args(["inspect", str(folder), "--model", str(ORACLE / "base")])
            )
            report = json.loads(msgspec.json.encode(seen.report))
            for row in facts["modules"]:
                del row["norm"]
            facts = json.loads(msgspec.json.encode(facts))
            assert seen.digest == facts["digest"]
            for same in ("modules", "ignored", "notes", "ranks", "scales", "by_module", "tensors"):
                assert report[same] == facts[same], same
            assert report["file_bytes"] == facts["file_bytes"]
            assert report["slot_bytes"] > 0 and {m["module"] for m in report["modules"]}
            assert await engine.staged("nobody") is None
            await engine.register("late", ORACLE / "adapters" / "attn_mlp_r8")
            assert await engine.staged("late") is None
            await engine.promote("late")
            assert (again := await engine.staged("late")) is not None
            # It was staged just now.
            assert again.digest == real.staged("attn_mlp_r8").digest  # type: ignore[union-attr]
            await engine.unload("late")
            await engine.register("late", folder)
            assert await engine.staged("late") is None  # nothing is told of other bytes
            await engine.unload("late")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask, engine, "base", None)
                for name in ("attn_mlp_r8", "rslora_r16_bf16"):
                    tasks.start_soon(ask, engine, name, name)
            assert engine.info.family == "llama" and engine.info.eos_ids == real.info.eos_ids
            with pytest.raises(rota.RequestError) as caught:
                await engine.chat_prompt([{"role": "user", "content": "hi"}])
            assert caught.value.code in ("no-tokenizer", "no-chat-template")
        serving.cancel_scope.cancel()
    for case, tokens in got.items():
        assert tokens == cases[case]["greedy_f32"], case
