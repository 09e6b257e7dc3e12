"""Paged attention kernels of plain torch operations, to be called as the real ones are.

What they are: `Flash` has the arguments of ``aten::_flash_attention_forward`` and is registered
under it, so torch's own ``varlen_attn`` runs; `flashinfer_module` has wrappers of the names of
flashinfer-python, called as `flashinfer_calls` says of its newest version. Both read everything but
sizes on the device, as kernels do, and check what the real ones rely on. Invariants: NaN outside of
what a row may see stays there; nothing is read on the host while a capture records, except by
``plan``.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import numpy as np
import torch

from .flashinfer_calls import DECODE, NEWEST, PREFILL

PAGE = 16
GEOMETRIES = [
    (4, 2, 16, torch.float32),
    (9, 3, 64, torch.bfloat16),
    (2, 2, 8, torch.bfloat16),
    (16, 2, 32, torch.float32),
]
"""Heads, key heads, head dim and dtype of specs that every way serves."""


def paged_attention(q, k_pages, v_pages, pages, seen, rows, position, scale):
    """Attention of single queries over pages.

    Args:
        q: ``[tokens, heads, dim]``.
        k_pages, v_pages: ``[pages, page, kv_heads, dim]``.
        pages: int ``[rows, width]``, pages of each row. seen: int ``[rows]``, its keys.
        rows: int64 ``[tokens]``. position: int64 ``[tokens]``, of each query among the keys.
    """
    group = q.shape[1] // k_pages.shape[2]
    page = k_pages.shape[1]
    mine = pages.long().index_select(0, rows)
    at = torch.arange(pages.shape[1] * page, device=q.device)
    visible = (at <= position[:, None]) & (at < seen.long().index_select(0, rows)[:, None])

    def gathered(cache):
        # [tokens, keys, heads, dim], zeros where a token does not see: their contents may be NaN.
        found = cache.index_select(0, mine.flatten()).view(
            q.shape[0], -1, cache.shape[2], cache.shape[3]
        )
        found = torch.where(visible[:, :, None, None], found, torch.zeros_like(found)).float()
        return found.repeat_interleave(group, dim=2)

    keys, values = gathered(k_pages), gathered(v_pages)
    scores = torch.einsum("thd,tkhd->thk", q.float(), keys) * scale
    scores = scores.masked_fill(~visible[:, None, :], -torch.inf)
    out = torch.einsum("thk,tkhd->thd", scores.softmax(dim=-1), values)
    return out.to(q.dtype)


def _tokens(starts, seen, count):
    """Row and position of each query, of ``starts`` int32 ``[rows + 1]``; aligned to the end."""
    token = torch.arange(count, device=starts.device)
    rows = torch.searchsorted(starts[1:].contiguous(), token.to(torch.int32), right=True)
    first = seen - (starts[1:] - starts[:-1])
    return rows, token - starts.index_select(0, rows) + first.index_select(0, rows)


class Flash:
    """``aten::_flash_attention_forward`` on the CPU; ``calls`` counts, ``broken`` gives NaN."""

    def __init__(self):
        self.calls = 0
        self.broken = False

    def __call__(
        self,
        query,
        key,
        value,
        cum_seq_q,
        cum_seq_k,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        return_debug_mask,
        *,
        scale=None,
        window_size_left=None,
        window_size_right=None,
        seqused_k=None,
        alibi_slopes=None,
        block_table=None,
        num_splits=None,
    ):
        self.calls += 1
        assert cum_seq_k is None, "FlashAttention 3 takes no cum_seq_k beside a block table"
        assert alibi_slopes is None and dropout_p == 0 and not return_debug_mask
        assert is_causal and (window_size_left, window_size_right) == (-1, 0)
        for array in (cum_seq_q, seqused_k, block_table):
            assert array.dtype is torch.int32 and array.stride(-1) == 1
        assert len(cum_seq_q) == len(seqused_k) + 1 == len(block_table) + 1
        assert key.shape[1] == PAGE and key.is_contiguous() and value.is_contiguous()
        lengths = cum_seq_q.diff()
        assert int(cum_seq_q[0]) == 0 and int(cum_seq_q[-1]) == query.shape[0]
        assert int(lengths.max()) <= max_q and int(seqused_k.max()) <= max_k
        assert max_k <= block_table.shape[1] * PAGE
        assert 0 <= int(block_table.min()) <= int(block_table.max()) < key.shape[0]
        rows, position = _tokens(cum_seq_q, seqused_k, query.shape[0])
        out = paged_attention(query, key, value, block_table, seqused_k, rows, position, scale)
        if self.broken:
            out = out * torch.nan
        lse = query.new_zeros((query.shape[1], query.shape[0]), dtype=torch.float32)
        none = torch.zeros(2, dtype=torch.uint64)
        return out, lse, none, torch.zeros((), dtype=torch.uint64), query.new_empty(0)


class _Wrapper:
    """What both of flashinfer's wrappers do; ``kind`` is the name of the one it is."""

    kind = ""
    made = 0

    def __init__(self, *args, **more):
        given = self._given("__init__", args, more)
        workspace = given.float_workspace_buffer
        assert workspace.dtype is torch.uint8 and given.kv_layout == "NHD"
        assert given.backend == "auto" and given.jit_args is None
        # Page-locked memory of plans: reused by each, read by a copy that is only queued.
        self._pinned = None
        self.plans = self.runs = 0
        self._open(given)
        type(self).made += 1

    def _given(self, name, args, more):
        """Arguments by name, as flashinfer's own method takes them."""
        bound = NEWEST[self.kind, name].bind(*args, **more)
        bound.apply_defaults()
        return SimpleNamespace(**bound.arguments)

    def _plan(self, indptr, indices, last, dim, given):
        for array in (indptr, indices, last):
            assert array.dtype is torch.int32 and array.device.type == "cpu" and array.dim() == 1
        assert int(indptr[0].item()) == 0, "not while a graph is captured"
        host, page = last.numpy(), given.page_size
        assert len(indptr) == len(last) + 1 and int(indptr.numpy()[-1]) == len(indices)
        assert host.min() >= 1 and host.max() <= page == PAGE and (np.diff(indptr) >= 1).all()
        heads = given.num_qo_heads, given.num_kv_heads
        self._facts = (*heads, dim, given.sm_scale, given.q_data_type, given.kv_data_type)
        lens = (np.diff(indptr.numpy()) - 1) * page + host
        if self._pinned is None or len(self._pinned) != len(lens):
            self._pinned = torch.from_numpy(np.empty(len(lens), np.int32))
        self._pinned.numpy()[:] = lens
        self.plans += 1
        return lens

    def run(self, *args, **more):
        given = self._given("run", args, more)
        assert not given.args and not given.return_lse
        q = given.q
        heads, kv_heads, dim, scale, q_type, kv_type = self._facts
        keys, values = given.paged_kv_cache
        assert tuple(q.shape[1:]) == (heads, dim) and q.dtype is q_type and q.is_contiguous()
        for pages in (keys, values):
            assert tuple(pages.shape[1:]) == (PAGE, kv_heads, dim)
            assert pages.dtype is kv_type and pages.is_contiguous()
        self.runs += 1
        at = self._indptr[:-1, None].long() + torch.arange(self._width, device=q.device)
        # No page but the row's own is looked at, as behind them lies what other plans left.
        at = torch.minimum(at, self._indptr[1:, None].long() - 1)
        pages = self._indices.index_select(0, at.flatten())
        rows, position = _tokens(self._starts, self._seen, q.shape[0])
        pages = pages.view(-1, self._width)
        return paged_attention(q, keys, values, pages, self._seen, rows, position, scale)


class _Decode(_Wrapper):
    """Of a fixed number of rows, for graphs: its buffers are the caller's."""

    kind = DECODE

    def _open(self, given):
        assert given.use_cuda_graph
        self._indptr = given.paged_kv_indptr_buffer
        self._indices = given.paged_kv_indices_buffer
        self._last = given.paged_kv_last_page_len_buffer
        self._rows = len(self._last)
        assert len(self._indptr) == self._rows + 1
        self._width = len(self._indices) // self._rows
        self._seen = torch.zeros_like(self._last)
        self._starts = torch.arange(self._rows + 1, dtype=torch.int32, device=self._last.device)

    def plan(self, *args, **more):
        given = self._given("plan", args, more)
        assert not given.deprecated_positional_args
        assert set(given.kwargs) <= {"sm_scale", "q_data_type", "kv_data_type"}
        vars(given).update(given.kwargs)
        indptr, indices, last = given.indptr, given.indices, given.last_page_len
        assert len(last) == self._rows, "one wrapper serves one number of rows"
        self._plan(indptr, indices, last, given.head_dim, given)
        self._indptr.copy_(indptr, non_blocking=True)
        self._last.copy_(last, non_blocking=True)
        self._indices[: len(indices)].copy_(indices)
        self._seen.copy_(self._pinned, non_blocking=True)

    def run(self, q, *args, **more):
        assert q.shape[0] == self._rows
        return super().run(q, *args, **more)


class _Prefill(_Wrapper):
    """Of any rows, never in a graph."""

    kind = PREFILL

    def _open(self, given):
        assert not given.use_cuda_graph
        self._where = given.float_workspace_buffer.device

    def plan(self, *args, **more):
        given = self._given("plan", args, more)
        starts, indptr = given.qo_indptr, given.paged_kv_indptr
        indices, last = given.paged_kv_indices, given.paged_kv_last_page_len
        assert given.causal and starts.dtype is torch.int32 and starts.device.type == "cpu"
        lens = self._plan(indptr, indices, last, given.head_dim_qk, given)
        assert (np.diff(starts.numpy()) <= lens).all()
        self._width = int(np.diff(indptr.numpy()).max())
        self._starts = starts.to(self._where)
        self._indptr = indptr.to(self._where)
        self._indices = indices.to(self._where)
        self._seen = torch.empty_like(last, device=self._where)
        self._seen.copy_(self._pinned, non_blocking=True)


def flashinfer_module():
    """A module of that name's shape, to stand in ``sys.modules``."""
    made = ModuleType("flashinfer")
    for kind in (_Decode, _Prefill):
        setattr(made, kind.kind, type(kind.kind, (kind,), {"made": 0}))
    return made
