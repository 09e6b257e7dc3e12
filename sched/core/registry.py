"""Names, versions, sources and host images. Owns what is known, not where it lies on the device."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from ...errors import InternalError
from .events import Failure
from .identity import adapter_id
from .jobs import Job


@dataclass(slots=True, eq=False)
class Version:
    """One content of one name. ``slot`` -1 = not resident; ``image`` -1 = not in the host cache.
    ``annex``: bytes it needs in the arena."""

    name: str
    generation: int
    adapter_id: int
    digest: str
    source: int
    image: int
    slot: int = -1
    rank: int = 0
    annex: int = 0


@dataclass(slots=True, eq=False)
class Name:
    """A known name: its current version (``None`` until first staged) and its jobs in order."""

    name: str
    source: int
    generation: int
    current: Version | None = None
    jobs: deque[Job] = field(default_factory=deque)
    failed: Failure | None = None
    failed_until: float = 0.0
    #: Known only through jobs that have not succeeded yet: forgotten if the last of them fails.
    provisional: bool = False
    #: Prompt tokens of admitted requests, and how many of them the prefix cache had.
    queried: int = 0
    hit: int = 0

    def reserve(self) -> int:
        """A generation nobody had before; one that is not used in the end stays unused."""
        self.generation += 1
        return self.generation

    def version(self, generation: int, digest: str, source: int, image: int) -> Version:
        """The version of a reserved generation."""
        ident = adapter_id(self.name, generation)
        return Version(self.name, generation, ident, digest, source, image)


class Registry:
    """Known names, reference-counted sources, and the bounded host image cache (LRU by bytes)."""

    def __init__(self, image_bytes: int, max_remembered: int) -> None:
        self.names: dict[str, Name] = {}
        self._sources: dict[int, int] = {}
        self._images: OrderedDict[int, int] = OrderedDict()
        self._holders: dict[int, int] = {}
        self._versions: dict[int, set[Version]] = {}
        #: Images that lost their last version or job: the next trim drops those that no stage
        #: could find again.
        self._loose: set[int] = set()
        self._reusable: set[int] = set()
        self._image_budget = image_bytes
        self.image_bytes = 0
        # A name that comes back must not reuse a generation, or caches keyed by adapter_id would
        # be stale. Remembered per name, bounded: what falls out raises the floor for all.
        self._last: OrderedDict[str, int] = OrderedDict()
        self._max_remembered = max_remembered
        self._floor = 0

    # names ------------------------------------------------------------------------------------
    def add(self, name: str, source: int) -> Name:
        generation = max(self._last.pop(name, 0), self._floor)
        entry = self.names[name] = Name(name, source, generation)
        self.hold_source(source)
        return entry

    def forget(self, entry: Name) -> list[int]:
        """Remove a name; returns sources nobody needs any more."""
        del self.names[entry.name]
        if entry.generation:
            self._last[entry.name] = entry.generation
            if len(self._last) > self._max_remembered:
                _, generation = self._last.popitem(last=False)
                self._floor = max(self._floor, generation)
        if entry.current is not None:
            self.unlink(entry.current)
        return self.release_source(entry.source)

    # sources ----------------------------------------------------------------------------------
    def hold_source(self, source: int) -> None:
        self._sources[source] = self._sources.get(source, 0) + 1

    def release_source(self, source: int) -> list[int]:
        self._sources[source] -= 1
        if self._sources[source]:
            return []
        del self._sources[source]
        return [source]

    # images -----------------------------------------------------------------------------------
    def image_staged(self, image: int, nbytes: int, *, reusable: bool = False) -> None:
        """A job holds a fresh (or again used) image; see `StageDone` for ``reusable``."""
        if reusable:
            self._reusable.add(image)
        if image not in self._images:
            self._images[image] = nbytes
            self.image_bytes += nbytes
        self._images.move_to_end(image)
        self._holders[image] = self._holders.get(image, 0) + 1

    def image_released(self, image: int) -> None:
        self._holders[image] -= 1
        if not self._holders[image]:
            del self._holders[image]
            self._loose.add(image)

    def knows_image(self, image: int) -> bool:
        return image in self._images

    def link(self, version: Version) -> None:
        """The version's content is in this image, for as long as the cache keeps it."""
        self._versions.setdefault(version.image, set()).add(version)

    def unlink(self, version: Version) -> None:
        users = self._versions.get(version.image)
        if users is not None:
            users.discard(version)
            if not users:
                del self._versions[version.image]
                self._loose.add(version.image)
        version.image = -1

    def trim(self) -> list[int]:
        """Images to drop: those that neither a version nor a later stage can use, then, until the
        cache fits, the least recently used, those of no version first; never one a job holds."""
        dropped: list[int] = []
        for image in sorted(self._loose):
            if image in self._images and image not in self._reusable and self._unused(image):
                dropped.append(self._drop(image))
        self._loose.clear()
        if self.image_bytes > self._image_budget:
            order = sorted(self._images, key=lambda image: image in self._versions)
            for image in order:
                if self.image_bytes <= self._image_budget:
                    break
                if image not in self._holders:
                    dropped.append(self._drop(image))
        return dropped

    def _unused(self, image: int) -> bool:
        return image not in self._holders and image not in self._versions

    def _drop(self, image: int) -> int:
        self.image_bytes -= self._images.pop(image)
        self._reusable.discard(image)
        for version in self._versions.pop(image, set()):
            version.image = -1
        return image

    def forget_images(self) -> list[int]:
        """None fits the pool any more (and no job holds one): all of them, to be dropped."""
        return [self._drop(image) for image in sorted(self._images)]

    def check(self, jobs: list[Job]) -> None:
        """Holds equal holders: images by jobs, sources by names and jobs, bytes by images."""
        images: dict[int, int] = {}
        sources: dict[int, int] = {}
        for job in jobs:
            sources[job.source] = sources.get(job.source, 0) + 1
            if job.image >= 0:
                images[job.image] = images.get(job.image, 0) + 1
        for entry in self.names.values():
            sources[entry.source] = sources.get(entry.source, 0) + 1
        if images != self._holders or sources != self._sources:
            raise InternalError("holds and holders disagree", subject="registry")
        if self.image_bytes != sum(self._images.values()):
            raise InternalError("image bytes and images disagree", subject="registry")
        useful = self._holders.keys() | self._versions.keys() | self._loose | self._reusable
        if not self._images.keys() <= useful or not self._reusable <= self._images.keys():
            raise InternalError("an image is kept for nobody", subject="registry")
        over = self.image_bytes > self._image_budget
        if over and any(i not in self._holders for i in self._images):
            raise InternalError("the image cache is over its budget", subject="registry")
