"""What an adapter is, as far as its own files tell: for people, and where no base model is at hand.

What it owns: the guess of a base's shapes from an adapter's tensors, and the accounting of every
key. Invariants: nothing here accepts or refuses (the audit does, against the guess); every tensor
is in ``matched`` or in ``refused``, under the code its key alone would get.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from ...errors import RejectError
from .config import PeftConfig
from .dims import EXPERT_MODULES, TOKEN_MODULES, LoraModule, ModelDims
from .image import SlotImage
from .keys import ExpertsKey, FusedKey, OverlayKey, PairKey, PartKey, classify
from .layout import MAX_RANK_LIMIT, SlotLayout
from .pack import file_array
from .report import delta_norms
from .safefile import Tensor

_ANY_LAYER: Final = 1 << 20
_HYBRID: Final = (".linear_attn.", ".mlp.experts.", ".mlp.shared_expert", ".mlp.gate.", "qkv_proj.")
_ONE_IN: Final = (
    LoraModule.Q_PROJ,
    LoraModule.K_PROJ,
    LoraModule.V_PROJ,
    LoraModule.GATE_PROJ,
    LoraModule.UP_PROJ,
)


@dataclass(frozen=True, slots=True)
class Keys:
    """Every tensor: places matched (module -> tensors), and (key, code, why) of the others."""

    matched: Mapping[str, int]
    refused: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """One kind of module of an accepted adapter. ``norm``: of its deltas in all layers together."""

    module: str
    pairs: int
    ranks: tuple[int, ...]
    scales: tuple[float, ...]
    norm: float


def sort_keys(tensors: Sequence[Tensor], dims: ModelDims) -> Keys:
    """Account for every tensor by its key alone."""
    matched: Counter[str] = Counter()
    refused = []
    for tensor in tensors:
        try:
            key = classify(tensor.key, dims)
        except RejectError as error:
            refused.append((tensor.key, error.code, error.message))
            continue
        if isinstance(key, OverlayKey):
            matched[key.leaf] += 1
        else:
            matched[key.module_name.rpartition(".")[2]] += 1
    return Keys(dict(matched), tuple(refused))


def needs_model(tensors: Sequence[Tensor]) -> str | None:
    """A key whose place depends on more of the base than its own shape tells, or ``None``."""
    for tensor in tensors:
        if any(part in tensor.key for part in _HYBRID):
            return tensor.key
    return None


def has_token_factors(tensors: Sequence[Tensor]) -> bool:
    """True where a key names low-rank factors of embed_tokens or lm_head."""
    return any(
        "lora_" in tensor.key and any(f"{m.leaf}.lora_" in tensor.key for m in TOKEN_MODULES)
        for tensor in tensors
    )


def guess_layout(config: PeftConfig, tensors: Sequence[Tensor]) -> SlotLayout:
    """A layout of the smallest dense base the adapter could be of, with room for all it brings.

    Widths no tensor tells are those of the residual stream.
    """
    probe = ModelDims(_ANY_LAYER, 1, 1, 1, 1, 1, 1)
    ins: dict[LoraModule, int] = {}
    outs: dict[LoraModule, int] = {}
    layers = vocab = 0
    hidden = 0
    for tensor in tensors:
        try:
            key = classify(tensor.key, probe)
        except RejectError:
            continue
        if len(tensor.shape) != 2 or not all(tensor.shape):
            continue
        if isinstance(key, OverlayKey):
            hidden = hidden or tensor.shape[1]
            vocab = max(vocab, tensor.shape[0] if key.kind != "rows" else 0)
            continue
        if isinstance(key, (ExpertsKey, PartKey)):  # never of a dense base
            continue
        if isinstance(key, PairKey) and key.module in TOKEN_MODULES:
            # A is [r, vocab] of the embedding and [r, hidden] of the head, B the other way round.
            wide = (key.module is LoraModule.EMBED_TOKENS) == (key.half == "A")
            length = tensor.shape[1 if key.half == "A" else 0]
            vocab, hidden = max(vocab, length if wide else 0), hidden or (0 if wide else length)
            continue
        layers = max(layers, key.layer + 1)
        for module in key.modules if isinstance(key, FusedKey) else (key.module,):
            if key.half == "A":
                ins.setdefault(module, tensor.shape[1])
            elif key.half == "B":
                parts = len(key.modules) if isinstance(key, FusedKey) else 1
                outs.setdefault(module, tensor.shape[0] // parts)
    for ids in config.token_indices.values():
        vocab = max(vocab, max(ids) + 1)
    m = LoraModule
    hidden = next((ins[k] for k in _ONE_IN if k in ins), 0) or hidden
    hidden = hidden or outs.get(m.O_PROJ, 0) or outs.get(m.DOWN_PROJ, 0) or 1
    dims = ModelDims(
        num_layers=max(layers, 1),
        hidden=hidden,
        q_out=outs.get(m.Q_PROJ) or ins.get(m.O_PROJ) or hidden,
        kv_out=outs.get(m.K_PROJ) or outs.get(m.V_PROJ) or hidden,
        attn_in=ins.get(m.O_PROJ) or outs.get(m.Q_PROJ) or hidden,
        intermediate=outs.get(m.GATE_PROJ) or outs.get(m.UP_PROJ) or ins.get(m.DOWN_PROJ) or hidden,
        vocab=max(vocab, 1),
        tied=config.ensure_weight_tying,
    )
    rank = max([config.r, *(int(p.value) for p in config.rank_pattern)])
    rank = min(rank, MAX_RANK_LIMIT)
    return SlotLayout(dims, rank, overlay_rows=vocab, affine=True)


class StandIn:
    """A base model of which only the shapes matter: its biases are where the adapter says.

    With it the audit answers whether a fitting base could take the adapter. Norms, changed token
    rows and offsets that come out mean nothing.
    """

    def __init__(self, layout: SlotLayout, tensors: Sequence[Tensor]) -> None:
        self._layout = layout
        self._biased: set[tuple[int, LoraModule]] = set()
        self._copies: dict[str, npt.NDArray[np.generic]] = {}
        for tensor in tensors:
            try:
                key = classify(tensor.key, layout.dims)
            except RejectError:
                continue
            if isinstance(key, PairKey) and key.half == "bias":
                self._biased.add((key.layer, key.module))
            if isinstance(key, OverlayKey) and key.kind == "base":
                self._copies[key.leaf] = file_array(tensor)

    def rows(
        self, layer: int, module: LoraModule, start: int, stop: int, expert: int = 0
    ) -> npt.NDArray[np.float32]:
        """Ones."""
        return np.ones((stop - start, self._layout.dims.shape(module)[1]), np.float32)

    def bias(self, layer: int, module: LoraModule) -> npt.NDArray[np.float32] | None:
        """Zeros where the adapter brings a bias."""
        if (layer, module) not in self._biased:
            return None
        return np.zeros(self._layout.dims.shape(module)[0], np.float32)

    def embed(self) -> npt.NDArray[np.generic]:
        """``[vocab, hidden]``: the copy the adapter brings, or zeros."""
        return self._matrix("embed_tokens")

    def head(self) -> npt.NDArray[np.generic]:
        """As `embed`."""
        return self._matrix("lm_head")

    def _matrix(self, leaf: str) -> npt.NDArray[np.generic]:
        shape = (self._layout.dims.vocab, self._layout.dims.hidden)
        copy = self._copies.get(leaf)
        return np.zeros(shape, np.float32) if copy is None or copy.shape != shape else copy


def module_rows(image: SlotImage, layout: SlotLayout) -> tuple[tuple[ModuleRow, ...], list[float]]:
    """Each kind of module in walk order, and the delta norm of each layer."""
    norms = delta_norms(image, layout)
    layers = [0.0] * layout.dims.num_layers
    found: dict[LoraModule, list[int]] = {}
    for index, pair in enumerate(layout.pairs):
        if image.present[index]:
            found.setdefault(pair.module, []).append(index)
            if pair.module not in TOKEN_MODULES:
                layers[pair.layer] += float(norms[index]) ** 2
    rows = tuple(
        ModuleRow(
            module.label,
            len(places),
            tuple(sorted({image.ranks[i] for i in places})),
            tuple(sorted({round(float(image.scales[i]), 6) for i in places})),
            float(np.sqrt(sum(float(norms[i]) ** 2 for i in places))),
        )
        for module, places in sorted(found.items())
    )
    return rows, [value**0.5 for value in layers]


def engine_options(
    config: PeftConfig, image: SlotImage, layout: SlotLayout
) -> dict[str, int | bool]:
    """The options an engine needs to hold the adapter, at their least values."""

    def rank(modules: Collection[LoraModule] | None) -> int:
        found = zip(layout.pairs, image.ranks, strict=True)
        return max((r for p, r in found if modules is None or p.module in modules), default=0)

    # An engine refuses ranks of the config it has no room for, whether they are used or not.
    declared = max([config.r, *(int(p.value) for p in config.rank_pattern)])
    needs: dict[str, int | bool] = {"max_lora_rank": max(rank(None), declared)}
    if experts := rank(EXPERT_MODULES):
        needs |= {"expert_adapters": True, "max_expert_rank": experts}
    if tokens := rank(TOKEN_MODULES):
        needs["max_embedding_rank"] = tokens
    if rows := max(image.embed_rows, image.head_rows):
        needs["overlay_rows"] = rows
    if any(image.affine):
        needs["affine"] = True
    return needs


def own_bytes(image: SlotImage, layout: SlotLayout) -> int:
    """Bytes a slot of ``layout`` needs for the kinds of modules the adapter has, in all layers."""
    kinds = {pair.module for pair, there in zip(layout.pairs, image.present, strict=True) if there}
    return sum(
        pair.stride * (pair.k_in + pair.n_out) * layout.elem.size
        for pair in layout.pairs
        if pair.module in kinds and not pair.annex
    )


def least_annex(image: SlotImage, layout: SlotLayout, needs: Mapping[str, int | bool]) -> int:
    """Bytes the adapter takes of the arena of an engine with the options `engine_options` gave."""
    least = replace(
        layout,
        max_rank=int(needs["max_lora_rank"]),
        expert_rank=int(needs.get("max_expert_rank", 0)),
        embedding_rank=int(needs.get("max_embedding_rank", layout.embedding_rank)),
    )
    annex = least.annex_for(image.present, image.affine, image.embed_rows, image.head_rows)
    return 0 if annex is None else annex.nbytes
