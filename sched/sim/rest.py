"""The laws of rest: nothing runs, so nothing may be held.

Judged from the ledger's own books, a snapshot, and what the shell and the stager still hold.
"""

from __future__ import annotations

from ..core.snapshot import Stats
from .laws import Ledger


def at_rest(ledger: Ledger, stats: Stats, held_images: set[int], held_sources: set[int]) -> None:
    """Nothing runs: nothing may be held."""
    ledger.need(not ledger.copies.held and not stats.spill_blocks_used, "leak", "host memory")
    kept = stats.blocks_free + stats.blocks_cached
    ledger.need(kept == stats.blocks_total, "leak", "blocks")
    ledger.need(ledger.config.shares_prefixes or not stats.blocks_cached, "leak", "cached blocks")
    most = ledger.config.snapshots if ledger.config.shares_prefixes else 0
    ledger.need(stats.snapshots_kept <= most, "limit", f"{stats.snapshots_kept} snapshots")
    asked = [r for r in ledger.reqs.values() if r.first is not None]
    ledger.need(stats.prefix.hit == sum(r.hit for r in asked), "hits", f"{stats.prefix}")
    ledger.need(not any(s.leases for s in stats.slots), "leak", "leases")
    ledger.need(stats.waiting == stats.jobs == 0, "leak", "waiting requests or jobs")
    ledger.need(not any(ledger.users.values()), "leak", "slots with users")
    ledger.need(held_images == ledger.images, "leak", f"images {held_images} != {ledger.images}")
    ledger.need(held_sources == ledger.sources, "leak", f"sources {held_sources}")
    ledger.annexes.at_rest(stats)
    names = {a.name for a in stats.adapters}
    ledger.need(len(ledger.sources) <= len(names), "leak", "sources without a name")
    over = stats.image_bytes > ledger.config.image_cache_bytes
    ledger.need(not over, "limit", f"{stats.image_bytes} image bytes are kept")
    ledger.need(not ledger.commands, "answered once", f"unanswered: {ledger.commands}")
    ledger.need(all(r.ended for r in ledger.reqs.values()), "ends once", "requests without an end")
    ledger.need(all(r.closed for r in ledger.reqs.values() if r.opened), "leak", "open sequences")
    for slot in stats.slots:
        content = ledger.slot_content(slot.index)
        if slot.state == "EMPTY" and ledger.retires_work:
            ledger.need(content is None, "retire", f"slot {slot.index} still holds {content}")
        elif slot.state in ("EMPTY", "READY"):
            known = ledger.content.get(slot.adapter_id, content)
            ledger.need(content == known, "identity", f"slot {slot.index} holds {content}")
        else:
            ledger.broken("leak", f"slot {slot.index} is {slot.state} at rest")
