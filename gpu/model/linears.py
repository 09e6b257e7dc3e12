"""The base model's linear weights, read again from its checkpoint when an adapter needs them.

What it owns: one open file descriptor per checkpoint file. Serving keeps its weights packed for the
kernels; DoRA and trained biases need plain rows, rarely, on a staging worker. Invariants: what is
read is what was opened, also when the files are replaced meanwhile; a file cut short is a refusal,
never a crash; values are those the engine serves (rounded to its dtype).

Format: https://github.com/huggingface/safetensors (README, "Format").
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from ...errors import ModelError, StagingError
from ..lora.dims import EXPERT_MODULES, TOKEN_MODULES, LoraModule, ModelDims
from ..lora.fused import grouped_rows
from ..lora.keys import FUSED
from ..lora.overlay import token_rows
from .checkpoint import Checkpoint
from .hybrid_weights import text_name

_DTYPES: Final = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class BaseLinears:
    """Rows of the linear weights of ``model_dir``, as float32.

    Args:
        dtype: the engine's; values are rounded to it, as those in use were.
        dims: of the model; says how fused inputs of a delta net are grouped.

    Raises:
        ModelError: as `Checkpoint`.
    """

    def __init__(self, model_dir: Path, dtype: torch.dtype, dims: ModelDims) -> None:
        self._dtype = dtype
        self._grouped = grouped_rows(dims) if dims.gdn_groups else {}
        self._handles: list[int] = []
        # A descriptor closed under a read could by then be another file's.
        self._lock = threading.Lock()
        # Name -> (file, first byte, dtype, shape).
        self._places: dict[str, tuple[int, int, torch.dtype, tuple[int, ...]]] = {}
        with Checkpoint(model_dir) as checkpoint:
            homes = checkpoint.paths()
        try:
            for path in sorted(set(homes.values())):
                self._open(path, homes)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path, homes: dict[str, Path]) -> None:
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._handles.append(handle)
            length = int.from_bytes(os.pread(handle, 8, 0), "little")
            header: dict[str, Any] = json.loads(os.pread(handle, length, 8))
        except (OSError, ValueError) as error:  # Checkpoint accepted it a moment ago
            raise ModelError(
                f"a weight file cannot be read: {type(error).__name__}",
                code="unreadable-weights",
                subject=path.name,
            ) from error
        for name, entry in header.items():
            if homes.get(name) == path and entry["dtype"] in _DTYPES:
                begin = 8 + length + entry["data_offsets"][0]
                dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
                self._places[text_name(name)] = (handle, begin, dtype, shape)

    def rows(
        self, layer: int, module: LoraModule, start: int, stop: int, expert: int = 0
    ) -> npt.NDArray[np.float32]:
        """Rows ``start..stop`` of the module's weight ``[out, in]``; ``expert``: of a routed one.

        Raises:
            StagingError: base-weights-unreadable.
        """
        order = self._grouped.get(module)
        if order is not None:
            fused = next(leaf for (_, leaf), parts in FUSED.items() if module in parts)
            name = f"model.layers.{layer}.linear_attn.{fused}.weight"
            wanted = order[start:stop]
            runs = np.split(wanted, np.flatnonzero(np.diff(wanted) != 1) + 1)
            return np.concatenate([self._read(name, int(r[0]), int(r[-1]) + 1) for r in runs])
        if module in EXPERT_MODULES:
            return self._expert_rows(layer, module, start, stop, expert)
        return self._read(_name(layer, module) + ".weight", start, stop)

    def _expert_rows(
        self, layer: int, module: LoraModule, start: int, stop: int, expert: int
    ) -> npt.NDArray[np.float32]:
        """Of a checkpoint with experts one by one, or all in one tensor, gate before up."""
        at = f"model.layers.{layer}.mlp.experts."
        name = f"{at}{expert}.{module.leaf}.weight"
        if name in self._places:
            return self._read(name, start, stop)
        down = module is LoraModule.EXPERT_DOWN_PROJ
        name = at + ("down_proj" if down else "gate_up_proj")
        shape = self._places[name][3] if name in self._places else (0, 0)
        first = expert * shape[1]
        if module is LoraModule.EXPERT_UP_PROJ:
            first += shape[1] // 2
        return self._read(name, first + start, first + stop, flat=True)

    def bias(self, layer: int, module: LoraModule) -> npt.NDArray[np.float32] | None:
        """The module's bias ``[out]``, or ``None`` when it has none. Raises as `rows`."""
        name = _name(layer, module) + ".bias"
        place = self._places.get(name)
        return None if place is None else self._read(name, 0, place[3][0])

    def whole(self, name: str) -> npt.NDArray[np.float32]:
        """A whole tensor by its name in the checkpoint. Raises as `rows`."""
        place = self._places.get(name)
        return self._read(name, 0, 0 if place is None else place[3][0])

    def _read(
        self, name: str, start: int, stop: int, *, flat: bool = False
    ) -> npt.NDArray[np.float32]:
        """Rows of a tensor, seen as one of two dimensions with ``flat``."""
        place = self._places.get(name)
        if place is None:
            raise _unreadable("it is not at hand", name)
        handle, begin, dtype, shape = place
        shape = (-1, shape[-1]) if flat else shape
        width = dtype.itemsize * int(np.prod(shape[1:]))
        raw = bytearray((stop - start) * width)
        view, filled = memoryview(raw), 0
        while filled < len(raw):
            with self._lock:
                if handle not in self._handles:
                    raise _unreadable("its files are closed", name)
                try:
                    count = os.preadv(handle, [view[filled:]], begin + start * width + filled)
                except OSError as error:
                    raise _unreadable(str(error.strerror), name) from error
            if count == 0:
                raise _unreadable("the file was cut short", name)
            filled += count
        values = torch.frombuffer(raw, dtype=dtype).reshape(stop - start, *shape[1:])
        made: npt.NDArray[np.float32] = values.to(self._dtype).float().numpy()
        return made

    def close(self) -> None:
        """Close every file. Idempotent; a `rows` that comes later is refused."""
        with self._lock:
            while self._handles:
                os.close(self._handles.pop())


class CheckpointBase:
    """A base model for staging straight from its files, where no engine holds it.

    Implements `gpu.lora.overlay.BaseRows` for checkpoints of the llama family.
    """

    def __init__(self, linears: BaseLinears, dims: ModelDims) -> None:
        self._linears, self._dims = linears, dims
        self.bias = linears.bias

    def rows(
        self, layer: int, module: LoraModule, start: int, stop: int, expert: int = 0
    ) -> npt.NDArray[np.float32]:
        """See `BaseLinears.rows`, and `token_rows`."""
        if module in TOKEN_MODULES:
            return token_rows(self, module, start, stop)
        return self._linears.rows(layer, module, start, stop, expert)

    def embed(self) -> npt.NDArray[np.generic]:
        """``[vocab, hidden]``, float32."""
        return self._linears.whole("model.embed_tokens.weight")

    def head(self) -> npt.NDArray[np.generic]:
        """lm_head in the same form (the embedding itself when tied)."""
        return self.embed() if self._dims.tied else self._linears.whole("lm_head.weight")


def _name(layer: int, module: LoraModule) -> str:
    return f"model.layers.{layer}.{module.path}"


def _unreadable(why: str, name: str) -> StagingError:
    return StagingError(
        f"cannot read the base model's own weight: {why}",
        code="base-weights-unreadable",
        subject=name,
    )
