"""The token overlay: embedding and lm_head rows an adapter replaces.

What it owns: which rows change and to what. Rows come from two features of PEFT:
``trainable_token_indices`` (the file has just those rows, in the order of the config; with a tied
head the same rows replace lm_head rows too) and ``modules_to_save`` (the file has the whole matrix;
rows equal to the base are dropped; a tied head keeps the base's rows unless it is saved itself).
Invariants: ids ascend and are unique; rows are values, never deltas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ...errors import InternalError, RejectError
from .affine import BaseLinear
from .annex import Annex
from .config import OVERLAY_LEAVES, PeftConfig
from .dims import LoraModule
from .keys import OverlayKey
from .layout import SlotLayout
from .pack import as_f32, bf16_to_f32, file_array, to_bf16, to_elem
from .safefile import Tensor

_ROWS_AT_ONCE = 4096


class BaseRows(BaseLinear, Protocol):
    """Access to the base model's matrices: to keep only the token rows an adapter changed, and for
    what `BaseLinear` is for."""

    def embed(self) -> npt.NDArray[np.generic]:
        """Embedding ``[vocab, hidden]``: float32, or BF16 bit patterns in uint16."""
        ...

    def head(self) -> npt.NDArray[np.generic]:
        """lm_head ``[vocab, hidden]``, in the same forms (the embedding itself when tied)."""
        ...


def token_rows(
    base: BaseRows, module: LoraModule, start: int, stop: int
) -> npt.NDArray[np.float32]:
    """Rows of a token matrix as its pair sees it: of lm_head, or of the embedding transposed."""
    if module is LoraModule.LM_HEAD:
        return as_f32(base.head()[start:stop])
    return as_f32(np.ascontiguousarray(base.embed()[:, start:stop].T))


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Replaced rows of one matrix: int32 ``[n]`` ascending, and elements ``[n, hidden]``."""

    ids: npt.NDArray[np.int32]
    values: npt.NDArray[np.generic]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class OverlayPlan:
    """Rows to replace in the embedding and in lm_head."""

    embed: Rows | None = None
    head: Rows | None = None

    @property
    def embed_count(self) -> int:
        """Rows replaced in the embedding."""
        return 0 if self.embed is None else len(self.embed)

    @property
    def head_count(self) -> int:
        """Rows replaced in lm_head."""
        return 0 if self.head is None else len(self.head)


def plan_overlay(
    config: PeftConfig,
    found: Mapping[OverlayKey, Tensor],
    layout: SlotLayout,
    base_rows: BaseRows | None,
    adapted: frozenset[str] = frozenset(),
) -> OverlayPlan:
    """Decide the replaced rows from the config and the overlay tensors of the file.

    ``adapted``: matrices that have low-rank factors in the file. PEFT saves the base's own matrix
    beside them; its rows are replaced where they differ, before the factors' delta is added.

    Raises:
        RejectError: untargeted-tensor, overlay-delta-missing, overlay-conflict, overlay-shape,
            trainable-index-out-of-range, vocab-exceeds-base, overlay-no-base,
            overlay-exceeds-pool.
    """
    tensors = {(key.leaf, key.kind): tensor for key, tensor in found.items()}
    rows: dict[str, Rows] = {}
    for leaf in OVERLAY_LEAVES:
        full, delta = tensors.get((leaf, "full")), tensors.get((leaf, "rows"))
        saved, ids = leaf in config.modules_to_save, config.token_indices.get(leaf)
        # Saving embed_tokens with ensure_weight_tying saves the tied head as well.
        saved = saved or (config.ensure_weight_tying and bool(config.modules_to_save))
        _agree(full, saved, leaf in config.modules_to_save, "modules_to_save", leaf)
        _agree(delta, ids is not None, ids is not None, "trainable_token_indices", leaf)
        if full is not None and delta is not None:
            raise RejectError(
                "rows and the whole matrix are both replaced", code="overlay-conflict", subject=leaf
            )
        if delta is not None and ids is not None:
            rows[leaf] = _listed(delta, ids, layout)
        elif full is not None:
            rows[leaf] = _changed(full, leaf, layout, base_rows)
        copy = tensors.get((leaf, "base"))
        _agree(copy, leaf in adapted, False, "target_modules", leaf)
        if leaf in adapted and leaf in rows:
            raise _both(leaf)
        if copy is not None:
            rows[leaf] = _changed(copy, leaf, layout, base_rows)
    if layout.dims.tied and "lm_head" in adapted and "embed_tokens" in config.token_indices:
        raise _both("lm_head")
    embed, head = rows.get("embed_tokens"), rows.get("lm_head")
    if layout.dims.tied and "embed_tokens" in config.token_indices:
        if head is not None:
            raise RejectError(
                "a tied lm_head is replaced twice", code="overlay-conflict", subject="lm_head"
            )
        head = embed
    if layout.dims.tied and config.ensure_weight_tying and head is None:
        head = embed  # saved once, and the config says that both matrices stay one
    for leaf, part in (("embed_tokens", embed), ("lm_head", head)):
        if part is not None and len(part) > layout.overlay_rows:
            raise RejectError(
                "the adapter replaces more token rows than it may; raise overlay_rows",
                code="overlay-exceeds-pool",
                subject=leaf,
                expected=f"at most {layout.overlay_rows} rows; {len(part)} take "
                f"{layout.overlay_bytes(len(part))} bytes of the arena",
                found=len(part),
            )
    return OverlayPlan(embed, head)


def _both(leaf: str) -> RejectError:
    return RejectError(
        "low-rank factors of a matrix whose rows are replaced as well",
        code="overlay-conflict",
        subject=leaf,
    )


def _agree(tensor: Tensor | None, allowed: bool, needed: bool, field: str, leaf: str) -> None:
    if tensor is not None and not allowed:
        raise RejectError(
            f"the config's {field} does not name this matrix",
            code="untargeted-tensor",
            subject=tensor.key,
            expected=f"{leaf} in {field}",
        )
    if tensor is None and needed:
        raise RejectError(
            f"the config's {field} names a matrix the file lacks",
            code="overlay-delta-missing",
            subject=leaf,
        )


def _listed(delta: Tensor, ids: tuple[int, ...], layout: SlotLayout) -> Rows:
    _check_shape(delta, (len(ids), layout.dims.hidden))
    order = np.array(ids, np.int64)
    if int(order.max()) >= layout.dims.vocab:
        raise RejectError(
            "a trained token is not in the base model's vocabulary",
            code="trainable-index-out-of-range",
            subject=delta.key,
            expected=f"0..{layout.dims.vocab - 1}",
            found=int(order.max()),
        )
    values = to_elem(file_array(delta), layout.elem)
    sort = np.argsort(order)
    return Rows(order[sort].astype(np.int32), values[sort])


def _changed(full: Tensor, leaf: str, layout: SlotLayout, base_rows: BaseRows | None) -> Rows:
    vocab, hidden = layout.dims.vocab, layout.dims.hidden
    if len(full.shape) == 2 and full.shape[0] > vocab and full.shape[1] == hidden:
        raise RejectError(
            "the adapter was trained with a larger vocabulary than the base model has",
            code="vocab-exceeds-base",
            subject=full.key,
            expected=f"{vocab} rows",
            found=full.shape[0],
        )
    _check_shape(full, (vocab, hidden))
    if base_rows is None:
        raise RejectError(
            "a whole matrix can be served only next to the base model's own",
            code="overlay-no-base",
            subject=full.key,
        )
    base = base_rows.embed() if leaf == "embed_tokens" else base_rows.head()
    if base.shape != (vocab, hidden):
        raise InternalError(
            "the base matrix has another shape than the dims say",
            subject=leaf,
            expected=(vocab, hidden),
            found=base.shape,
        )
    values = file_array(full)
    ids: list[npt.NDArray[np.int64]] = []
    kept: list[npt.NDArray[np.generic]] = []
    for start in range(0, vocab, _ROWS_AT_ONCE):
        piece = to_elem(values[start : start + _ROWS_AT_ONCE], layout.elem)
        same = to_elem(base[start : start + _ROWS_AT_ONCE], layout.elem)
        # A narrower file has the base's rows rounded: they have not changed.
        if same.dtype == np.float32 and values.dtype == np.uint16:
            same = bf16_to_f32(to_bf16(same))
        elif same.dtype == np.float32 and values.dtype == np.float16:
            same = same.astype(np.float16).astype(np.float32)
        differ = np.flatnonzero((piece != same).any(axis=1))
        ids.append(differ + start)
        kept.append(piece[differ])
    return Rows(np.concatenate(ids).astype(np.int32), np.concatenate(kept))


def _check_shape(tensor: Tensor, shape: tuple[int, int]) -> None:
    if tensor.shape != shape:
        raise RejectError(
            "a token matrix has the wrong shape",
            code="overlay-shape",
            subject=tensor.key,
            expected=shape,
            found=tensor.shape,
        )


def pack_overlay(
    plan: OverlayPlan,
    layout: SlotLayout,
    buffer: npt.NDArray[np.uint8],
    annex: Annex | None = None,
) -> None:
    """Write ids and rows of the overlay into an image's zeroed buffer."""
    offsets = None if annex is None else annex.overlay
    if offsets is None:
        return
    for ids_at, rows_at, part in (
        (offsets.embed_ids, offsets.embed_rows, plan.embed),
        (offsets.head_ids, offsets.head_rows, plan.head),
    ):
        if part is None or not len(part):
            continue
        buffer[ids_at : ids_at + 4 * len(part)].view(np.int32)[:] = part.ids
        nbytes = len(part) * layout.dims.hidden * layout.elem.size
        region = buffer[rows_at : rows_at + nbytes].view(layout.elem.numpy)
        region.reshape(len(part), layout.dims.hidden)[:] = part.values
