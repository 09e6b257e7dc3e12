"""A device whose every operation fails in turn: named, survived, and given back."""

from __future__ import annotations

import logging
import threading
from typing import Any

import anyio
import pytest

import rota
from rota.gpu.decorators import OPERATIONS, Fault, FaultyDevice
from rota.sched import lifecycle

from .asking import ids

pytestmark = pytest.mark.anyio

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "max_loras": 2,
    "max_lora_rank": 16,
    "kv_bytes": 1 << 22,
    "use_numba": False,
}


async def test_a_device_that_fails_anywhere_is_named_and_given_back(
    llama: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "rota")
    one, two = llama.adapter("attn_mlp_r8"), llama.adapter("rslora_r16_bf16")
    prompt, real = llama.prompt("attn_mlp_r8"), lifecycle.open_device

    async with rota.Engine(llama.model, {"one": one, "two": two}, **SMALL) as engine:
        right = [await ids(engine, prompt, name) for name in ("one", "two")]
    assert right[0] != right[1]

    async def story(faults: list[Fault]) -> tuple[FaultyDevice, list[str]]:
        devices: list[FaultyDevice] = []

        def opened(name: Any) -> FaultyDevice:
            devices.append(FaultyDevice(real(name), faults))
            return devices[0]

        monkeypatch.setattr(lifecycle, "open_device", opened)
        codes: list[str] = []
        try:
            async with rota.Engine(llama.model, {"a": one}, **SMALL) as engine:
                for call in (
                    lambda: ids(engine, prompt, "a", 4),
                    lambda: engine.replace("a", two),
                    lambda: engine.load("b", one),
                    lambda: engine.unload("b"),
                ):
                    try:
                        await call()
                    except rota.RotaError as error:
                        codes.append(error.code)
                tokens = await ids(engine, prompt, "a")
                assert tokens in right, "it goes on, with one version's weights or the other's"
        except rota.DeviceError as error:
            codes.append(error.code)
        return devices[0], codes

    clean, codes = await story([])
    assert codes == [] and clean.live_labels() == ()
    for op in OPERATIONS:
        calls = clean.calls(op)
        for nth in sorted({1, 2, calls // 2, calls - 1, calls} & set(range(1, calls + 1))):
            with anyio.fail_after(60):
                device, codes = await story([Fault(op, nth)])
            assert device.fired and device.live_labels() == (), (op, nth)
            # A load that failed leaves a name that unload does not know.
            assert set(codes) <= {"injected", "unknown-adapter"}, (op, nth, codes)
            assert not [t for t in threading.enumerate() if t.name == "rota-device"]
