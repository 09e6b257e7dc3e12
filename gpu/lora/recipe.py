"""Recipes: what config and header alone decide of an adapter, kept for the next one that has both.

An adapter that was trained again has the names, shapes and offsets it had before, and other values.
What the audit found out about the former and where packing put it is then known; left to do are the
checks of values and the copying, which can follow the bytes as they are read.

What it owns: the recipes, least recently used first to go. Invariants: a recipe holds no byte of a
tensor; it is made only of an adapter that passed the whole audit, and only for the very bytes of
config and header, the layout, the limits and the base matrices it was made of; it never refuses:
values that look wrong send the adapter through the audit, which says what is the matter.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from .audit import Audited
from .buffers import blank
from .image import SlotImage
from .layout import SlotLayout
from .overlay import BaseRows, OverlayPlan
from .pack import FILE_DTYPES, PairTensors, gaps, to_elem
from .report import LoadReport
from .safefile import ITEM_BYTES, FileLimits, Tensor
from .source import RawAdapter
from .values import peak, peak_limit

MAX_RECIPES: Final = 64
MAX_BYTES: Final = 32 << 20
"""Of all recipes together, with the configs and headers they are for."""

MOVE_BYTES: Final = 1 << 18
"""Most bytes of a file that are moved at once."""

_Key = tuple[bytes, bytes, int, str]
_Move = tuple[int, int, int, int, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """What an adapter is staged for; see `stage.stage`."""

    layout: SlotLayout
    limits: FileLimits
    base_rows: BaseRows | None

    def same(self, other: Terms) -> bool:
        """True if an audit on these terms says what one on the others does."""
        return (
            self.base_rows is other.base_rows
            and self.limits == other.limits
            and self.layout == other.layout
        )


@dataclass(frozen=True, eq=False)
class Recipe:
    """How to stage an adapter of pairs alone, in one file, all tensors of one dtype.

    Attributes:
        terms: it was made on.
        start: bytes before the file's first value.
        dtype: of the file.
        pairs: int64 ``[n, 4]``: pair index, rank, and where A and B begin in the file, in elements.
        image: without a buffer or a digest.
        report: without times.
    """

    terms: Terms
    start: int
    dtype: str
    pairs: npt.NDArray[np.int64]
    image: SlotImage
    report: LoadReport

    # Worked out when a second adapter of the kind comes: of many there is one.

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """(begin, end) bytes of the image that no pair fills."""
        layout, annex = self.terms.layout, self.image.annex
        filled = ((pair, rank, layout.a_start(pair, annex)) for pair, rank in self._ranks)
        return tuple(gaps(filled, layout, layout.slot_bytes + self.image.annex_bytes))

    @cached_property
    def moves(self) -> npt.NDArray[np.int64]:
        """int64 ``[n, 6]``, in the order of the file, of all its values, none of more than
        `MOVE_BYTES` there: end and begin in the file, place in the image, rows, from row to row in
        the image, length of a row; in elements."""
        return np.array(_moves(self), np.int64)

    @property
    def _ranks(self) -> Iterator[tuple[int, int]]:
        return zip(*self.pairs[:, :2].T.tolist(), strict=True)

    @property
    def nbytes(self) -> int:
        """About the most it may take, without its config and header."""
        layout, most = self.terms.layout, MOVE_BYTES // ITEM_BYTES[self.dtype]
        values = sum(
            rank * (layout.pairs[pair].k_in + layout.pairs[pair].n_out)
            for pair, rank in self._ranks
        )
        moves = 2 * len(self.pairs) + values // most
        arrays = self.pairs.nbytes + self.image.scales.nbytes
        return arrays + 48 * moves + 64 * (len(self.pairs) + len(self.image.ranks))

    def image_of(self, packed: npt.NDArray[np.uint8], digest: str) -> SlotImage:
        """The image in a buffer that was packed by this recipe."""
        return replace(self.image, buffer=packed, digest=digest)

    def report_of(self, seconds: dict[str, float]) -> LoadReport:
        """The report, with these times."""
        return _own(self.report, seconds)


class Follower:
    """Checks and packs one adapter by its recipe, values coming in the order of the file.

    Attributes:
        buffer: uint8 ``[nbytes]``, the image as far as it is packed.
        finite: no value yet that the audit refuses.
    """

    def __init__(self, recipe: Recipe) -> None:
        layout, elem = recipe.terms.layout, recipe.terms.layout.elem
        self._recipe, self._elem = recipe, elem
        self._dtype, self._limit = FILE_DTYPES[recipe.dtype], peak_limit(recipe.dtype, elem)
        self._moves: list[list[int]] = recipe.moves.tolist()
        self._next = 0
        self.finite = True
        self.buffer = blank(layout.slot_bytes + recipe.image.annex_bytes)
        self._slot = self.buffer.view(elem.numpy)
        for begin, end in recipe.gaps:
            self.buffer[begin:end] = 0

    def check(self, fresh: npt.NDArray[np.uint8]) -> None:
        """Look at values (whole elements, as bytes) that have not been looked at."""
        self.finite = self.finite and peak(fresh.view(self._dtype)) < self._limit

    def pack(self, values: npt.NDArray[np.uint8], first: int) -> int:
        """Put values into the slot: ``values`` are bytes of whole elements of the file, from
        element ``first`` on, the one up to which all are packed. Returns up to which they are now:
        at most `MOVE_BYTES` are left."""
        source: npt.NDArray[np.generic] = values.view(self._dtype)
        there, moves, at, slot = first + source.size, self._moves, self._next, self._slot
        while at < len(moves) and moves[at][0] <= there:
            end, begin, place, rows, stride, width = moves[at]
            piece = to_elem(source[begin - first : end - first], self._elem, finite=True)
            if width == stride:
                slot[place : place + end - begin] = piece
            else:
                region = slot[place : place + rows * stride].reshape(rows, stride)
                region[:, :width] = piece.reshape(rows, width)
            at += 1
        self._next = at
        return moves[at][1] if at < len(moves) else there

    def sound(self) -> bool:
        """True if nothing is wrong with the adapter, now that all of it is packed: all values are
        finite, and a pair changes something. Else the audit has to look."""
        if not self.finite:
            return False
        layout, image = self._recipe.terms.layout, self._recipe.image
        present = (i for i, rank in enumerate(image.ranks) if rank)
        pairs = (layout.pair_views(self.buffer, index, image.annex) for index in present)
        return any(peak(a.reshape(-1)) and peak(b.reshape(-1)) for a, b in pairs)


class Recipes:
    """Recipes of one engine; any thread may ask.

    Args:
        entries: most recipes held.
        nbytes: most bytes held.
    """

    def __init__(self, entries: int = MAX_RECIPES, nbytes: int = MAX_BYTES) -> None:
        self._entries, self._limit = entries, nbytes
        self._lock = threading.Lock()
        self._recipes: OrderedDict[_Key, tuple[Recipe, int]] = OrderedDict()
        self._held = 0

    def __len__(self) -> int:
        return len(self._recipes)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._held

    def find(self, config: bytes, header: bytes, nbytes: int, terms: Terms) -> Recipe | None:
        """The recipe for adapters of one file, if it is held.

        Args:
            header: the bytes before the data.
            nbytes: of the file.
            terms: on which it is staged.
        """
        key = (config, header, nbytes, terms.layout.fingerprint())
        with self._lock:
            recipe, _ = self._recipes.get(key, (None, 0))
            if recipe is None or not recipe.terms.same(terms):
                return None
            self._recipes.move_to_end(key)
            return recipe

    def learn(
        self,
        raw: RawAdapter,
        terms: Terms,
        tensors: Sequence[Tensor],
        audited: Audited,
        image: SlotImage,
        report: LoadReport,
    ) -> None:
        """Keep how an adapter was staged, if its kind can have one and there is room."""
        if not _plain(raw, tensors, audited):
            return
        file = raw.shards[0]
        start = file.nbytes - tensors[0].block.nbytes
        key = (raw.config, file[:start].tobytes(), file.nbytes, terms.layout.fingerprint())
        recipe = _recipe(terms, start, tensors[0].dtype, audited.pairs, image, report)
        size = recipe.nbytes + len(key[0]) + len(key[1])
        if size > self._limit:
            return
        with self._lock:
            self._held += size - self._recipes.pop(key, (None, 0))[1]
            self._recipes[key] = recipe, size
            while self._held > self._limit or len(self._recipes) > self._entries:
                self._held -= self._recipes.popitem(last=False)[1][1]


def _plain(raw: RawAdapter, tensors: Sequence[Tensor], audited: Audited) -> bool:
    """True for an adapter of pairs alone whose factors are one file's tensors, one for one, of one
    dtype: all else depends on more than where its values lie."""
    if not audited.pairs or audited.vectors or audited.overlay != OverlayPlan():
        return False
    factors = [id(t) for pair in audited.pairs for t in (pair.a, pair.b)]
    block = tensors[0].block
    return (
        len(raw.shards) == 1
        and sorted(factors) == sorted(id(t) for t in tensors)
        and len({t.dtype for t in tensors}) == 1
        and all(t.block is block for t in tensors)
        and np.shares_memory(block, raw.shards[0])
    )


def _recipe(
    terms: Terms,
    start: int,
    dtype: str,
    pairs: Sequence[PairTensors],
    image: SlotImage,
    report: LoadReport,
) -> Recipe:
    item = ITEM_BYTES[dtype]
    columns = (
        [p.index for p in pairs],
        [p.rank for p in pairs],
        [p.a.begin // item for p in pairs],
        [p.b.begin // item for p in pairs],
    )
    return Recipe(
        terms=terms,
        start=start,
        dtype=dtype,
        pairs=np.array(columns, np.int64).T,
        image=replace(image, buffer=np.empty(0, np.uint8), digest="", lent=False),
        report=_own(report, {}),
    )


def _moves(recipe: Recipe) -> list[_Move]:
    layout, size = recipe.terms.layout, recipe.terms.layout.elem.size
    most = MOVE_BYTES // ITEM_BYTES[recipe.dtype]
    moves: list[_Move] = []
    pairs: list[list[int]] = recipe.pairs.tolist()
    for index, rank, a, b in pairs:
        place, a_start = layout.pairs[index], layout.a_start(index, recipe.image.annex)
        b_start = a_start + place.stride * place.k_in * size
        whole = [(a, a_start, place.k_in)]
        if rank == place.stride:
            whole.append((b, b_start, place.n_out))
        else:
            step = most // rank
            for row in range(0, place.n_out, step):
                rows, begin = min(step, place.n_out - row), b + row * rank
                target = b_start // size + row * place.stride
                moves.append((begin + rows * rank, begin, target, rows, place.stride, rank))
        for begin, offset, width in whole:
            for done in range(0, rank * width, most):
                count = min(most, rank * width - done)
                target = offset // size + done
                moves.append((begin + done + count, begin + done, target, 1, count, count))
    return _joined(sorted(moves), most)


def _joined(moves: list[_Move], most: int) -> list[_Move]:
    """Moves that are side by side in file and slot as one of at most ``most`` elements: in most
    files A and B are, and some modules."""
    made: list[_Move] = []
    for move in moves:
        end, begin, place, _, stride, width = move
        if made and stride == width and made[-1][4] == made[-1][5]:
            last_end, last, target = made[-1][:3]
            if last_end == begin and target + begin - last == place and end - last <= most:
                made[-1] = (end, last, target, 1, end - last, end - last)
                continue
        made.append(move)
    return made


def _own(report: LoadReport, seconds: dict[str, float]) -> LoadReport:
    """A copy that shares nothing a holder could change."""
    return replace(
        report,
        by_module=dict(report.by_module),
        dtypes=dict(report.dtypes),
        vectors=dict(report.vectors),
        seconds=seconds,
    )
