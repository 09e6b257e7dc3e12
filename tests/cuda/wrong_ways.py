"""Ways to attend with one thing wrong each, for the probe to find.

What they are: torch's operations, and the fault each adds to them, as a kernel could have it.
"""

from __future__ import annotations

import torch

from rota.gpu.model.torch_attention import TorchAttention
from rota.gpu.model.torch_ops import attend_cells, cells_of


class Wrong(TorchAttention):
    """Torch's operations with something changed. ``made`` was asked for, ``closed`` is counted."""

    closed = 0

    def __init__(self, spec):
        super().__init__(spec)
        self.spec = spec

    def close(self):
        type(self).closed += 1


class WrongDecode(Wrong):
    """Only decode steps are wrong."""

    def mixed(self, rows, zero):
        return TorchAttention(self.spec).mixed(rows, zero)


class Transposed(Wrong):
    """Reads pages as [kv_heads, 16]."""

    def decode(self, tables, lens, zero):
        attend = super().decode(tables, lens, zero)

        def turned(cache):
            pages = cache.view(-1, cache.shape[1], 16, cache.shape[2])
            return pages.transpose(1, 2).reshape(cache.shape)

        return lambda q, keys, values: attend(q, turned(keys), turned(values))


class OneShort(Wrong):
    def decode(self, tables, lens, zero):
        return super().decode(tables, (lens - 1).clamp(min=1), zero)


class OneLong(Wrong):
    """Sees a cell that the row may not: here NaN."""

    def decode(self, tables, lens, zero):
        return super().decode(tables, (lens + 1).clamp(max=256), zero)


class Touches(Wrong):
    """Gives unseen cells the weight 0, and multiplies them."""

    def decode(self, tables, lens, zero):
        cells = cells_of(tables)
        mask = (torch.arange(cells.shape[1], device=cells.device) < lens[:, None])[:, None, None]
        scale = self.spec.scale
        return lambda q, keys, values: attend_cells(q, keys, values, cells, mask, scale)


class InOrder(Wrong):
    """Takes blocks to lie in order."""

    def decode(self, tables, lens, zero):
        first = tables[:, :1] + torch.arange(tables.shape[1], device=tables.device)
        return super().decode(first % (tables.max() + 1), lens, zero)


class Interleaved(Wrong):
    """Gives query head h the key head h % kv_heads."""

    def decode(self, tables, lens, zero):
        attend, spec = super().decode(tables, lens, zero), self.spec
        heads = torch.arange(spec.heads).view(-1, spec.kv_heads).t().flatten()

        def other(q, keys, values):
            out = attend(q[:, heads], keys, values).view(q.shape)
            return out[:, heads.argsort()].flatten(1)

        return other


class NoScale(Wrong):
    def __init__(self, spec):
        super().__init__(spec)
        self._scale = 1.0


class Nan(Wrong):
    def decode(self, tables, lens, zero):
        attend = super().decode(tables, lens, zero)
        return lambda q, keys, values: attend(q, keys, values) * torch.nan


class Unshaped(WrongDecode):
    def decode(self, tables, lens, zero):
        attend = super().decode(tables, lens, zero)
        return lambda q, keys, values: attend(q, keys, values)[None]


class NoPrefix(Wrong):
    """A chunk sees nothing before itself."""

    def mixed(self, rows, zero):
        kinds = rows.kinds
        sure = super().mixed(rows, zero)

        def attend(q, keys, values):
            out = sure(q, keys, values)
            for chunk in kinds.chunks:
                blocks = rows.tables[chunk.row : chunk.row + 1]
                count = chunk.end - chunk.begin
                cells = cells_of(blocks)[0, chunk.start : chunk.start + count]
                k, v = (cache[cells].transpose(0, 1)[None] for cache in (keys, values))
                mine = torch.nn.functional.scaled_dot_product_attention(
                    q[chunk.begin : chunk.end].transpose(0, 1)[None],
                    k,
                    v,
                    is_causal=True,
                    enable_gqa=True,
                )
                out[chunk.begin : chunk.end] = mine[0].transpose(0, 1).flatten(1)
            return out

        return attend


class Foresees(Wrong):
    """A chunk's tokens see each other, later ones too."""

    def mixed(self, rows, zero):
        sure, spans = super().mixed(rows, zero), rows.kinds

        def attend(q, keys, values):
            out = sure(q, keys, values)
            for chunk in spans.chunks:
                count = chunk.end - chunk.begin
                tables = rows.tables[chunk.row : chunk.row + 1].expand(count, -1)
                lens = rows.lens[chunk.row].expand(count)
                mine = self.decode(tables, lens, zero)(q[chunk.begin : chunk.end], keys, values)
                out[chunk.begin : chunk.end] = mine
            return out

        return attend


class Raises(Wrong):
    def decode(self, tables, lens, zero):
        raise RuntimeError("page size 16 is not supported\nby this kernel")


class Uncapturable(WrongDecode):
    """Reads a length on the host."""

    def decode(self, tables, lens, zero):
        return super().decode(tables, lens.clamp(max=int(lens.max())), zero)


class Bakes(WrongDecode):
    """What it planned ends up in the graph."""

    def plan(self, host):
        self.lens = torch.from_numpy(host.lens.copy())

    def decode(self, tables, lens, zero):
        return super().decode(tables, self.lens, zero)


class BakesTables(WrongDecode):
    def plan(self, host):
        self.tables = torch.from_numpy(host.tables.copy())

    def decode(self, tables, lens, zero):
        return super().decode(self.tables, lens, zero)
