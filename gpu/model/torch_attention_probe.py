"""Whether a way to attend can be trusted with a model: a small problem of the model's own geometry.

What it owns: nothing that outlives a call. Invariants: the way is compared with
`TorchAttention` on the same device, element by element, in everything a runner asks of it: decode
steps at the edges of blocks, chunks with and without a prefix beside single tokens, and a captured
decode step replayed with other lengths, tables and contents. Cells that no row may see hold NaN,
and the unused end of each block table holds other rows' blocks.

Tolerance: an element may differ by ``TOLERANCE[dtype] * (1 + its size)``. Values are drawn from a
normal distribution of deviation 1; one key too many or too few among the shortest rows moves some
element by 0.1 and more, rounding in bf16 by less than 0.01.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from ...errors import DeviceError
from ..graphs import GraphCache, GraphKey
from ..kernels.rope import BLOCK_TOKENS
from .rows import RowInput
from .torch_attention import Attention, AttentionSpec, TorchAttention
from .torch_rows import HostRows, MixedRows, StepRows

LENGTHS: Final = (1, 15, 16, 17, 31, 32, 33, 63, 64, 100, 130)
"""Keys each row of the decode step sees; a padding row follows."""
CHANGED: Final = (130, 64, 2, 48, 16, 17, 1, 1000, 31, 65, 15)
"""And when its graph is replayed: a kernel may share a long row among more blocks."""
CHUNKS: Final = ((0, 5), (0, 33), (19, 40), (16, 1), (96, 16), (31, 2), (129, 1), (15, 17))
"""(start, tokens) of each row of the mixed step."""
BLOCKS: Final = 64
"""Width of the block tables."""
TOLERANCE: Final = {torch.bfloat16: 0.02, torch.float32: 0.001}
SEED: Final = 20

Make = Callable[[AttentionSpec], Attention]


@dataclass(frozen=True, slots=True)
class _Problem:
    """One step's rows and KV memory, on the host.

    Attributes:
        spans: (start, tokens) of each row.
        q: ``[tokens, heads, head_dim]``. keys, values: ``[cells, kv_heads, head_dim]``.
    """

    spans: tuple[tuple[int, int], ...]
    host: HostRows
    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


def _needed(spans: tuple[tuple[int, int], ...]) -> int:
    return sum(-(-(start + count) // BLOCK_TOKENS) for start, count in spans)


def _singles(lengths: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple((length - 1, 1) for length in lengths)


POOL: Final = max(_needed(spans) for spans in (_singles(LENGTHS), _singles(CHANGED), CHUNKS))
"""KV blocks of the problem; one more takes what padding writes."""
ZERO: Final = POOL * BLOCK_TOKENS + 1


def _problem(
    spec: AttentionSpec, spans: tuple[tuple[int, int], ...], seed: int, *, padding: int = 0
) -> _Problem:
    """The rows of ``spans`` over shuffled blocks, and ``padding`` more that see one key."""
    drawn = torch.Generator().manual_seed(seed)
    order = torch.randperm(POOL, generator=drawn).numpy().astype(np.int32)
    rows = len(spans) + padding
    tables = np.resize(order[::-1], (rows, BLOCKS))
    lens = np.ones(rows, np.int32)
    cells = (POOL + 1) * BLOCK_TOKENS
    seen = np.zeros(cells, np.bool_)
    seen[POOL * BLOCK_TOKENS :] = True
    at = 0
    for row, (start, count) in enumerate(spans):
        lens[row] = start + count
        used = -(-(start + count) // BLOCK_TOKENS)
        tables[row, :used] = order[at : at + used]
        at += used
        where = np.arange(start + count)
        seen[tables[row, where // BLOCK_TOKENS] * BLOCK_TOKENS + where % BLOCK_TOKENS] = True
    tables[len(spans) :] = POOL

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, spec.head_dim, generator=drawn)

    keys, values = normal(cells, spec.kv_heads), normal(cells, spec.kv_heads)
    for cache in (keys, values):
        cache[torch.from_numpy(~seen)] = torch.nan
        cache[POOL * BLOCK_TOKENS + 1 :] = 0
    q = normal(sum(count for _, count in spans) + padding, spec.heads)
    dtype = spec.dtype
    return _Problem(spans, HostRows(tables, lens), q.to(dtype), keys.to(dtype), values.to(dtype))


class _Placed:
    """A problem on the device, at addresses that stay."""

    def __init__(self, spec: AttentionSpec, problem: _Problem) -> None:
        up = spec.space.upload
        self.problem = problem
        self.tables = up(torch.from_numpy(problem.host.tables))
        self.lens = up(torch.from_numpy(problem.host.lens))
        self.q, self.keys, self.values = up(problem.q), up(problem.keys), up(problem.values)

    def become(self, other: _Placed) -> None:
        """Take over another one's values."""
        self.problem = other.problem
        for name in ("tables", "lens", "q", "keys", "values"):
            getattr(self, name).copy_(getattr(other, name))

    def decoded(self, way: Attention) -> torch.Tensor:
        attend = way.decode(self.tables, self.lens, ZERO)
        return attend(self.q, self.keys, self.values)

    def mixed(self, way: Attention) -> torch.Tensor:
        rows = [
            RowInput(row, -1, start, (0,) * count, (), False)
            for row, (start, count) in enumerate(self.problem.spans)
        ]
        mixed = MixedRows(StepRows.of(rows), self.tables, self.lens, self.problem.host)
        return way.mixed(mixed, ZERO)(self.q, self.keys, self.values)


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a way is not used. ``made``: it could be had, and was tried."""

    reason: str
    made: bool


def why_not(make: Make, spec: AttentionSpec, *, graphs: bool) -> Fault | None:
    """Make the way and try it; ``None`` if it agrees in everything.

    Args:
        make: raises where the way cannot be had.
        spec: of the model; the problem is smaller.
        graphs: whether decode steps will be captured.

    Raises:
        DeviceError: of a device that is lost or closed; everything else is the reason returned.
    """
    spec = replace(spec, rows=len(LENGTHS) + 1, blocks=BLOCKS)
    made = False
    try:
        with ExitStack() as stack:
            with torch.inference_mode(), spec.space.computing(spec.stream):
                way = make(spec)
            made = True
            reason = _tried(way, spec, graphs, stack)
    except Exception as error:  # whatever it dies of, another way is there
        if isinstance(error, DeviceError) and error.code in ("device-dead", "device-closed"):
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return None if reason is None else Fault(reason, made)


def _tried(way: Attention, spec: AttentionSpec, graphs: bool, stack: ExitStack) -> str | None:
    space, stream, device = spec.space, spec.stream, spec.device
    stack.callback(way.close)

    def settled() -> None:
        device.synchronize(stream)

    with torch.inference_mode():
        # What it queued ends before what it uses is let go.
        stack.callback(settled)
        sure = TorchAttention(spec)
        problems = (
            _problem(spec, _singles(LENGTHS), SEED, padding=1),
            _problem(spec, _singles(CHANGED), SEED + 1, padding=1),
            _problem(spec, CHUNKS, SEED + 2),
        )
        with space.computing(stream):
            first, other, chunks = (_Placed(spec, problem) for problem in problems)
            way.plan(first.problem.host)
            pairs = [("decode", first, first.decoded(way), first.decoded(sure))]
            pairs.append(("mixed", chunks, chunks.mixed(way), chunks.mixed(sure)))
        settled()
        for what, placed, found, expected in pairs:
            fault = _fault(found, expected, placed.problem, spec.dtype)
            if fault is not None:
                return f"{what}: {fault}"
        return _replayed(way, sure, first, other, spec, stack) if graphs else None


def _replayed(
    way: Attention,
    sure: Attention,
    first: _Placed,
    other: _Placed,
    spec: AttentionSpec,
    stack: ExitStack,
) -> str | None:
    """A decode step captured with one problem and replayed with that and another."""
    space, stream = spec.space, spec.stream
    with space.computing(stream):
        out = first.decoded(sure)
    cache = GraphCache(spec.device)

    def drained() -> None:
        # Before the way is closed, whose addresses the graph holds.
        spec.device.synchronize(stream)
        cache.drain()
        space.forget()

    stack.callback(drained)
    key = GraphKey("decode", len(first.problem.host.lens), "none", 1, BLOCKS)

    def record() -> None:
        with space.recording():
            out.copy_(first.decoded(way))

    for what, before in (("captured", None), ("replayed with other lengths", other)):
        with space.computing(stream):
            if before is not None:
                first.become(before)
            out.zero_()
            way.plan(first.problem.host)
            cache.run(key, stream, record)
            expected = first.decoded(sure)
        spec.device.synchronize(stream)
        fault = _fault(out, expected, first.problem, spec.dtype)
        if fault is not None:
            return f"decode, {what}: {fault}"
    return None


def _fault(
    found: torch.Tensor, expected: torch.Tensor, problem: _Problem, dtype: torch.dtype
) -> str | None:
    """Where the results differ most, if by too much."""
    if found.shape != expected.shape:
        return f"shape {tuple(found.shape)} where {tuple(expected.shape)} is expected"
    sure, mine = expected.float().cpu(), found.float().cpu()
    gaps = ((mine - sure).abs() / (1 + sure.abs())).amax(dim=1)
    gaps = torch.where(gaps.isnan(), torch.inf, gaps)
    token, allowed = int(gaps.argmax()), TOLERANCE[dtype]
    if float(gaps[token]) <= allowed:
        return None
    row = int(np.searchsorted(np.cumsum([count for _, count in problem.spans]), token, "right"))
    keys = int(problem.host.lens[row])
    what = f"{float(gaps[token]):.3g} off" if mine[token].isfinite().all() else "not finite"
    return f"a row of {keys} keys is {what}, {allowed:g} is allowed"
