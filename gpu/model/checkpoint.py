"""The safetensors files of a checkpoint, opened and checked by name.

What it owns: the open files while weights load. Invariants: a tensor is read only after its shape
and dtype were checked; an index cannot name a file outside the checkpoint's folder; nothing stays
mapped after `close`.

Format: https://huggingface.co/docs/safetensors (files) and ``model.safetensors.index.json`` as
transformers writes it (``weight_map``: tensor name -> file name).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch
from safetensors import SafetensorError, safe_open

from ...errors import ModelError
from .jsonfile import read_json_object

FILE_NAME: Final = "model.safetensors"
INDEX_NAME: Final = "model.safetensors.index.json"
MAX_SHARDS: Final = 1024
MAX_TENSORS: Final = 1 << 18
_DTYPES: Final = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class Checkpoint:
    """Every tensor of ``model_dir`` by its name. A context manager.

    Raises:
        ModelError: no-weights, unreadable-weights (truncated, not safetensors), bad-weight-index.
    """

    def __init__(self, model_dir: Path) -> None:
        self._files = ExitStack()
        self._homes: dict[str, Any] = {}
        self._paths: dict[str, Path] = {}
        # Name in its file, where `rename` gave it another.
        self._given: dict[str, str] = {}
        try:
            self._open(model_dir)
        except BaseException:
            self.close()
            raise

    def _open(self, model_dir: Path) -> None:
        if (model_dir / FILE_NAME).exists():
            handle = self._open_file(model_dir / FILE_NAME)
            self._homes = dict.fromkeys(handle.keys(), handle)
            self._paths = dict.fromkeys(self._homes, model_dir / FILE_NAME)
            return
        index = model_dir / INDEX_NAME
        if not index.exists():
            raise ModelError(
                "no safetensors weights in the model folder",
                code="no-weights",
                expected=f"{FILE_NAME} or {INDEX_NAME}",
            )
        weight_map = read_json_object(index, code="bad-weight-index").get("weight_map")
        if not isinstance(weight_map, dict) or len(weight_map) > MAX_TENSORS:
            raise ModelError(
                "the weight index has no usable weight_map",
                code="bad-weight-index",
                subject=INDEX_NAME,
                expected=f"an object of at most {MAX_TENSORS} names",
            )
        names = sorted({str(name) for name in weight_map.values()})
        if len(names) > MAX_SHARDS:
            raise ModelError(
                "too many shards",
                code="bad-weight-index",
                subject=INDEX_NAME,
                expected=f"at most {MAX_SHARDS}",
                found=len(names),
            )
        handles = {}
        for name in names:
            if not name.endswith(".safetensors") or Path(name).name != name or "\\" in name:
                raise ModelError(
                    "a shard is not a safetensors file of the model folder",
                    code="bad-weight-index",
                    subject=name[:200],
                )
            handles[name] = self._open_file(model_dir / name)
        held = {name: set(handle.keys()) for name, handle in handles.items()}
        for tensor, file in weight_map.items():
            if tensor not in held[file]:
                raise ModelError(
                    "the index names a tensor its shard does not hold",
                    code="bad-weight-index",
                    subject=tensor[:200],
                    expected=file,
                )
            self._homes[tensor] = handles[file]
            self._paths[tensor] = model_dir / file

    def _open_file(self, path: Path) -> Any:
        try:
            return self._files.enter_context(safe_open(str(path), framework="pt", device="cpu"))
        except (OSError, SafetensorError, ValueError) as error:
            raise ModelError(
                f"a weight file cannot be read: {str(error)[:200]}",
                code="unreadable-weights",
                subject=path.name,
            ) from error

    def rename(self, rule: Callable[[str], str]) -> None:
        """Know every tensor by ``rule`` of its name from here on.

        Raises:
            ModelError: two-names, when two tensors would have one name.
        """
        homes, given = dict[str, Any](), dict[str, str]()
        for name, home in self._homes.items():
            made = rule(name)
            if made in homes:
                raise ModelError(
                    "two tensors of the checkpoint stand for one",
                    code="two-names",
                    subject=made[:200],
                    found=f"{given[made][:200]} and {name[:200]}",
                )
            homes[made], given[made] = home, name
        self._homes, self._given = homes, given

    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._homes)

    def paths(self) -> dict[str, Path]:
        """The file of every tensor, by its name."""
        return dict(self._paths)

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor. Raises ModelError missing-tensor, wrong-dtype."""
        found = self._slice(name).get_dtype()
        if found not in _DTYPES:
            raise ModelError(
                "a weight has a dtype that is not served",
                code="wrong-dtype",
                subject=name,
                expected=" or ".join(_DTYPES),
                found=found,
            )
        return _DTYPES[found]

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Check presence, dtype and shape. Raises ModelError missing-tensor, wrong-*."""
        self.dtype(name)
        found = tuple(self._slice(name).get_shape())
        if found != shape:
            raise ModelError(
                "a weight has the wrong shape",
                code="wrong-shape",
                subject=name,
                expected=list(shape),
                found=list(found),
            )

    def read(self, name: str) -> torch.Tensor:
        """The tensor, over the mapped file: copy it before `close`."""
        tensor: torch.Tensor = self._homes[name].get_tensor(self._given.get(name, name))
        return tensor

    def _slice(self, name: str) -> Any:
        home = self._homes.get(name)
        if home is None:
            raise ModelError("a weight is missing", code="missing-tensor", subject=name)
        return home.get_slice(self._given.get(name, name))

    def close(self) -> None:
        """Close every file."""
        self._homes = {}
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
