"""A run as a Chrome trace, for ui.perfetto.dev or chrome://tracing (Trace Event Format, JSON).

Tracks: the device (steps, commits), one per slot (which version it held), staging, requests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ..core import effects as fx
from ..core import events as ev

_DEVICE, _STAGING, _SLOTS, _REQUESTS = 1, 2, 3, 4
_NAMES = {_DEVICE: "device", _STAGING: "staging", _SLOTS: "slots", _REQUESTS: "requests"}


class ChromeTrace:
    """A shell observer; :meth:`write` makes the file. Holds at most ``limit`` trace events, then
    keeps the first ones and counts the rest in :attr:`dropped`."""

    def __init__(self, limit: int = 1_000_000) -> None:
        self._events: list[dict[str, Any]] = []
        self._limit = limit
        self._open: dict[tuple[str, int], tuple[float, str, dict[str, Any]]] = {}
        self._last = 0.0
        #: When the device was last known to be done with a step: one queued behind it begins then.
        self._stepped = 0.0
        self.dropped = 0

    def __call__(self, event: ev.Event, effects: list[fx.Effect], now: float) -> None:
        self._last = now
        match event:
            case ev.StepDone(step) | ev.StepFailed(step):
                self._end("step", step, _DEVICE, 0, now, since=self._stepped)
                self._stepped = now
            case ev.CommitDone(commit) | ev.CommitFailed(commit):
                self._end("commit", commit, _DEVICE, 1, now)
            case ev.StageDone(stage) | ev.StageFailed(stage):
                self._end("stage", stage, _STAGING, stage % 64, now)
            case ev.Submit():
                about = {"adapter": event.adapter, "prompt": len(event.prompt)}
                self._begin("request", event.seq, now, f"seq {event.seq}", about)
            case _:
                pass
        for effect in effects:
            self._effect(effect, now)

    def _effect(self, effect: fx.Effect, now: float) -> None:
        match effect:
            case fx.RunStep(step, rows):
                tokens = sum(len(r.tokens) for r in rows)
                about = {"rows": len(rows), "tokens": tokens}
                self._begin("step", step, now, f"step {step}: {len(rows)} rows", about)
                self._add(
                    {"ph": "C", "name": "rows", "pid": _DEVICE, "args": {"rows": len(rows)}}, now
                )
            case fx.Commit(commit, slot, _, name, ident):
                self._begin("commit", commit, now, f"commit {name} -> {slot}", {"id": str(ident)})
                self._end("slot", slot, _SLOTS, slot, now)
                self._begin("slot", slot, now, name, {"adapter_id": str(ident)})
            case fx.Retire(slot):
                self._end("slot", slot, _SLOTS, slot, now)
            case fx.StartStage(stage, name):
                self._begin("stage", stage, now, f"stage {name}", {})
            case fx.Ended(seq, reason):
                self._end("request", seq, _REQUESTS, seq % 256, now, reason=reason)
            case _:
                pass

    def _begin(self, kind: str, ident: int, now: float, name: str, about: dict[str, Any]) -> None:
        self._open[(kind, ident)] = (now, name, about)

    def _end(
        self,
        kind: str,
        ident: int,
        pid: int,
        tid: int,
        now: float,
        since: float = 0.0,
        **more: Any,
    ) -> None:
        begun = self._open.pop((kind, ident), None)
        if begun is None:
            return
        begin, name, about = begun
        begin = max(begin, since)
        span = {"ph": "X", "name": name, "cat": kind, "pid": pid, "tid": tid}
        self._add({**span, "dur": round((now - begin) * 1e6, 1), "args": {**about, **more}}, begin)

    def _add(self, event: dict[str, Any], at: float) -> None:
        if len(self._events) >= self._limit:
            self.dropped += 1
            return
        self._events.append({**event, "ts": round(at * 1e6, 1)})

    def json(self) -> bytes:
        """The file's content; what is still open is drawn up to the last event."""
        tracks = {"step": _DEVICE, "commit": _DEVICE, "stage": _STAGING, "slot": _SLOTS}
        for kind, ident in list(self._open):
            self._end(kind, ident, tracks.get(kind, _REQUESTS), ident % 256, self._last)
        names = [
            {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
            for pid, name in _NAMES.items()
        ]
        events = sorted(self._events, key=lambda e: float(e["ts"]))
        return msgspec.json.encode({"traceEvents": names + events, "displayTimeUnit": "ms"})

    def write(self, path: str | Path) -> None:
        Path(path).write_bytes(self.json())
