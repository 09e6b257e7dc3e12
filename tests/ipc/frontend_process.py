"""A frontend in a process of its own that keeps many requests running; run by tests."""

from __future__ import annotations

import sys

import anyio

import rota


async def main(address: str) -> None:
    async with rota.connect(address) as engine:
        params = rota.SamplingParams(max_tokens=2000)
        streams = [engine.generate([1], None, params) for _ in range(16)]
        for stream in streams:
            await stream.__anext__()
        print("ready", flush=True)
        await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(main, sys.argv[1])
