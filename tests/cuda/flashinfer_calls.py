"""What flashinfer-python's paged wrappers take: signatures of the newest and the oldest version.

Recorded from ``flashinfer/decode.py`` and ``prefill.py``: of 0.7.4 whole, of 0.6.0 up to what is
used. By class and method, without ``self``.
"""

from __future__ import annotations

from inspect import Parameter, Signature

DECODE = "BatchDecodeWithPagedKVCacheWrapper"
PREFILL = "BatchPrefillWithPagedKVCacheWrapper"


def takes(*parameters, by_name=False, **defaults):
    """A signature. A parameter that begins with stars is as it would be in a ``def``; ``by_name``:
    those with defaults are given by keyword alone."""
    listed = [Parameter(p, Parameter.POSITIONAL_OR_KEYWORD) for p in parameters if p[0] != "*"]
    stars = {p.count("*"): p.strip("*") for p in parameters if p[0] == "*"}
    if 1 in stars:
        listed.append(Parameter(stars[1], Parameter.VAR_POSITIONAL))
    kind = Parameter.KEYWORD_ONLY if by_name else Parameter.POSITIONAL_OR_KEYWORD
    listed += [Parameter(p, kind, default=default) for p, default in defaults.items()]
    if 2 in stars:
        listed.append(Parameter(stars[2], Parameter.VAR_KEYWORD))
    return Signature(listed)


_OPENED = {"kv_layout": "NHD", "use_cuda_graph": False}
_HEADS = ("num_qo_heads", "num_kv_heads")
_KINDS = {"q_data_type": "float16", "kv_data_type": None}
_BUFFERS = dict.fromkeys(
    ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
)
_DECODE_PLAN = ("indptr", "indices", "last_page_len", *_HEADS, "head_dim", "page_size")
_PREFILL_PLAN = (
    *("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"),
    *(*_HEADS, "head_dim_qk", "page_size"),
)
_PREFILL_HOW = {
    "head_dim_vo": None,
    "custom_mask": None,
    "packed_custom_mask": None,
    "causal": False,
    "pos_encoding_mode": "NONE",
    "use_fp16_qk_reduction": False,
    "sm_scale": None,
    "window_left": -1,
    "logits_soft_cap": None,
    "rope_scale": None,
    "rope_theta": None,
}
_SCALES = dict.fromkeys(("q_scale", "k_scale", "v_scale", "out", "lse")) | {"return_lse": False}

NEWEST = {
    (DECODE, "__init__"): takes(
        "float_workspace_buffer",
        **_OPENED,
        use_tensor_cores=False,
        **_BUFFERS,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
    ),
    (DECODE, "plan"): takes(*_DECODE_PLAN, "*deprecated_positional_args", "**kwargs"),
    (DECODE, "run"): takes(
        *("q", "paged_kv_cache", "*args"),
        by_name=True,
        **_SCALES,
        enable_pdl=None,
        window_left=None,
        sinks=None,
        q_len_per_req=None,
        skip_softmax_threshold_scale_factor=None,
        kv_cache_sf=None,
    ),
    (PREFILL, "__init__"): takes(
        "float_workspace_buffer",
        **_OPENED,
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
    ),
    (PREFILL, "plan"): takes(
        *_PREFILL_PLAN,
        **_PREFILL_HOW,
        **_KINDS,
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
    ),
    (PREFILL, "run"): takes(
        *("q", "paged_kv_cache", "*args"),
        by_name=True,
        **_SCALES,
        lse_base="log2",
        lse_layout="NH",
        enable_pdl=None,
        window_left=None,
        sinks=None,
        kv_cache_sf=None,
        skip_softmax_threshold_scale_factor=None,
        use_fp16_softmax=None,
        uses_spcompress=None,
    ),
}

OLDEST = {
    (DECODE, "__init__"): takes(
        "float_workspace_buffer",
        **_OPENED,
        use_tensor_cores=False,
        **_BUFFERS,
        backend="auto",
        jit_args=None,
    ),
    (DECODE, "plan"): takes(
        *_DECODE_PLAN,
        pos_encoding_mode="NONE",
        window_left=-1,
        logits_soft_cap=None,
        **_KINDS,
        o_data_type=None,
        data_type=None,
        sm_scale=None,
    ),
    (DECODE, "run"): takes("q", "paged_kv_cache", by_name=True, out=None),
    (PREFILL, "__init__"): takes("float_workspace_buffer", **_OPENED),
    (PREFILL, "plan"): takes(*_PREFILL_PLAN, **_PREFILL_HOW, **_KINDS),
    (PREFILL, "run"): takes("q", "paged_kv_cache", by_name=True, out=None),
}
