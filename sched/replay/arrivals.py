"""Requests and commands over time: readers of public traces, S-LoRA's generator, control events.

Every reader gives :class:`Arrival` in time order, starting at 0 s. Randomness is a seed.
"""

from __future__ import annotations

import csv
import datetime
import heapq
import random
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal

import msgspec

from ...errors import RequestError
from ..core import events as ev
from .record import read_trace

#: Tokens that one prefix id of a trace stands for.
PREFIX_TOKENS = 512


class Arrival(msgspec.Struct, frozen=True):
    """``at``: seconds; ``prompt``, ``tokens``: token counts; ``adapter`` ``None`` = base;
    ``prefix``: ids of 512-token blocks, equal ids = equal text (Mooncake)."""

    at: float
    adapter: str | None
    prompt: int
    tokens: int
    prefix: tuple[int, ...] = ()


class Control(msgspec.Struct, frozen=True):
    """An operator's command: ``verb`` as the engine's method names; ``cancel`` leaves early."""

    at: float
    verb: Literal["load", "replace", "unload", "cancel"]
    name: str


def _bad(path: str | Path, error: Exception) -> RequestError:
    return RequestError(
        f"not a trace of this format: {error!r}", code="bad-trace", subject=str(path)
    )


def read_azure(path: str | Path, limit: int = 0) -> list[Arrival]:
    """Azure LLM inference trace 2023 (CSV; TIMESTAMP in UTC with 100 ns digits, ContextTokens,
    GeneratedTokens). ``limit``: rows at most, 0 = all. Raises RequestError ``bad-trace``."""
    arrivals: list[Arrival] = []
    first: datetime.datetime | None = None
    try:
        with open(path, newline="") as file:
            for row in csv.DictReader(file):
                whole, _, part = row["TIMESTAMP"].partition(".")
                when = datetime.datetime.fromisoformat(whole)
                first = first or when
                at = (when - first).total_seconds() + float(f"0.{part or 0}")
                prompt, tokens = int(row["ContextTokens"]), int(row["GeneratedTokens"])
                arrivals.append(Arrival(at, None, prompt, tokens))
                if len(arrivals) == limit:
                    break
    except (KeyError, ValueError) as error:
        raise _bad(path, error) from error
    return _from_zero(arrivals)


class _Mooncake(msgspec.Struct):
    timestamp: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_mooncake(path: str | Path, limit: int = 0) -> list[Arrival]:
    """Mooncake trace (JSONL; timestamp in ms, input_length, output_length, hash_ids)."""
    arrivals: list[Arrival] = []
    decoder = msgspec.json.Decoder(_Mooncake)
    try:
        with open(path, "rb") as file:
            for line in file:
                row = decoder.decode(line)
                at = row.timestamp / 1000
                arrivals.append(
                    Arrival(at, None, row.input_length, row.output_length, row.hash_ids)
                )
                if len(arrivals) == limit:
                    break
    except msgspec.MsgspecError as error:
        raise _bad(path, error) from error
    return _from_zero(arrivals)


def read_servegen(
    path: str | Path,
    *,
    seconds: float,
    seed: int,
    speed: float = 1.0,
    prompt: tuple[int, int] = (16, 512),
    tokens: tuple[int, int] = (8, 256),
) -> list[Arrival]:
    """ServeGen client table (CSV; per client and window: rate_rps, pattern Gamma or Weibull with
    param1 = shape, param2 = scale in s). A client is an adapter. ``speed`` divides every rate;
    lengths, which the table has not, are drawn evenly from the given ranges."""
    rng = random.Random(seed)
    arrivals: list[Arrival] = []
    try:
        with open(path, newline="") as file:
            rows = [r for r in csv.DictReader(file) if float(r["window_start_s"]) < seconds]
        for row in rows:
            start, rate = float(row["window_start_s"]), float(row["rate_rps"])
            if rate <= 0:
                continue
            shape, scale = float(row["param1"]), float(row["param2"]) * speed
            at, end = start, min(start + 600.0, seconds)
            while True:
                if row["pattern"] == "Gamma":
                    at += rng.gammavariate(shape, scale)
                else:
                    at += rng.weibullvariate(scale, shape)
                if at >= end:
                    break
                lengths = rng.randint(*prompt), rng.randint(*tokens)
                arrivals.append(Arrival(at, f"c{row['client']}", *lengths))
    except (KeyError, ValueError) as error:
        raise _bad(path, error) from error
    return sorted(arrivals, key=lambda a: a.at)


def read_recorded(path: str | Path) -> list[Arrival]:
    """The requests of a trace rota recorded itself."""
    _, lines = read_trace(path)
    arrivals: list[Arrival] = []
    for _, line in lines:
        if isinstance(line.event, ev.Submit):
            event = line.event
            one = Arrival(line.now, event.adapter, len(event.prompt), event.max_tokens)
            arrivals += [one] * (1 + len(event.siblings))
    return _from_zero(arrivals)


def slora(
    *,
    adapters: int,
    rate: float,
    seconds: float,
    seed: int,
    alpha: float = 1.0,
    cv: float = 1.0,
    prompt: tuple[int, int] = (8, 512),
    tokens: tuple[int, int] = (8, 512),
) -> list[Arrival]:
    """S-LoRA's synthetic load (Sheng et al. 2023, section 7): gaps from a Gamma law of the given
    ``rate`` (1/s) and coefficient of variation ``cv``; adapters by a power law, index
    ``floor(U**(1/alpha) * adapters)``: the smaller ``alpha``, the more skewed; lengths even."""
    rng = random.Random(seed)
    shape, at = 1.0 / (cv * cv), 0.0
    arrivals: list[Arrival] = []
    while True:
        at += rng.gammavariate(shape, cv * cv / rate)
        if at >= seconds:
            return arrivals
        name = power_law(rng, adapters, alpha)
        arrivals.append(Arrival(at, name, rng.randint(*prompt), rng.randint(*tokens)))


def power_law(rng: random.Random, adapters: int, alpha: float) -> str:
    """One adapter name, ``a0`` the most wanted."""
    return f"a{min(adapters - 1, int(rng.random() ** (1.0 / alpha) * adapters))}"


def with_adapters(
    arrivals: Sequence[Arrival], *, adapters: int, alpha: float, base_share: float, seed: int
) -> list[Arrival]:
    """Give the requests of a one-model trace adapters by a power law, or base with the given
    share. A conversation (its second prefix id; the first is common to all) keeps its adapter."""
    rng = random.Random(seed)
    sessions: dict[int, str | None] = {}
    out = []
    for arrival in arrivals:
        name = None if rng.random() < base_share else power_law(rng, adapters, alpha)
        if len(arrival.prefix) > 1:
            name = sessions.setdefault(arrival.prefix[1], name)
        out.append(msgspec.structs.replace(arrival, adapter=name))
    return out


def controls(names: Sequence[str], *, rate: float, seconds: float, seed: int) -> Iterator[Control]:
    """Operator's commands at ``rate`` (1/s), evenly over names and verbs."""
    rng = random.Random(seed)
    verbs: tuple[Literal["load", "replace", "unload", "cancel"], ...] = (
        "load",
        "replace",
        "replace",
        "unload",
        "cancel",
    )
    at = 0.0
    while True:
        at += rng.expovariate(rate)
        if at >= seconds:
            return
        yield Control(at, rng.choice(verbs), rng.choice(names))


def merged(
    arrivals: Sequence[Arrival], commands: Iterator[Control] | Sequence[Control]
) -> Iterator[Arrival | Control]:
    """Both in time order; commands first at equal times."""
    return heapq.merge(commands, arrivals, key=lambda item: item.at)


def scaled(arrivals: Sequence[Arrival], speed: float, context: int) -> list[Arrival]:
    """Times divided by ``speed``; lengths cut so that prompt and answer fit ``context``."""
    out = []
    for a in arrivals:
        prompt = min(a.prompt, context // 2)
        tokens = max(1, min(a.tokens, context - prompt - 1))
        out.append(Arrival(a.at / speed, a.adapter, max(1, prompt), tokens, a.prefix))
    return out


def prompt_of(arrival: Arrival, own: int, vocab: int) -> tuple[int, ...]:
    """``arrival.prompt`` token ids below ``vocab``: the text of its prefix ids, equal for equal
    ids, then text of its ``own`` number."""
    shared = (
        (prefix * 1_000_003 + i * 7) % vocab
        for prefix in arrival.prefix
        for i in range(PREFIX_TOKENS)
    )
    known = tuple(islice(shared, arrival.prompt))
    rest = range(arrival.prompt - len(known))
    return known + tuple((own * 65_537 + i * 11) % vocab for i in rest)


def _from_zero(arrivals: list[Arrival]) -> list[Arrival]:
    arrivals.sort(key=lambda a: a.at)
    first = arrivals[0].at if arrivals else 0.0
    return [msgspec.structs.replace(a, at=a.at - first) for a in arrivals]
