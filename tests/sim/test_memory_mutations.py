"""Broken memory: cores that get the prefix cache, samples or spilled blocks wrong, each caught."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rota.sched.core import events as ev
from rota.sched.core import placement, registry, spill
from rota.sched.core.effects import Restore, Spill
from rota.sched.core.identity import adapter_id
from rota.sched.core.memory import KvMemory
from rota.sched.core.prefix import PrefixCache
from rota.sched.core.state import State
from rota.sched.core.tables import SeqState

from .broken import must_be_caught

Patch = pytest.MonkeyPatch


def prefixes_found_by_name_only(patch: Patch) -> None:
    roots: dict[int, int] = {}

    def remember(name: str, generation: int) -> int:
        ident = adapter_id(name, generation)
        roots[ident] = adapter_id(name, 0)
        return ident

    match, extend = PrefixCache.match, PrefixCache.extend
    patch.setattr(placement, "adapter_id", remember)
    patch.setattr(registry, "adapter_id", remember)
    patch.setattr(PrefixCache, "match", lambda s, i, *a: match(s, roots.get(i, i), *a))
    patch.setattr(PrefixCache, "extend", lambda s, i, *a: extend(s, roots.get(i, i), *a))


def one_prefix_tree_for_all_adapters(patch: Patch) -> None:
    match, extend = PrefixCache.match, PrefixCache.extend
    patch.setattr(PrefixCache, "match", lambda self, ident, *a: match(self, 0, *a))
    patch.setattr(PrefixCache, "extend", lambda self, ident, *a: extend(self, 0, *a))


def blocks_published_before_they_are_computed(patch: Patch) -> None:
    real = KvMemory.publish

    def publish(self: KvMemory, seq: Any) -> None:
        computed = seq.computed
        seq.computed = min(len(seq.tokens), len(seq.blocks) * self.size)
        real(self, seq)
        seq.computed = computed

    patch.setattr(KvMemory, "publish", publish)


def half_filled_blocks_published(patch: Patch) -> None:
    real = KvMemory.publish

    def publish(self: KvMemory, seq: Any) -> None:
        computed = seq.computed
        if len(seq.tokens) >= -(-computed // self.size) * self.size:
            seq.computed = -(-computed // self.size) * self.size
        real(self, seq)
        seq.computed = computed

    patch.setattr(KvMemory, "publish", publish)


def leased_nodes_freed(patch: Patch) -> None:
    real = PrefixCache.release

    def release(self: PrefixCache, nodes: Any, seq: int) -> None:
        nodes[:] = [node for node in nodes if seq in node.leases]
        for node in nodes:
            node.leases = {seq}
        real(self, nodes, seq)

    patch.setattr(PrefixCache, "release", release)


def last_token_read_from_the_cache(patch: Patch) -> None:
    real = PrefixCache.match
    patch.setattr(PrefixCache, "match", lambda s, i, tokens: real(s, i, [*tokens, -1]))


def samples_lease_one_by_one(patch: Patch) -> None:
    real = State.lease

    def lease(self: State, seq: Any, version: Any) -> None:
        followers, seq.followers = seq.followers, []
        real(self, seq, version)
        seq.followers = followers

    patch.setattr(State, "lease", lease)


def spilled_blocks_come_back_in_other_places(patch: Patch) -> None:
    real = spill.restore

    def restore(state: State, seq: Any, found: Any) -> None:
        real(state, seq, found)
        effect = state.out.pop()
        assert isinstance(effect, Restore)
        indexes = [i for i, _ in effect.places]
        blocks = reversed([b for _, b in effect.places])
        state.out.append(Restore(seq.id, tuple(zip(indexes, blocks, strict=True))))

    patch.setattr(spill, "restore", restore)


def the_last_block_is_not_spilled(patch: Patch) -> None:
    real = spill.begin

    def begin(state: State, seq: Any) -> None:
        real(state, seq)
        state.out = [Spill(e.seq, e.blocks[:-1]) if isinstance(e, Spill) else e for e in state.out]

    patch.setattr(spill, "begin", begin)


def runs_before_it_is_restored(patch: Patch) -> None:
    real = spill.restore

    def restore(state: State, seq: Any, found: Any) -> None:
        real(state, seq, found)
        seq.state, seq.in_flight = SeqState.PREFILL, 0
        seq.computed = seq.host_tokens

    patch.setattr(spill, "restore", restore)


def a_failed_restore_counts_as_done(patch: Patch) -> None:
    def failed(state: State, event: ev.RestoreFailed) -> None:
        spill.restore_done(state, ev.RestoreDone(event.seq))

    patch.setattr("rota.sched.core.core.spill.restore_failed", failed)


def host_memory_without_end(patch: Patch) -> None:
    patch.setattr(KvMemory, "host_free", property(lambda self: 1 << 30))


def spilled_lease_given_back(patch: Patch) -> None:
    real = spill.begin

    def begin(state: State, seq: Any) -> None:
        real(state, seq)
        state.give_lease_back(seq)

    patch.setattr(spill, "begin", begin)


MUTATIONS: list[Callable[[Patch], None]] = [
    prefixes_found_by_name_only,
    one_prefix_tree_for_all_adapters,
    blocks_published_before_they_are_computed,
    half_filled_blocks_published,
    leased_nodes_freed,
    last_token_read_from_the_cache,
    samples_lease_one_by_one,
    spilled_blocks_come_back_in_other_places,
    the_last_block_is_not_spilled,
    runs_before_it_is_restored,
    a_failed_restore_counts_as_done,
    host_memory_without_end,
    spilled_lease_given_back,
]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda m: m.__name__)
def test_a_broken_memory_is_caught(mutate: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutate(monkeypatch)
    must_be_caught(mutate.__name__, monkeypatch)
