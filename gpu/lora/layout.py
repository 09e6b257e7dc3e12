"""Where everything lies inside one slot, and how large the annex of an adapter is.

What it owns: offsets, sizes and the fingerprint of a slot. Disk, network and peers that pack in
advance all pack by it, so equal fingerprints mean equal bytes.

Invariants: for layer ascending, for module in walk order where the dims apply: region A ``[R, in]``
row-major, then region B ``[out, R]`` row-major, R = max_rank rounded up to 8, so that every
row of A and B starts on a 16-byte boundary. Pairs of routed experts may have a smaller R of their
own; after the layers, optionally, come the pairs of the token matrices, with an R of their own.
Experts and token matrices have no room in slots: those an adapter has lie in its annex, in the same
order, and so do its replaced token rows (`Annex`). After a slot's pairs, the optional affine
region: per pair two vectors, mul and add, fp32 ``[out]``, each on a 16-byte boundary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ...errors import InternalError, ModelError
from .annex import ALIGN, ANNEX_ALIGN, Annex, OverlayOffsets, round_up
from .dims import EXPERT_MODULES, TOKEN_MODULES, LoraModule, ModelDims
from .keys import PairKey, canonical_keys

ROUND_ELEMENTS = 8
"""Ranks and strides are multiples of this many elements (one 16-byte load of BF16)."""
MAX_RANK_LIMIT = 4096
MAX_OVERLAY_ROWS = 1 << 20
ANNEX_MODULES = EXPERT_MODULES.union(TOKEN_MODULES)
"""Their pairs lie in annexes."""


class Elem(Enum):
    """Element type of a slot: the engine's own dtype."""

    BF16 = "bf16"
    F32 = "f32"

    @property
    def size(self) -> int:
        """Bytes of one element."""
        return 2 if self is Elem.BF16 else 4

    @property
    def numpy(self) -> np.dtype[np.uint16] | np.dtype[np.float32]:
        """How numpy holds it: BF16 as its bit pattern in uint16, F32 as float32."""
        return np.dtype(np.uint16) if self is Elem.BF16 else np.dtype(np.float32)


@dataclass(frozen=True, slots=True)
class Pair:
    """One (layer, module) place. ``a_off``, ``b_off``: bytes from the slot's start; with ``annex``,
    from where the pair begins in an adapter's annex.

    ``k_in`` is the columns of A, ``n_out`` the rows of B; A is ``[R, k_in]``, B is ``[n_out, R]``
    with R = ``stride``. ``max_rank``: the largest rank this place takes. ``layer`` of a token
    matrix is the number of layers.
    """

    layer: int
    module: LoraModule
    a_off: int
    b_off: int
    k_in: int
    n_out: int
    stride: int
    max_rank: int
    expert: int = 0
    annex: bool = False


def affine_step(n_out: int) -> int:
    """Bytes one vector of the affine region takes."""
    return round_up(4 * n_out, ALIGN)


@dataclass(frozen=True)
class SlotLayout:
    """The layout of every slot of one pool.

    Attributes:
        dims: the base model's dimensions.
        max_rank: largest rank an adapter may have, 1..4096.
        elem: element type.
        overlay_rows: token rows an adapter may replace, per matrix (0 = none).
        affine: room for one factor and one offset per output of every pair (DoRA, biases).
        expert_rank: largest rank of routed experts where that is less than max_rank; 0 = max_rank.
        embedding_rank: largest rank of embed_tokens and lm_head, at most max_rank; 0 = no room.

    Raises:
        ModelError: bad-layout, for a rank or row count outside its range.
    """

    dims: ModelDims
    max_rank: int
    elem: Elem = Elem.BF16
    overlay_rows: int = 0
    affine: bool = False
    expert_rank: int = 0
    embedding_rank: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("max_rank", 1, MAX_RANK_LIMIT),
            ("expert_rank", 0, MAX_RANK_LIMIT),
            ("embedding_rank", 0, MAX_RANK_LIMIT),
            ("overlay_rows", 0, min(MAX_OVERLAY_ROWS, self.dims.vocab)),
        ):
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise ModelError(
                    "a slot layout parameter is out of range",
                    code="bad-layout",
                    subject=name,
                    expected=f"an integer in {low}..{high}",
                    found=repr(value),
                )

    @cached_property
    def stride(self) -> int:
        """R: rows of A and columns of B, in elements (max_rank rounded up to 8)."""
        return round_up(self.max_rank, ROUND_ELEMENTS)

    @cached_property
    def pairs(self) -> tuple[Pair, ...]:
        """Every place in walk order; the index of a pair here is *the* pair index."""
        pairs, offset, size = [], 0, self.elem.size
        for layer, module in self._places():
            n_out, k_in = self.dims.shape(module)
            rank = self.rank_of(module)
            stride = round_up(rank, ROUND_ELEMENTS)
            b_part = stride * k_in * size
            if module in ANNEX_MODULES:
                pairs += [
                    Pair(layer, module, 0, b_part, k_in, n_out, stride, rank, expert, True)
                    for expert in range(self.dims.places(module))
                ]
                continue
            b_off = offset + b_part
            pairs.append(Pair(layer, module, offset, b_off, k_in, n_out, stride, rank))
            offset = b_off + n_out * stride * size
        return tuple(pairs)

    def _places(self) -> Iterator[tuple[int, LoraModule]]:
        dims = self.dims
        for layer in range(dims.num_layers):
            yield from ((layer, m) for m in LoraModule if dims.applies_to_layer(layer, m))
        if self.embedding_rank:
            yield from ((dims.num_layers, module) for module in TOKEN_MODULES)

    def rank_of(self, module: LoraModule) -> int:
        """The largest rank a pair of ``module`` may have; 0 where slots have no room for it."""
        if module in TOKEN_MODULES:
            return min(self.embedding_rank, self.max_rank)
        if module in EXPERT_MODULES:
            if not self.dims.expert_adapters:
                return 0
            return min(self.expert_rank or self.max_rank, self.max_rank)
        return self.max_rank

    def bytes_for(self, modules: Iterable[LoraModule], rank: int) -> int:
        """Bytes that pairs of ``modules`` take in all layers at ``rank``."""
        dims, elements = self.dims, 0
        for module in modules:
            layers = 1 if module in TOKEN_MODULES else dims.num_layers
            # Expert and token modules are in all layers or in none.
            elements += layers * dims.places(module) * sum(dims.shape(module))
        return elements * round_up(rank, ROUND_ELEMENTS) * self.elem.size

    @cached_property
    def pair_index(self) -> dict[tuple[int, LoraModule], int]:
        """(layer, module) -> pair index, of experts the first one's. Read only."""
        return {(p.layer, p.module): i for i, p in enumerate(self.pairs) if p.expert == 0}

    @cached_property
    def known_keys(self) -> dict[str, PairKey]:
        """Tensor key as PEFT writes it -> its place, so that most keys need no parsing."""
        return dict(canonical_keys(self.dims))

    @cached_property
    def pairs_bytes(self) -> int:
        """Bytes of a slot's A and B regions: the sum of (R*in + out*R) * element size."""
        own = [p for p in self.pairs if not p.annex]
        return own[-1].b_off + own[-1].n_out * own[-1].stride * self.elem.size if own else 0

    @cached_property
    def affine_offsets(self) -> tuple[int, ...]:
        """Bytes from the slot's start of each pair's mul (add follows by `affine_step`), -1 of
        those in annexes; ``()`` without an affine region."""
        if not self.affine:
            return ()
        offsets, place = [], round_up(self.pairs_bytes, ALIGN)
        for pair in self.pairs:
            offsets.append(-1 if pair.annex else place)
            place += 0 if pair.annex else 2 * affine_step(pair.n_out)
        return tuple(offsets)

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of one slot, a multiple of 16."""
        own = [p for p in self.pairs if not p.annex] if self.affine else []
        vectors = sum(2 * affine_step(pair.n_out) for pair in own)
        return round_up(self.pairs_bytes, ALIGN) + vectors

    # Annexes

    @cached_property
    def _annex_sizes(self) -> npt.NDArray[np.int64]:
        """int64 ``[2, n_pairs]``: bytes in an annex of each pair and of its vectors."""
        size = self.elem.size
        rows = [
            (p.stride * (p.k_in + p.n_out) * size, 2 * affine_step(p.n_out)) if p.annex else (0, 0)
            for p in self.pairs
        ]
        sizes = np.array(rows, np.int64).reshape(-1, 2).T.copy()
        if not self.affine:
            sizes[1] = 0
        return sizes

    @cached_property
    def _any_in_annex(self) -> bool:
        """A pair or its vectors may lie in one."""
        return bool(self._annex_sizes.any())

    def overlay_bytes(self, rows: int) -> int:
        """Bytes of an annex that an overlay of ``rows`` rows a matrix takes."""
        return 2 * self._matrix_bytes(rows)

    def _matrix_bytes(self, rows: int) -> int:
        return round_up(4 * rows, ALIGN) + round_up(rows * self.dims.hidden * self.elem.size, ALIGN)

    @cached_property
    def max_annex_bytes(self) -> int:
        """Bytes of the largest annex an adapter may have."""
        whole = int(self._annex_sizes.sum()) + self.overlay_bytes(self.overlay_rows)
        return round_up(whole, ANNEX_ALIGN)

    def annex_for(
        self,
        present: Sequence[bool],
        affine: Sequence[bool] = (),
        embed_rows: int = 0,
        head_rows: int = 0,
    ) -> Annex | None:
        """The annex of an image with these pairs and vectors (per pair index) and this many
        replaced rows; ``None`` if none of them lies in one."""
        if not (embed_rows or head_rows or self._any_in_annex):
            return None
        place, offsets = self.slot_bytes, []
        held = (present, affine or (False,) * len(self.pairs))
        for sizes, found in zip(self._annex_sizes, held, strict=True):
            taken = sizes * np.asarray(found, bool)
            ends = place + np.cumsum(taken)
            offsets.append(np.where(taken > 0, ends - taken, -1))
            offsets[-1].flags.writeable = False  # many images may have them
            place = int(ends[-1])
        overlay = None
        if embed_rows or head_rows:
            starts, end = [], place
            for rows in (embed_rows, head_rows):
                starts += [end, end + round_up(4 * rows, ALIGN)]
                end += self._matrix_bytes(rows)
            overlay, place = OverlayOffsets(*starts), end
        nbytes = round_up(place - self.slot_bytes, ANNEX_ALIGN)
        if nbytes == 0:
            return None
        return Annex(self.slot_bytes, nbytes, offsets[0], offsets[1], overlay)

    # Views of an image's bytes

    def a_start(self, pair: int, annex: Annex | None) -> int:
        """Bytes from an image's start of A of a pair it has."""
        place = self.pairs[pair]
        if not place.annex:
            return place.a_off
        start = -1 if annex is None else int(annex.pairs[pair])
        if start < 0:
            raise InternalError("the image has no such pair", code="no-pair", subject=str(pair))
        return start

    def pair_views(
        self, image: npt.NDArray[np.uint8], pair: int, annex: Annex | None = None
    ) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]]:
        """A ``[R, in]`` and B ``[out, R]`` of pair ``pair`` as numpy views of an image's bytes.

        ``image`` is uint8 ``[slot_bytes + annex.nbytes]``; the views have `Elem.numpy`'s dtype.
        """
        place, dtype = self.pairs[pair], self.elem.numpy
        stride, start = place.stride, self.a_start(pair, annex)
        a_end = start + stride * place.k_in * dtype.itemsize
        b_end = a_end + stride * place.n_out * dtype.itemsize
        a = image[start:a_end].view(dtype).reshape(stride, place.k_in)
        b = image[a_end:b_end].view(dtype).reshape(place.n_out, stride)
        return a, b

    def affine_views(
        self, image: npt.NDArray[np.uint8], pair: int, annex: Annex | None = None
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """mul and add of pair ``pair``, float32 ``[out]``, as views of an image's bytes.

        Only for layouts with an affine region.
        """
        start, n_out = self.affine_offsets[pair], self.pairs[pair].n_out
        if self.pairs[pair].annex:
            start = -1 if annex is None else int(annex.vectors[pair])
        if start < 0:
            raise InternalError("the image has no such vectors", code="no-pair", subject=str(pair))
        add = start + affine_step(n_out)
        return (
            image[start : start + 4 * n_out].view(np.float32),
            image[add : add + 4 * n_out].view(np.float32),
        )

    def fingerprint(self) -> str:
        """SHA-256 (hex) of everything the bytes of a slot depend on."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        parts = [f"rota-slot-2 {self.elem.value} R={self.stride} hidden={self.dims.hidden}"]
        parts += [
            f"{p.layer}.{p.module.label} a={p.a_off} b={p.b_off} in={p.k_in} out={p.n_out}"
            for p in self.pairs
        ]
        parts.append(f"overlay={self.overlay_rows} bytes={self.slot_bytes}")
        parts.append(f"annex={self.max_annex_bytes} align={ANNEX_ALIGN}")
        parts.append(f"affine={self.affine}")
        # max_rank itself: two layouts with one stride still refuse different adapters.
        parts.append(f"max_rank={self.max_rank}")
        parts += [
            f"{name}={value}"
            for name, value in (("experts", self.expert_rank), ("tokens", self.embedding_rank))
            if value
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()
