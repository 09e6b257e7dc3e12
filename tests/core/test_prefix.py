"""The prefix cache: what is found, who holds it, what is given up first, and when it must go."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from rota.errors import InternalError
from rota.sched.core import effects as fx
from rota.sched.core import events as ev
from rota.sched.core.blocks import BlockPool
from rota.sched.core.prefix import PrefixCache
from rota.sched.core.story import Log

World = Callable[..., Any]
SIZE = 4


class Tree:
    """A cache over few blocks, driven by hand."""

    def __init__(self, total: int = 8) -> None:
        self.log = Log(100)
        self.blocks = BlockPool(total, self.log)
        self.cache = PrefixCache(self.blocks, SIZE, self.log, True)

    def put(self, ident: int, tokens: list[int], seq: int) -> list[Any]:
        """``seq`` computes ``tokens`` behind what is known of them; returns its leases."""
        chain = self.cache.match(ident, [*tokens, -1])
        self.cache.lease(chain, seq)
        for start in range(len(chain) * SIZE, len(tokens), SIZE):
            key = tuple(tokens[start : start + SIZE])
            self.cache.extend(ident, chain, key, self.blocks.take(), seq)
        return chain

    def found(self, ident: int, tokens: list[int]) -> int:
        return len(self.cache.match(ident, [*tokens, -1]))


def test_whole_blocks_of_one_identity_are_found_and_the_last_token_is_left() -> None:
    t = Tree()
    t.put(7, list(range(8)), 1)
    assert t.found(7, list(range(8))) == 2
    assert len(t.cache.match(7, list(range(8)))) == 1, "the last token is always computed"
    assert t.found(7, [*range(6), 9, 9]) == 1
    assert t.found(7, [1, *range(7)]) == 0
    assert t.found(8, list(range(8))) == 0 and t.found(0, list(range(8))) == 0


def test_the_least_recently_used_leaf_goes_first_and_nothing_leased_goes() -> None:
    t = Tree()
    old, new = t.put(0, list(range(8)), 1), t.put(0, [*range(4), 9, 9, 9, 9], 2)
    held = t.put(0, [5] * 4, 3)
    t.cache.release(old, 1)
    t.cache.release(new, 2)
    assert t.cache.idle == 3 and t.blocks.free == 4
    assert t.cache.evict(1) == 1
    assert t.found(0, list(range(8))) == 1 and t.found(0, [*range(4), 9, 9, 9, 9]) == 2
    assert t.cache.evict(9) == 2 and t.cache.idle == 0
    assert t.found(0, [5] * 4) == 1, "leased"
    t.cache.check({held[0]: {3}})
    t.cache.release(held, 3)
    assert t.cache.evict(1) == 1 and t.blocks.free == t.blocks.total


def test_what_is_used_again_is_kept_longer() -> None:
    t = Tree()
    one, two = t.put(0, [1] * 4, 1), t.put(0, [2] * 4, 2)
    t.cache.release(one, 1)
    t.cache.release(two, 2)
    again = t.put(0, [1] * 4, 3)
    t.cache.release(again, 3)
    t.cache.evict(1)
    assert (t.found(0, [1] * 4), t.found(0, [2] * 4)) == (1, 0)


@pytest.mark.parametrize("act", ["twice", "stranger", "partial", "drop leased", "free leased"])
def test_misuse_is_a_named_bug(act: str) -> None:
    t = Tree()
    chain = t.put(3, list(range(8)), 1)
    with pytest.raises(InternalError):
        if act == "twice":
            t.cache.lease(chain, 1)
        elif act == "stranger":
            t.cache.release(chain, 2)
        elif act == "partial":
            t.cache.extend(3, chain, (1, 2), 7, 1)
        elif act == "drop leased":
            t.cache.drop(3)
        else:
            t.cache._remove(chain[-1])


def first_row(w: Any, seq: int) -> fx.Row:
    """The next planned row of ``seq``."""
    w.send(ev.Plan())
    (step,) = (e for e in w.device if isinstance(e, fx.RunStep))
    # The fixture is Any.
    return next(r for r in step.rows if r.seq == seq)  # type: ignore[no-any-return]


def test_a_second_request_starts_behind_the_blocks_of_the_first(world: World) -> None:
    w = world()
    w.submit(1, n=20, prompt=40)
    w.settle()
    w.submit(2, n=3, prompt=40)
    row = first_row(w, 2)
    assert row.start == 32 and len(row.tokens) == 8 and row.sample
    w.settle()
    assert w.output(2) == w.output(1)[:3]
    stats = w.core.stats()
    assert (stats.prefix.queried, stats.prefix.hit) == (80, 32)
    assert stats.base_prefix == stats.prefix
    # 59 tokens of the first were computed: three full blocks.
    assert stats.blocks_cached == 3 and stats.blocks_free == stats.blocks_total - 3


def test_a_prompt_of_whole_blocks_computes_its_last_one_again(world: World) -> None:
    w = world()
    w.submit(1, n=2, prompt=32)
    w.settle()
    w.submit(2, n=2, prompt=32)
    assert first_row(w, 2).start == 16


def test_chunks_are_found_while_the_first_request_still_prefills(world: World) -> None:
    w = world(max_step_tokens=32)
    w.submit(1, n=2, prompt=100)
    w.send(ev.Plan())
    w.run_device()
    w.submit(2, n=2, prompt=100)
    w.send(ev.Plan())
    w.run_device()
    w.settle()
    assert w.core.stats().prefix.hit >= 32 and w.output(1) == w.output(2)


def test_a_running_request_shares_and_its_end_leaves_the_others_blocks(world: World) -> None:
    w = world()
    w.submit(1, n=60, prompt=40)
    w.send(ev.Plan())
    w.run_device()
    w.submit(2, n=60, prompt=40)
    w.send(ev.Plan())
    w.run_device()
    one, two = w.core._state.seqs[1], w.core._state.seqs[2]
    assert one.blocks[:2] == two.blocks[:2] and one.nodes == two.nodes
    w.send(ev.Cancel(1))
    w.settle()
    assert len(w.output(2)) == 60 and w.ended[2].reason == "length"


def test_versions_and_names_never_share_and_a_version_that_is_over_keeps_nothing(
    world: World,
) -> None:
    w = world(max_loras=2)
    w.load("a", 1)
    w.load("b", 2)
    for seq, name in enumerate((None, "a", "b"), 1):
        w.submit(seq, name, prompt=40)
        w.settle()
    assert w.core.stats().prefix.hit == 0 and w.core.stats().blocks_cached == 6
    w.command(ev.Replace, "a", 3)
    w.settle()
    assert w.core.stats().blocks_cached == 4
    w.submit(4, "a", prompt=40)
    w.settle()
    assert w.core.stats().prefix.hit == 0
    w.command(ev.Unload, "b", w.now + 1)
    w.settle()
    assert w.core.stats().blocks_cached == 4
    assert {a.name: a.prefix.queried for a in w.core.stats().adapters} == {"a": 80}


def test_the_old_version_of_a_running_request_is_dropped_when_that_ends(world: World) -> None:
    w = world(max_loras=2)
    w.load("a", 1)
    w.submit(1, "a", n=30, prompt=40)
    w.send(ev.Plan())
    w.run_device()
    w.command(ev.Replace, "a", 2)
    w.run_stage()
    w.send(ev.Plan())
    w.run_device()
    assert w.core.stats().adapters[0].generation == 2
    w.settle()
    assert w.core.stats().blocks_cached == 0


def test_an_evicted_adapter_that_comes_back_finds_its_blocks(world: World) -> None:
    w = world(max_loras=1)
    w.load("a", 1)
    w.submit(1, "a", prompt=40)
    w.settle()
    w.command(ev.Load, "b", 2)
    w.settle()
    w.submit(2, "a", prompt=40)
    w.settle()
    assert w.core.stats().adapters[0].generation == 1
    assert w.core.stats().prefix.hit == 32 and w.output(1) == w.output(2)


def test_cached_blocks_are_free_for_admission(world: World) -> None:
    w = world(num_blocks=8, watermark_blocks=0)
    w.submit(1, n=20, prompt=100)
    w.settle()
    assert w.core.stats().blocks_free == 1
    w.send(ev.Submit(2, tuple(range(500, 600)), None, False, 20))
    w.settle()
    assert w.ended[2].reason == "length" and w.core.stats().preempted == 0


def test_a_preempted_request_begins_again_behind_what_was_kept(world: World) -> None:
    w = world(num_blocks=8, watermark_blocks=0, max_step_tokens=256)
    w.submit(1, n=60, prompt=40)
    w.send(ev.Submit(2, tuple(range(500, 540)), None, False, 60))
    starts: list[int] = []
    for _ in range(400):
        w.send(ev.Plan())
        starts += [
            r.start for e in w.device if isinstance(e, fx.RunStep) for r in e.rows if r.seq == 2
        ]
        if not w.run_device():
            break
    assert w.core.stats().preempted >= 1
    again = [b for a, b in itertools.pairwise(starts) if 0 < b <= a]
    assert again and all(start % 16 == 0 for start in again), starts
    assert len(w.output(1)) == len(w.output(2)) == 60


@pytest.mark.parametrize("fatal", [False, True])
def test_nothing_is_kept_of_a_device_that_failed(world: World, fatal: bool) -> None:
    w = world()
    w.submit(1, prompt=40)
    w.settle()
    assert w.core.stats().blocks_cached == 2
    w.submit(2, n=9, prompt=60)
    w.send(ev.Plan())
    w.run_device(fail="device-error", fatal=fatal)
    w.settle()
    stats = w.core.stats()
    assert stats.blocks_cached == 0 and stats.blocks_free == stats.blocks_total


def test_switched_off_nothing_is_found_or_kept(world: World) -> None:
    w = world(prefix_cache=False)
    for seq in (1, 2):
        w.submit(seq, prompt=40)
        w.settle()
    stats = w.core.stats()
    assert stats.prefix.hit == 0 and stats.blocks_free == stats.blocks_total


def test_more_decode_rows_than_a_mixed_step_holds_do_not_stop_prefill(world: World) -> None:
    w = world(mixed_step_tokens=4, num_blocks=256, max_running=16)
    for seq in range(1, 9):
        w.submit(seq, n=200, prompt=3)
    w.send(ev.Plan())
    w.run_device()
    w.send(ev.Submit(99, tuple(range(40, 52)), None, False, 4))
    for _ in range(12):
        w.send(ev.Plan())
        w.run_device()
    assert w.core.stats().prefilling == 0 and len(w.output(99)) == 4
    assert min(len(w.output(s)) for s in range(1, 9)) >= 12, "and everyone decoded in every step"


def test_a_long_prompt_that_waits_is_looked_up_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    real = PrefixCache.match

    def match(self: PrefixCache, ident: int, tokens: Any) -> Any:
        asked.append(len(tokens))
        return real(self, ident, tokens)

    monkeypatch.setattr(PrefixCache, "match", match)
    w = world(num_blocks=10, watermark_blocks=0)
    w.submit(1, n=100, prompt=16)
    w.send(ev.Plan())
    w.run_device()
    w.send(ev.Submit(2, tuple(range(500, 650)), None, False, 4))
    for _ in range(10):
        w.send(ev.Plan())
        w.run_device()
    assert asked.count(150) == 1
    w.settle()
    assert len(w.output(2)) == 4
