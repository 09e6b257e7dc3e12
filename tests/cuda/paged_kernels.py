"""Paged attention kernels of plain torch operations, to be called as the real ones are.

What they are: `flash` has the arguments of ``aten::_flash_attention_forward`` and is registered
under it, so torch's own ``varlen_attn`` runs; `flashinfer` has the names and signatures of
flashinfer-python 0.7.4 (``flashinfer/decode.py`` and ``prefill.py``; 0.6.0 has those used here
too). Both read everything but sizes on the device, as kernels do, and check what the real ones
rely on. Invariants: NaN outside of what a row may see stays there; nothing is read on the host
while a capture records, except by ``plan``.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np
import torch

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
    """What both of flashinfer's wrappers do."""

    def _start(self, workspace, layout):
        assert workspace.dtype is torch.uint8 and layout == "NHD"
        # Page-locked memory of plans: reused by each, read by a copy that is only queued.
        self._pinned = None
        self.plans = self.runs = 0

    def _plan(self, indptr, indices, last, heads, kv_heads, dim, page, scale, q_type, kv_type):
        for array in (indptr, indices, last):
            assert array.dtype is torch.int32 and array.device.type == "cpu" and array.dim() == 1
        assert int(indptr[0].item()) == 0, "not while a graph is captured"
        host = last.numpy()
        assert len(indptr) == len(last) + 1 and int(indptr.numpy()[-1]) == len(indices)
        assert host.min() >= 1 and host.max() <= page == PAGE and (np.diff(indptr) >= 1).all()
        self._facts = (heads, kv_heads, dim, scale, q_type, kv_type)
        lens = (np.diff(indptr.numpy()) - 1) * page + host
        if self._pinned is None or len(self._pinned) != len(lens):
            self._pinned = torch.from_numpy(np.empty(len(lens), np.int32))
        self._pinned.numpy()[:] = lens
        self.plans += 1
        return lens

    def _run(self, q, cache, indptr, indices, seen, starts, width):
        heads, kv_heads, dim, scale, q_type, kv_type = self._facts
        keys, values = cache
        assert tuple(q.shape[1:]) == (heads, dim) and q.dtype is q_type and q.is_contiguous()
        for pages in (keys, values):
            assert tuple(pages.shape[1:]) == (PAGE, kv_heads, dim)
            assert pages.dtype is kv_type and pages.is_contiguous()
        self.runs += 1
        at = indptr[:-1, None].long() + torch.arange(width, device=q.device)
        # No page but the row's own is looked at, as behind them lies what other plans left.
        at = torch.minimum(at, indptr[1:, None].long() - 1)
        pages = indices.index_select(0, at.flatten())
        rows, position = _tokens(starts, seen, q.shape[0])
        pages = pages.view(-1, width)
        return paged_attention(q, keys, values, pages, seen, rows, position, scale)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """See the module."""

    made = 0

    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
    ):
        self._start(float_workspace_buffer, kv_layout)
        assert use_cuda_graph and backend == "auto" and jit_args is None
        self._indptr, self._indices = paged_kv_indptr_buffer, paged_kv_indices_buffer
        self._last = paged_kv_last_page_len_buffer
        self._rows = len(self._last)
        assert len(self._indptr) == self._rows + 1
        self._seen = torch.zeros_like(self._last)
        self._starts = torch.arange(self._rows + 1, dtype=torch.int32, device=self._last.device)
        type(self).made += 1

    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *deprecated_positional_args,
        **kwargs,
    ):
        assert not deprecated_positional_args
        assert set(kwargs) <= {"sm_scale", "q_data_type", "kv_data_type"}
        assert len(last_page_len) == self._rows, "one wrapper serves one number of rows"
        self._plan(
            indptr,
            indices,
            last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            kwargs["sm_scale"],
            kwargs["q_data_type"],
            kwargs["kv_data_type"],
        )
        self._indptr.copy_(indptr, non_blocking=True)
        self._last.copy_(last_page_len, non_blocking=True)
        self._indices[: len(indices)].copy_(indices)
        self._seen.copy_(self._pinned, non_blocking=True)

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        enable_pdl=None,
        window_left=None,
        sinks=None,
        q_len_per_req=None,
        skip_softmax_threshold_scale_factor=None,
        kv_cache_sf=None,
    ):
        assert not args and q.shape[0] == self._rows and not return_lse
        width = len(self._indices) // self._rows
        return self._run(
            q, paged_kv_cache, self._indptr, self._indices, self._seen, self._starts, width
        )


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """See the module."""

    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
        variant_owns_mask=False,
        max_total_num_rows=None,
    ):
        self._start(float_workspace_buffer, kv_layout)
        assert not use_cuda_graph and backend == "auto" and jit_args is None
        self._where = float_workspace_buffer.device

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        custom_mask=None,
        packed_custom_mask=None,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        rope_scale=None,
        rope_theta=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        non_blocking=True,
        prefix_len_ptr=None,
        token_pos_in_items_ptr=None,
        token_pos_in_items_len=0,
        max_item_len_ptr=None,
        seq_lens=None,
        seq_lens_q=None,
        block_tables=None,
        max_token_per_sequence=None,
        max_sequence_kv=None,
        fixed_split_size=None,
        disable_split_kv=False,
        uniform_q_len=None,
        use_token_head_sf=False,
    ):
        assert causal and qo_indptr.dtype is torch.int32 and qo_indptr.device.type == "cpu"
        lens = self._plan(
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            page_size,
            sm_scale,
            q_data_type,
            kv_data_type,
        )
        assert (np.diff(qo_indptr.numpy()) <= lens).all()
        self._width = int(np.diff(paged_kv_indptr.numpy()).max())
        self._starts = qo_indptr.to(self._where)
        self._indptr = paged_kv_indptr.to(self._where)
        self._indices = paged_kv_indices.to(self._where)
        self._seen = torch.empty_like(paged_kv_last_page_len, device=self._where)
        self._seen.copy_(self._pinned, non_blocking=True)

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        lse_base="log2",
        lse_layout="NH",
        enable_pdl=None,
        window_left=None,
        sinks=None,
        kv_cache_sf=None,
        skip_softmax_threshold_scale_factor=None,
        use_fp16_softmax=None,
        uses_spcompress=None,
    ):
        assert not args and not return_lse
        return self._run(
            q,
            paged_kv_cache,
            self._indptr,
            self._indices,
            self._seen,
            self._starts,
            self._width,
        )


def flashinfer_module():
    """A module of that name's shape, to stand in ``sys.modules``."""
    made = ModuleType("flashinfer")
    for kind in (BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper):
        setattr(made, kind.__name__, type(kind.__name__, (kind,), {"made": 0}))
    return made
