"""The peer's adapters in memory: generations, leases, packed images, and their budget.

What it owns: every region a client may read from. Invariants: only the directories given at the
start are ever read, and only by id; a generation's bytes never change, and it stays while it is
leased; the bytes of all regions never exceed the budget; an image is packed once per generation and
layout. Safe for many threads; calls may block on the disk.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..errors import CapacityError, RequestError, RotaError, StagingError
from ..gpu.lora.config import parse_config
from ..gpu.lora.directory import read_directory
from ..gpu.lora.image import SlotImage
from ..gpu.lora.layout import SlotLayout
from ..gpu.lora.report import LoadReport
from ..gpu.lora.safefile import FileLimits, parse_shards
from ..gpu.lora.source import RawAdapter
from ..gpu.lora.stage import StageLimits, stage
from .hashes import chunk_digests
from .layouts import DigestedAdapter, HeldSource
from .messages import MAX_IDS, Packed
from .region import Region
from .stamps import Row, Watch, rows_of, stamps_of


class Registrar(Protocol):
    """What the store needs of a verbs device."""

    def register(self, region: Region) -> None:
        """Set ``region.rkeys``. Raises RotaError when a device refuses."""
        ...

    def unregister(self, region: Region) -> None:
        """Undo it."""
        ...


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """``budget``: bytes of all regions; ``files``: of what is read; ``attempts``: to read files
    that change meanwhile."""

    budget: int = 8 << 30
    files: FileLimits = field(default_factory=FileLimits)
    attempts: int = 3


@dataclass(frozen=True, slots=True, eq=False)
class PackedImage:
    """One image, in a region of its own, and the digests of its chunks by hash. Nothing of it
    changes; what is reckoned twice at once is the same."""

    region: Region
    image: SlotImage
    report: LoadReport
    digests: dict[str, bytes] = field(default_factory=dict)
    told: dict[str, Packed] = field(default_factory=dict)
    """What clients are told of it, by the hash; its region aside."""

    def chunks(self, name: str) -> bytes:
        """See `hashes.chunk_digests`; reckoned when first asked for."""
        found = self.digests.get(name)
        if found is None:
            found = self.digests[name] = chunk_digests(self.region.array, name)
        return found


@dataclass(slots=True, eq=False)
class Generation:
    """One content of one id. ``leases`` and ``images`` belong to the store's lock."""

    adapter: str
    number: int
    raw: RawAdapter
    digest: str
    shards: tuple[Region, ...]
    leases: int = 0
    used: int = 0
    images: dict[str, PackedImage] = field(default_factory=dict)
    pack_lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(slots=True, eq=False)
class _Place:
    """One id: its directory, its current generation, and whether that is still what is there."""

    path: Path
    watch: Watch
    lock: threading.Lock = field(default_factory=threading.Lock)
    current: Generation | None = None
    count: int = 0


class Store:
    """Adapters by id.

    Args:
        directories: id -> directory; nothing else is ever opened.
        limits: bounds.
        registrar: a verbs device, or ``None``.
        clock_ns: wall clock, to know young files.

    Raises:
        RequestError: too-many-adapters.
    """

    def __init__(
        self,
        directories: Mapping[str, Path],
        limits: StoreLimits | None = None,
        registrar: Registrar | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        if len(directories) > MAX_IDS:
            raise RequestError(
                "more adapters than one peer serves",
                code="too-many-adapters",
                expected=f"at most {MAX_IDS}",
                found=len(directories),
            )
        self.limits = StoreLimits() if limits is None else limits
        self._registrar, self._clock_ns = registrar, clock_ns
        self._places = {n: _Place(path, Watch(path)) for n, path in directories.items()}
        self._lock = threading.RLock()
        self._live: set[Generation] = set()
        self._used_bytes = self._ticks = 0
        self._counts: dict[str, int] = dict.fromkeys(
            ("opens", "loads", "reloads", "packs", "pack_hits", "evictions", "unregistered"), 0
        )

    def ids(self) -> list[str]:
        """Every id, sorted."""
        return sorted(self._places)

    def counters(self) -> dict[str, int]:
        """Counts since the start, and what is held now."""
        with self._lock:
            live = list(self._live)
            return self._counts | {
                "region_bytes": self._used_bytes,
                "region_budget": self.limits.budget,
                "generations": len(live),
                "images": sum(len(g.images) for g in live),
                "leases": sum(g.leases for g in live),
            }

    def open(self, adapter: str, waits: Callable[[], None] = lambda: None) -> Generation:
        """Lease the current generation, reading it anew when its files have changed. ``waits`` is
        called before that takes long, and must not: others may want the lock it is called under.

        Raises:
            RequestError: unknown-adapter.
            RejectError: the files' own fault (header, config, size).
            StagingError: adapter-unreadable, adapter-changing.
            CapacityError: peer-memory-full, host-memory.
        """
        place = self._places.get(adapter)
        if place is None:
            raise RequestError(
                "no adapter of this id is served", code="unknown-adapter", subject=adapter[:200]
            )
        if not place.lock.acquire(blocking=False):  # someone else reads it
            waits()
            place.lock.acquire()
        try:
            if place.current is None or not place.watch.unchanged(self._clock_ns()):
                waits()
                self._refresh(adapter, place)
            generation = place.current
            assert generation is not None
            with self._lock:
                self._counts["opens"] += 1
                self._ticks += 1
                generation.leases += 1
                generation.used = self._ticks
            return generation
        finally:
            place.lock.release()

    def release(self, generation: Generation) -> None:
        """Give one lease back; a generation that is no longer current goes with its last."""
        with self._lock:
            generation.leases -= 1
            assert generation.leases >= 0
            place = self._places[generation.adapter]
            if not generation.leases and place.current is not generation:
                self._drop(generation)

    def packed(self, generation: Generation, fingerprint: str) -> PackedImage | None:
        """The leased generation's image for a layout known by its fingerprint, if it has one."""
        with self._lock:
            found = generation.images.get(fingerprint)
            self._counts["pack_hits"] += found is not None
            return found

    def pack(self, generation: Generation, layout: SlotLayout) -> PackedImage:
        """The leased generation as an image for ``layout``; packed at most once.

        Raises:
            RejectError: the audit's, exactly as from disk.
            CapacityError: peer-memory-full, host-memory.
        """
        key = layout.fingerprint()
        with generation.pack_lock:
            with self._lock:
                found = generation.images.get(key)
                if found is not None:
                    self._counts["pack_hits"] += 1
                    return found
            regions: list[Region] = []

            def room(nbytes: int) -> npt.NDArray[np.uint8]:
                regions.append(self._make(nbytes))
                return regions[-1].array

            try:
                files = StageLimits(self.limits.files)
                staged = stage(HeldSource(generation.raw), layout, files, buffer=room)
                self._publish(regions[0])
            except BaseException:
                for region in regions:
                    self._free(region)
                raise
            packed = PackedImage(regions[0], staged.image, staged.report)
            with self._lock:
                generation.images[key] = packed
                self._counts["packs"] += 1
            return packed

    def close(self) -> None:
        """Free everything; leases are the caller's to have given back."""
        with self._lock:
            for place in self._places.values():
                place.current = None
            for generation in list(self._live):
                self._drop(generation)

    # -- reading

    def _refresh(self, adapter: str, place: _Place) -> None:
        raw, stamps = self._read(place.path)
        digest = raw.digest()
        if place.current is not None and place.current.digest == digest:
            place.watch.trust(stamps)
            return
        config = parse_config(raw.config, max_bytes=self.limits.files.config_bytes)
        del config  # only that it is one: what a layout asks of it is checked when it is packed
        parse_shards(raw.shards, self.limits.files)
        known = place.current is not None
        self._give_up_idle(place)
        regions: list[Region] = []
        try:
            for shard in raw.shards:
                regions.append(self._make(shard.nbytes))
                regions[-1].array[:] = shard
                self._publish(regions[-1])
        except BaseException:
            for region in regions:
                self._free(region)
            raise
        held = DigestedAdapter(raw.config, tuple(r.array for r in regions), digest)
        with self._lock:
            place.count += 1
            made = Generation(adapter, place.count, held, digest, tuple(regions))
            old, place.current = place.current, made
            place.watch.trust(stamps)
            self._live.add(made)
            self._counts["reloads" if known else "loads"] += 1
            if old is not None and not old.leases:
                self._drop(old)

    def _give_up_idle(self, place: _Place) -> None:
        """Make room for what a place holds now: what it held is never opened again."""
        with self._lock:
            if place.current is not None and not place.current.leases:
                self._drop(place.current)
                place.current = None

    def _read(self, path: Path) -> tuple[RawAdapter, tuple[Row, ...] | None]:
        """All files as they were at one moment (same stamps before and after)."""
        for _ in range(self.limits.attempts):
            before = rows_of(path)
            config, shards = read_directory(path, self.limits.files)
            if rows_of(path) == before:
                return RawAdapter(config, shards), stamps_of(path, self._clock_ns())
        raise StagingError(
            "the adapter's files change while they are read",
            code="adapter-changing",
            subject=path.name,
            retry_after_s=1.0,
        )

    # -- memory

    def _make(self, nbytes: int) -> Region:
        with self._lock:
            if self._used_bytes + nbytes > self.limits.budget:
                self._evict(nbytes)
            if self._used_bytes + nbytes > self.limits.budget:
                raise CapacityError(
                    "the peer's memory for adapters is all in use",
                    code="peer-memory-full",
                    expected=f"at most {self.limits.budget} bytes",
                    found=self._used_bytes + nbytes,
                    retry_after_s=1.0,
                )
            self._used_bytes += nbytes
        try:
            return Region(nbytes)
        except BaseException:
            with self._lock:
                self._used_bytes -= nbytes
            raise

    def _publish(self, region: Region) -> None:
        """Register a filled region; a refusal leaves it readable over TCP."""
        if self._registrar is None:
            return
        try:
            self._registrar.register(region)
        except RotaError:
            with self._lock:
                self._counts["unregistered"] += 1

    def _evict(self, wanted: int) -> None:
        """Drop what nobody leases, least recently opened first."""
        for generation in sorted(self._live, key=lambda g: g.used):
            if self._used_bytes + wanted <= self.limits.budget:
                return
            if generation.leases:
                continue
            place = self._places[generation.adapter]
            # A generation that is being opened right now has no lease yet, but its place is locked.
            if not place.lock.acquire(blocking=False):
                continue
            try:
                if place.current is generation:
                    place.current = None
                self._drop(generation)
                self._counts["evictions"] += 1
            finally:
                place.lock.release()

    def _drop(self, generation: Generation) -> None:
        self._live.discard(generation)
        generation.raw = RawAdapter(b"", ())
        for packed in generation.images.values():
            self._free(packed.region)
        generation.images.clear()
        for region in generation.shards:
            self._free(region)

    def _free(self, region: Region) -> None:
        if self._registrar is not None and region.rkeys:
            self._registrar.unregister(region)
        region.close()
        with self._lock:
            self._used_bytes -= region.nbytes
