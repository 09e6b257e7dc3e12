"""The CUDA tensor space as far as it shows without a GPU: names, memory, order of calls."""

from __future__ import annotations

import contextlib
import inspect

import numpy as np
import pytest
import torch

from rota.errors import DeviceError
from rota.gpu import cuda_tensors
from rota.gpu.cuda_tensors import TYPES, CudaSpace, why_no_torch_cuda
from rota.gpu.host import HostDevice
from rota.gpu.tensors import HostSpace, open_space


def parameters(function):
    return list(inspect.signature(function).parameters)


def test_this_torch_has_what_is_called_by_these_names():
    assert parameters(torch.cuda.ExternalStream.__new__)[1:3] == ["stream_ptr", "device"]
    assert parameters(torch.cuda.stream) == ["stream"]
    assert parameters(torch.cuda.use_mem_pool) == ["pool", "device"]
    required = [
        p
        for p in inspect.signature(torch.cuda.MemPool.__init__).parameters.values()
        if p.default is p.empty
    ]
    assert [p.name for p in required] == ["self"]


@pytest.mark.parametrize("dtype", list(TYPES))
def test_the_interface_describes_memory_as_the_types_mean_it(dtype):
    source = torch.arange(6).to(dtype)
    kind, seen_as = TYPES[dtype]
    made = cuda_tensors._Memory(source.data_ptr(), (2, 3), kind)
    found = made.__cuda_array_interface__
    assert found["version"] == 3 and found["data"] == (source.data_ptr(), False)

    class OnHost:
        __array_interface__ = found

    tensor = torch.from_numpy(np.asarray(OnHost()))
    tensor = tensor if seen_as is None else tensor.view(seen_as)
    assert tensor.dtype is dtype and torch.equal(tensor, source.view(2, 3))


def test_without_cuda_in_torch_the_space_is_refused_by_name():
    if why_no_torch_cuda() is None:
        pytest.skip("this torch has CUDA and a device")
    device = HostDevice()
    with pytest.raises(DeviceError) as caught:
        CudaSpace(device)
    assert caught.value.code == "cuda-unavailable" and "torch" in caught.value.message
    assert isinstance(open_space(device), HostSpace)
    device.close()


def test_streams_and_pools_are_made_once_and_used_in_order(cuda_machine, driver, monkeypatch):
    if driver is None:
        pytest.skip("looks at the calls on the test driver")
    calls = []

    def noting(name):
        @contextlib.contextmanager
        def context(*args, **keywords):
            calls.append((f"+{name}", args, keywords))
            yield
            calls.append((f"-{name}", args, keywords))

        return context

    made = []

    def maker(name):
        def make(*args, **keywords):
            made.append((name, args, keywords))
            return f"{name} {len(made)}"

        return make

    monkeypatch.setattr(cuda_tensors, "why_no_torch_cuda", lambda: None)
    monkeypatch.setattr(torch.cuda, "ExternalStream", maker("stream"))
    monkeypatch.setattr(torch.cuda, "MemPool", maker("pool"))
    monkeypatch.setattr(torch.cuda, "stream", noting("stream"))
    monkeypatch.setattr(torch.cuda, "use_mem_pool", noting("pool"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    device = cuda_machine.open(checked=True)
    stream = device.create_stream(label="s")
    space = CudaSpace(device)
    for _ in range(2):
        with space.computing(stream), space.recording():
            space.join(stream)
    gpu = torch.device("cuda:0")
    assert space.torch_device == gpu and space.captures and not space.grouped
    assert made == [
        ("stream", (device.stream_handle(stream),), {"device": gpu}),
        ("pool", (), {}),
    ]
    once = [
        ("+stream", ("stream 1",), {}),
        ("+pool", ("pool 2",), {"device": gpu}),
        ("-pool", ("pool 2",), {"device": gpu}),
        ("-stream", ("stream 1",), {}),
    ]
    assert calls == 2 * once
    space.forget()
    with space.recording():
        pass
    assert made[-1][0] == "pool" and len(made) == 3  # the old pool went with its graphs
    device.destroy_stream(stream)
    device.close()
