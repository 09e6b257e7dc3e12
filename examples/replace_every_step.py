"""Reinforcement learning in miniature: roll out, learn, replace the adapter; every step.

    python examples/replace_every_step.py MODEL DIR

The new weights go in as bytes, without a file. Rollouts that still run finish on the version they
began with (their events carry its ``adapter_id``), new ones use the new version, and nobody waits.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import anyio
import safetensors.torch
import torch

import rota

PROMPTS = ("Once upon a time", "The answer is", "In short,", "My favourite")


def learn(weights: dict[str, Any], step: int) -> dict[str, Any]:
    """Stands for an optimizer: a small, repeatable change to every B matrix."""
    draws = torch.Generator().manual_seed(step)

    def changed(name: str, tensor: Any) -> Any:
        if "lora_B" not in name:
            return tensor
        noise = torch.randn(tensor.shape, generator=draws, dtype=torch.float32)
        return (tensor.float() + 0.02 * noise).to(tensor.dtype)

    return {name: changed(name, tensor) for name, tensor in weights.items()}


async def rollout(engine: rota.Engine, prompt: str, out: list[int]) -> None:
    params = rota.SamplingParams(max_tokens=24, temperature=1.0, seed=7, ignore_eos=True)
    versions = {event.adapter_id async for event in engine.generate(prompt, "policy", params)}
    assert len(versions) == 1, "one rollout, one policy"
    out.extend(versions)


async def main(model: str, adapter: str, steps: int = 5, **options: Any) -> list[int]:
    """Returns the adapter_id of every rollout, in the order they ended."""
    folder = anyio.Path(adapter)
    config = await (folder / "adapter_config.json").read_bytes()
    weights = safetensors.torch.load(await (folder / "adapter_model.safetensors").read_bytes())
    seen: list[int] = []
    async with rota.Engine(model, {"policy": adapter}, pin_adapters=False, **options) as engine:
        async with anyio.create_task_group() as tasks:
            for step in range(steps):
                for prompt in PROMPTS:
                    tasks.start_soon(rollout, engine, prompt, seen)
                await anyio.lowlevel.checkpoint()  # the rollouts of this step are submitted
                weights = learn(weights, step)
                data = safetensors.torch.save(weights)
                reply = await engine.replace("policy", (data, config))
                print(f"step {step}: generation {reply.generation} in {reply.seconds * 1e3:.1f} ms")
    assert len(seen) == steps * len(PROMPTS)
    return seen


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], str(Path(sys.argv[2])))
