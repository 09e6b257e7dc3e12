"""Torch on the test driver: CPU tensors whose operations wait in the driver's streams.

What it is: the `gpu.tensors.TensorSpace` of the test driver. Inside `computing` every torch
operation is queued on the stream instead of being done, between kernels and copies in call order,
and is recorded when the stream captures: so a captured decode step of torch operations and LoRA
kernels replays as one on a GPU does. It owns the memory of what operations return.

Invariants: results lie in the driver's arena, where kernels may read them, and hold NaN (or a
large number) until the stream gets there; views alias at once; reading a value on the host, or an
operation whose shape follows from values, is refused while a capture records.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch._C import _len_torch_dispatch_stack
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from ...errors import DeviceError
from ..cuda import CudaDevice
from ..device import Stream
from ..kernels.memory import view_at
from .driver import FakeDriver
from .queue_model import Work

VALUES: Final = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "item")
"""Operations that need values on the host."""


class QueueSpace:
    """See `gpu.tensors.TensorSpace`.

    Args:
        device: a `CudaDevice` on the test driver.
        driver: the fake machine behind it.
    """

    captures = True
    grouped = True

    def __init__(self, device: CudaDevice, driver: FakeDriver) -> None:
        self._device, self._driver = device, driver
        self.torch_device = torch.device("cpu")
        self._taken: list[int] = []
        self.recorded = 0
        """Torch operations that captures recorded."""

    def view(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The driver's memory is the process's own."""
        return view_at(address, shape, dtype)

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in the driver's memory."""
        return self.fresh(tensor)

    def fresh(self, like: torch.Tensor, *, blank: bool = False) -> torch.Tensor:
        """A tensor of the same shape, dtype and strides in the arena; ``blank`` without values."""
        span = 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True))
        nbytes = max(span * like.element_size(), 1) if like.numel() else 1
        found = self._driver.arena.alloc(nbytes, "device")
        assert found is not None
        self._taken.append(found.start)
        if not like.numel():
            return torch.empty_like(like)
        # Bools of all ones are no bools.
        if like.dtype is torch.bool:
            ctypes.memset(found.start, 0, nbytes)
        raw = (ctypes.c_char * nbytes).from_address(found.start)
        flat = torch.frombuffer(raw, dtype=like.dtype, count=span)
        made = flat.as_strided(like.shape, like.stride())
        if not blank:
            made.copy_(like)
        return made

    @contextmanager
    def computing(self, stream: Stream) -> Iterator[None]:
        """Queue what torch does in here."""
        with _Queue(self, self._driver, self._device.stream_handle(stream)):
            yield

    def join(self, stream: Stream) -> None:
        """Nothing: one queue holds both."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """The arena's memory never moves."""
        yield

    def forget(self) -> None:
        """Nothing is kept apart."""

    def close(self) -> None:
        """Give the memory of all results back."""
        while self._taken:
            self._driver.arena.free(self._taken.pop(), "device")


class _Queue(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch ships no types for it
    """Queues torch operations on one stream."""

    def __init__(self, space: QueueSpace, driver: FakeDriver, handle: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch ships no types for it
        self._space, self._driver, self._handle = space, driver, handle

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        stream = self._driver.streams[self._handle]
        name = func.overloadpacket.__name__
        if name in VALUES:
            if stream.capture is not None:
                stream.capture.invalid = True
                raise DeviceError(
                    f"torch needs values on the host: {name}", code="capture-violation"
                )
            self._driver.finish(stream)
            return func(*args, **kwargs)
        if _is_composite(func):  # only calls others, and may alias or copy: taken apart
            with self:
                return func.decompose(*args, **kwargs)
        schema = func._schema
        writes = [
            (args[at] if at < len(args) else kwargs[given.name])
            for at, given in enumerate(schema.arguments)
            if given.alias_info is not None and given.alias_info.is_write
        ]
        if not writes and any(r.alias_info is not None for r in schema.returns):
            return func(*args, **kwargs)  # a view, made at once
        if writes:
            self._queue(stream, name, lambda: func(*args, **kwargs))
            return writes[0] if len(writes) == 1 else tuple(writes)
        named = tuple((key, _facts(value)) for key, value in kwargs.items())
        made = tree_map(self._place, _shaped(func, _facts(args), named))

        def run() -> None:
            tree_map(_land, made, func(*args, **kwargs))

        self._queue(stream, name, run)
        return made

    def _place(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._space.fresh(value, blank=True)
        return value

    def _queue(self, stream: Any, name: str, run: Any) -> None:
        def quiet() -> None:
            # The stream may run inside `computing`, where this would be queued again.
            modes = _disable_current_modes() if _len_torch_dispatch_stack() else nullcontext()
            with modes, torch.inference_mode():
                run()

        if stream.capture is not None:
            self._space.recorded += 1
        self._driver.submit(stream, Work("torch", name, quiet))


@cache
def _is_composite(func: Any) -> bool:
    """True if the operation is nothing but calls of others; see `OpOverload.decompose`."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    has_kernel: bool = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)
    return has_kernel or key in func.py_kernels


class _Like(NamedTuple):
    """A tensor without its values."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


class _Exactly(NamedTuple):
    """Another argument; with its type, as 1, 1.0 and True are equal and give other results."""

    kind: type
    value: Any


def _facts(value: Any) -> Any:
    """What the shape of a result follows from: inputs still queued may hold anything, indices
    too."""
    if isinstance(value, torch.Tensor):
        return _Like(value.shape, value.stride(), value.dtype)
    if type(value) in (list, tuple):
        return tuple(map(_facts, value))
    return _Exactly(type(value), value)


@lru_cache(maxsize=4096)
def _shaped(func: Any, args: Any, kwargs: Any) -> Any:
    """The result without values, of arguments as `_facts` gives them."""

    def empty(fact: Any) -> Any:
        if isinstance(fact, _Like):
            return torch.empty_strided(fact.shape, fact.strides, dtype=fact.dtype, device="meta")
        if isinstance(fact, _Exactly):
            return torch.device("meta") if fact.kind is torch.device else fact.value
        return [empty(part) for part in fact]

    return func(*map(empty, args), **{name: empty(fact) for name, fact in kwargs})


def _land(target: Any, value: Any) -> Any:
    if isinstance(target, torch.Tensor) and target.numel():
        target.copy_(value)
    return target
