"""Whatever memory the device will not take back, all the rest is offered to it."""

from __future__ import annotations

import pytest
import torch

from rota.errors import DeviceError
from rota.gpu.decorators import Fault, FaultyDevice
from rota.gpu.host import HostDevice
from rota.gpu.model.config import load_config
from rota.gpu.model.options import RunnerOptions
from rota.gpu.model.runner import Runner
from rota.gpu.model.torch_kv import TorchKv
from rota.gpu.model.torch_runner import TorchRunner
from rota.gpu.tensors import HostSpace

OPTIONS = RunnerOptions(
    dtype="float32", max_loras=1, max_lora_rank=8, num_blocks=8, max_step_tokens=32,
    max_sequences=2, spill_bytes=1 << 18,
)  # fmt: skip


def load(kind, data_dir, family, faults=()):
    checked = HostDevice(checked=True, allow_foreign=kind is TorchRunner)
    device = FaultyDevice(checked, list(faults))
    return kind.load(data_dir / "oracle" / family / "base", device, OPTIONS), device


@pytest.mark.parametrize("op", ["free", "pinned_free"])
@pytest.mark.parametrize("family", ["llama", "qwen35"])
@pytest.mark.parametrize("kind", [Runner, TorchRunner])
def test_one_refusal_keeps_nothing_else(kind, family, op, data_dir):
    runner, device = load(kind, data_dir, family)
    before = device.calls(op)
    runner.close()
    frees = device.calls(op) - before
    assert frees >= 3 or op == "pinned_free"
    for nth in range(1, frees + 1):
        runner, device = load(kind, data_dir, family, [Fault(op, before + nth)])
        with pytest.raises(DeviceError):
            runner.close()
        assert device.calls(op) - before == frees, nth
        runner.close()


def test_kv_memory_is_given_back_once(data_dir):
    device = HostDevice(checked=True, allow_foreign=True)
    config = load_config(data_dir / "oracle" / "llama" / "base")
    kv = TorchKv(device, HostSpace(device), config, torch.float32, 2)
    kv.close()
    kv.close()
    assert device.live_labels() == ()
    device.close()
