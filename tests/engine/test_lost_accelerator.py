"""A GPU whose context is lost while it serves: everybody is told by name, and the engine closes."""

from __future__ import annotations

import logging
from typing import Any

import anyio
import pytest

import rota
from rota.gpu.model import torch_runner
from rota.sched import lifecycle

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "max_loras": 2,
    "max_lora_rank": 16,
    "kv_bytes": 1 << 20,
    "max_running": 4,
}
LONG = rota.SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(
    "call",
    [
        "cuGraphLaunch",
        "cuEventSynchronize",
        "cuEventRecord",
        "cuMemcpyDtoHAsync",
        "cuLaunchKernelEx",
    ],
)
@pytest.mark.anyio
async def test_a_lost_context_ends_what_runs_by_name_and_lets_the_engine_close(
    llama: Any,
    cuda_machine: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
) -> None:
    if cuda_machine.fake is None:
        pytest.skip("loses a context on purpose; runs on the test driver")
    from rota.gpu.fakecuda.driver import Fault
    from rota.gpu.fakecuda.torch_queue import QueueSpace

    caplog.set_level(logging.CRITICAL, "rota")
    driver = cuda_machine.fake.reset()
    spaces: list[QueueSpace] = []

    def space_of(device: Any) -> QueueSpace:
        spaces.append(QueueSpace(device, driver))
        return spaces[-1]

    monkeypatch.setattr(lifecycle, "open_device", lambda spec: cuda_machine.open())
    monkeypatch.setattr(torch_runner, "open_space", space_of)
    codes: list[str] = []
    seen: list[int] = []

    async def request(engine: rota.Engine, adapter: str | None) -> None:
        try:
            async for event in engine.generate(llama.prompt("attn_mlp_r8"), adapter, LONG):
                seen.append(event.token_id or 0)
                if len(seen) == 8:  # all of them decode: the next call of this kind fails
                    nth = driver.calls[call] + 2
                    driver.faults[call, nth] = Fault(call, nth, 700)
        except rota.RotaError as error:
            codes.append(error.code)

    adapters = {"a": llama.adapter("attn_mlp_r8")}
    with anyio.fail_after(120):
        async with rota.Engine(llama.model, adapters, device="cuda", **SMALL) as engine:
            async with anyio.create_task_group() as tasks:
                for adapter in ("a", None, "a"):
                    tasks.start_soon(request, engine, adapter)
            assert codes == ["device-dead"] * 3 and 8 <= len(seen) < 3 * 40
            with pytest.raises(rota.RotaError) as caught:
                await engine.load("b", llama.adapter("rslora_r16_bf16"))
            assert caught.value.code == "device-dead"
            with pytest.raises(rota.RotaError) as caught:
                async for _ in engine.generate([1, 2], None, LONG):
                    pass
            assert caught.value.code == "device-dead"
            dead = engine.stats().dead
            assert dead is not None and dead.code == "device-dead"
            assert dead.found == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert [fault.function for fault in driver.fired] == [call]
    for space in spaces:
        space.close()
    assert driver.live() == {}, driver.story
