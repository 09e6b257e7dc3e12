"""Which device an engine ends up on, and what it says."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import rota
from rota.errors import DeviceError
from rota.gpu.device import open_device
from rota.gpu.host import HostDevice
from rota.sched import lifecycle

SMALL: dict[str, Any] = {"max_loras": 2, "max_lora_rank": 16, "kv_bytes": 1 << 20}


class Far(HostDevice):
    """A device whose memory the CPU may not read."""

    host_addressable = False


def far_first(opened: list[Any]) -> Any:
    def choose(spec: Any) -> Any:
        opened.append(HostDevice() if spec == "cpu" else Far())
        return opened[-1]

    return choose


def test_auto_says_once_why_the_host_serves(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rota.gpu.device")
    open_device("auto").close()
    lines = [r.getMessage() for r in caplog.records if r.name == "rota.gpu.device"]
    assert len(lines) == 1 and lines[0].startswith("the host serves, no CUDA device can be used: ")


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.anyio
async def test_a_torch_without_cuda_is_named_and_the_device_given_back(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(lifecycle, "open_device", far_first(opened))
    with pytest.raises(DeviceError) as caught:
        async with rota.Engine(llama.model, device="cuda", **SMALL):
            pass
    assert caught.value.code == "cuda-unavailable"
    assert "torch" in caught.value.message or "not a CUDA device" in caught.value.message
    assert [device.live_labels() for device in opened] == [()]
    with pytest.raises(DeviceError) as closed:
        opened[0].create_stream()
    assert closed.value.code == "device-closed"
