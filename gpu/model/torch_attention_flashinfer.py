"""Attention by flashinfer's paged kernels (the extra ``flashinfer``).

What it owns: flashinfer's wrappers, their workspaces, and the arrays its kernels find the pages
in. Invariants: a wrapper of decode steps serves one number of rows, and its arrays never move, so
graphs may hold them; `plan` runs ahead of every decode step and never inside a capture; a wrapper
plans again only when its last plan has left its page-locked memory.

Source: ``flashinfer/decode.py`` and ``prefill.py`` of flashinfer-python 0.7.4. ``plan`` takes host
arrays: ``indptr`` int32 ``[rows + 1]`` into ``indices`` (pages, in order), ``last_page_len`` in
1..page_size; NHD is ``[pages, page_size, kv_heads, head_dim]``; causal masks are aligned to the
last key; with ``use_cuda_graph`` what `run` reads lies in the given buffers and a workspace of the
wrapper's, both rewritten by ``plan``.
"""

from __future__ import annotations

import importlib
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from ..device import Event
from ..kernels.rope import BLOCK_TOKENS
from .torch_attention import AttentionSpec, paged
from .torch_ops import Attend
from .torch_rows import HostRows, MixedRows

WORKSPACE_BYTES: Final = 128 << 20
"""Of partial results, shared by all wrappers: their steps follow each other on one stream."""
TENSOR_CORE_GROUP: Final = 4
"""Query heads a key head from which the kernels on tensor cores are the faster ones."""


@dataclass(frozen=True, slots=True)
class Pages:
    """The pages of some rows, on the host: what ``plan`` takes.

    Attributes:
        indptr: int32 ``[rows + 1]``. indices: int32 ``[indptr[-1]]``.
        last: int32 ``[rows]``, cells used of each row's last page.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    last: torch.Tensor

    @classmethod
    def of(cls, host: HostRows) -> Pages:
        """The pages of ``host``'s rows; copies."""
        used = -(-host.lens // BLOCK_TOKENS)
        indptr = np.zeros(len(used) + 1, np.int32)
        np.cumsum(used, out=indptr[1:])
        width = int(used.max())
        mine = np.arange(width) < used[:, None]
        last = host.lens - (used - 1) * BLOCK_TOKENS
        arrays = (indptr, host.tables[:, :width][mine], last.astype(np.int32))
        return cls(*(torch.from_numpy(array) for array in arrays))


class _Planned:
    """A wrapper, and when it may plan again: its plans leave from memory it reuses."""

    def __init__(self, spec: AttentionSpec, wrapper: Any) -> None:
        self._spec, self.wrapper = spec, wrapper
        self._left: Event = spec.device.create_event(label="attention plan")
        self._begun = False

    def plan(self, *arrays: torch.Tensor, **more: object) -> None:
        spec = self._spec
        if self._begun:
            spec.device.synchronize_event(self._left)
        self.wrapper.plan(
            *arrays,
            spec.heads,
            spec.kv_heads,
            spec.head_dim,
            BLOCK_TOKENS,
            sm_scale=spec.scale,
            q_data_type=spec.dtype,
            kv_data_type=spec.dtype,
            **more,
        )
        spec.device.record_event(self._left, spec.stream)
        self._begun = True

    def run(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.wrapper.run(q, (paged(keys), paged(values)))
        return out.reshape(q.shape[0], self._spec.width)

    def close(self) -> None:
        self._spec.device.destroy_event(self._left)


class FlashInferAttention:
    """See `gpu.model.torch_attention.Attention`.

    Raises:
        ImportError: the extra is not installed, or something it needs is not.
    """

    name = "flashinfer"
    spans = False

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self._api: Any = importlib.import_module("flashinfer")
        self._decodes: dict[int, _Planned] = {}
        self._prefill: _Planned | None = None
        self._workspace = torch.zeros(
            WORKSPACE_BYTES, dtype=torch.uint8, device=spec.space.torch_device
        )

    def plan(self, host: HostRows) -> None:
        """Tell the kernels of as many rows which pages they read."""
        pages, rows = Pages.of(host), len(host.lens)
        planned = self._decodes.get(rows)
        if planned is None:
            planned = self._decodes[rows] = self._of_rows(rows)
        planned.plan(pages.indptr, pages.indices, pages.last)

    def decode(self, tables: torch.Tensor, lens: torch.Tensor, zero: int) -> Attend:
        """See `Attention.decode`; the arrays are those that `plan` filled."""
        return self._decodes[tables.shape[0]].run

    def mixed(self, rows: MixedRows, zero: int) -> Attend:
        """See `Attention.mixed`: one call for all rows."""
        if self._prefill is None:
            made = self._api.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
            self._prefill = _Planned(self._spec, made)
        starts = np.zeros(len(rows.kinds.lengths) + 1, np.int32)
        np.cumsum(rows.kinds.lengths, out=starts[1:])
        pages = Pages.of(rows.host)
        self._prefill.plan(
            torch.from_numpy(starts), pages.indptr, pages.indices, pages.last, causal=True
        )
        return self._prefill.run

    def close(self) -> None:
        """Destroy the events; the memory is torch's."""
        with ExitStack() as stack:
            for planned in (*self._decodes.values(), self._prefill):
                if planned is not None:
                    stack.callback(planned.close)
            self._decodes, self._prefill = {}, None

    def _of_rows(self, rows: int) -> _Planned:
        spec = self._spec

        def array(length: int) -> torch.Tensor:
            return torch.zeros(length, dtype=torch.int32, device=spec.space.torch_device)

        made = self._api.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=spec.heads // spec.kv_heads >= TENSOR_CORE_GROUP,
            paged_kv_indptr_buffer=array(rows + 1),
            paged_kv_indices_buffer=array(rows * spec.blocks),
            paged_kv_last_page_len_buffer=array(rows),
        )
        return _Planned(spec, made)
