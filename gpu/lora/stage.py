"""From a source to a slot image: read, audit, pack, and the digest beside one or two of them.

What it owns: the order of the phases, their times and the points where staging can be cancelled.
Invariants: touches no slot; returns everything or raises; the same bytes give the same image. Many
staging workers may run it at once: nothing is shared but the layout, which is frozen, and recipes,
which have a lock.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from ...errors import StagingError
from .affine import held_vectors, pack_affine
from .annex import check_annex
from .audit import Audited, audit
from .buffers import blank
from .config import PeftConfig, parse_config
from .dims import LoraModule
from .image import SlotImage
from .intake import Intake
from .layout import SlotLayout
from .mlx import to_peft_tensors
from .overlay import BaseRows, pack_overlay
from .pack import PairTensors, pack_pairs, reuse_buffer
from .recipe import Recipes, Terms
from .report import LoadReport, ModuleReport
from .safefile import FileLimits, Tensor, parse_shards
from .source import AdapterSource, StreamedSource


@dataclass(frozen=True, slots=True)
class StageLimits:
    """Bounds on what staging will read, and on the annex it will make: bytes of the arena, or
    ``None`` for any the layout allows."""

    files: FileLimits = field(default_factory=FileLimits)
    annex_bytes: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StagedAdapter:
    """An accepted adapter: its image, the report, and the digest (hex SHA-256)."""

    image: SlotImage
    report: LoadReport
    digest: str


Buffer = npt.NDArray[np.uint8] | bytearray | memoryview
Held = Callable[[str], "StagedAdapter | None"]
"""Digest -> what was staged from the same place with that content, if it is still held."""


class SelfStaging(Protocol):
    """A source that knows a shorter way to an image than its bytes (a peer that packs ahead).

    What it returns must be what `stage` would have made of the same bytes: audited, to the last
    bit, with the same refusals.
    """

    def stage_for(
        self,
        layout: SlotLayout,
        limits: StageLimits,
        base_rows: BaseRows | None = None,
        *,
        clock: Callable[[], float] = ...,
        cancelled: Callable[[], bool] | None = None,
        buffer: Buffer | None = None,
        held: Held | None = None,
    ) -> StagedAdapter:
        """See `stage`."""
        ...


def stage(
    source: AdapterSource | SelfStaging,
    layout: SlotLayout,
    limits: StageLimits | None = None,
    base_rows: BaseRows | None = None,
    *,
    clock: Callable[[], float] = time.perf_counter,
    cancelled: Callable[[], bool] | None = None,
    buffer: Buffer | Callable[[int], npt.NDArray[np.uint8]] | None = None,
    held: Held | None = None,
    recipes: Recipes | None = None,
) -> StagedAdapter:
    """Read one adapter and pack it for ``layout``.

    Args:
        source: where the bytes come from; one that is `SelfStaging` does it all itself.
        layout: of the pool it is for.
        limits: bounds on what is read; default `StageLimits()`.
        base_rows: the base model's matrices, needed only for ``modules_to_save`` of embed_tokens
            or lm_head, for DoRA and for trained biases.
        clock: seconds, for the report.
        cancelled: asked before each phase; True ends staging.
        buffer: writable bytes to pack into, at least as many as the image has, whatever is in them,
            or what makes them, told how many; default fresh.
        held: asked by a source that is `SelfStaging` once it knows the digest: what this gives is
            returned as it is.
        recipes: of adapters staged before; this one's is added. They make staging faster and change
            nothing in what comes of it; not used where ``buffer`` is given.

    Raises:
        RejectError: the adapter's own fault, codes in docs/reject-codes.md; annex-exceeds-arena.
        StagingError: adapter-unreadable; stage-cancelled.
        InternalError: bad-buffer.
    """
    limits = StageLimits() if limits is None else limits
    if hasattr(source, "stage_for"):  # asking for the whole protocol takes many times as long
        assert not callable(buffer)  # such a source knows the size before the buffer is needed
        return cast(SelfStaging, source).stage_for(
            layout, limits, base_rows, clock=clock, cancelled=cancelled, buffer=buffer, held=held
        )
    marks = [clock()]

    def phase_done() -> None:
        marks.append(clock())
        if cancelled is not None and cancelled():
            raise StagingError("staging was cancelled", code="stage-cancelled")

    terms = Terms(layout, limits.files, base_rows)
    raw, hashing = None, 0.0
    digest: Callable[[], str] | None = None
    if recipes is not None and buffer is None and isinstance(source, StreamedSource):
        intake = Intake(recipes, terms, clock)
        raw = source.stream(limits.files, intake)
        packed = intake.packed() if raw is None else None
        if intake.recipe is not None and packed is not None:
            phase_done()
            check_annex(intake.recipe.image.annex_bytes, limits.annex_bytes)
            name, seconds = intake.digest.hexdigest(), dict(intake.seconds)
            seconds = {"read": marks[1] - marks[0] - sum(seconds.values()), **seconds}
            return StagedAdapter(
                intake.recipe.image_of(packed, name), intake.recipe.report_of(seconds), name
            )
        if intake.hashed:
            digest, hashing = intake.digest.hexdigest, intake.seconds["digest"]
    if raw is None:
        # What hasattr tells of a union one checker follows, and the other does not.
        raw = source.read(limits.files)  # pyright: ignore[reportAttributeAccessIssue]
    phase_done()
    with ExitStack() as stack:
        if digest is None:
            # SHA-256 takes longer than audit and packing together, and gives up the GIL meanwhile.
            beside = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="rota-digest"))
            digest = beside.submit(raw.digest).result
        config = parse_config(raw.config, max_bytes=limits.files.config_bytes)
        tensors = parse_shards(raw.shards, limits.files)
        if config.mlx:
            tensors = to_peft_tensors(tensors)
        audited = audit(config, tensors, layout, base_rows)
        phase_done()
        facts = _facts(audited, layout)
        nbytes = layout.slot_bytes + (0 if facts.annex is None else facts.annex.nbytes)
        check_annex(nbytes - layout.slot_bytes, limits.annex_bytes)
        given = buffer(nbytes) if callable(buffer) else buffer
        packed = blank(nbytes) if given is None else reuse_buffer(given, nbytes)
        pack_pairs(audited.pairs, layout, packed, facts.annex)
        pack_affine(audited.vectors, layout, packed, facts.annex)
        pack_overlay(audited.overlay, layout, packed, facts.annex)
        phase_done()
        name = digest()
    phase_done()
    image = replace(facts, buffer=packed, digest=name, lent=buffer is not None)
    names = ("read", "audit", "pack", "digest")
    seconds = {n: end - begin for n, begin, end in zip(names, marks, marks[1:], strict=False)}
    seconds["read"] -= hashing
    seconds["digest"] += hashing
    sizes = (image.annex_bytes, raw.nbytes)
    report = _report(config, tensors, audited, layout, *sizes, seconds)
    if recipes is not None:
        recipes.learn(raw, terms, tensors, audited, image, report)
    return StagedAdapter(image, report, name)


def _facts(audited: Audited, layout: SlotLayout) -> SlotImage:
    """All of the image but its bytes and digest."""
    n_pairs = len(layout.pairs)
    held, ranks = [0.0] * n_pairs, [0] * n_pairs
    for pair in audited.pairs:
        held[pair.index], ranks[pair.index] = pair.scale, pair.rank
    scales = np.array(held, np.float32)
    scales.flags.writeable = False
    return laid_out(
        layout,
        scales,
        tuple(ranks),
        embed_rows=audited.overlay.embed_count,
        head_rows=audited.overlay.head_count,
        affine=held_vectors(audited.vectors, layout),
    )


def laid_out(
    layout: SlotLayout,
    scales: npt.NDArray[np.float32],
    ranks: tuple[int, ...],
    *,
    embed_rows: int,
    head_rows: int,
    affine: tuple[bool, ...],
) -> SlotImage:
    """An image of these facts without bytes and digest: where everything lies follows from them."""
    present = tuple(rank > 0 for rank in ranks)
    return SlotImage(
        buffer=np.empty(0, np.uint8),
        present=present,
        scales=scales,
        ranks=ranks,
        digest="",
        fingerprint=layout.fingerprint(),
        embed_rows=embed_rows,
        head_rows=head_rows,
        affine=affine,
        annex=layout.annex_for(present, affine, embed_rows, head_rows),
    )


def _report(
    config: PeftConfig,
    tensors: list[Tensor],
    audited: Audited,
    layout: SlotLayout,
    annex_bytes: int,
    file_bytes: int,
    seconds: dict[str, float],
) -> LoadReport:
    modules = _modules(audited, layout)
    return LoadReport(
        tensors=len(tensors),
        pairs=len(audited.pairs),
        by_module={module.module: module.pairs for module in modules},
        ignored=config.ignored,
        notes=config.notes + audited.notes,
        ranks=tuple(sorted(Counter(p.rank for p in audited.pairs).items())),
        scales=tuple(sorted(Counter(p.scale for p in audited.pairs).items())),
        dtypes=dict(Counter(t.dtype for t in tensors)),
        embed_rows=audited.overlay.embed_count,
        head_rows=audited.overlay.head_count,
        vectors=dict(Counter(kind for v in audited.vectors for kind in v.kinds)),
        slot_bytes=layout.slot_bytes,
        annex_bytes=annex_bytes,
        file_bytes=file_bytes,
        seconds=seconds,
        modules=modules,
    )


def _modules(audited: Audited, layout: SlotLayout) -> tuple[ModuleReport, ...]:
    found: dict[LoraModule, list[PairTensors]] = {}
    for pair in audited.pairs:
        found.setdefault(layout.pairs[pair.index].module, []).append(pair)
    return tuple(
        ModuleReport(
            module.label,
            len(pairs),
            tuple(sorted({pair.rank for pair in pairs})),
            tuple(sorted({round(pair.scale, 6) for pair in pairs})),
        )
        for module, pairs in sorted(found.items())
    )
