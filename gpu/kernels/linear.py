"""Row-invariant linear layers on the host: weights packed once, rows cut with care.

Where there are matrix tiles, bf16 weights go to the package's own kernel (`linear_tiles`), all
others to the library. There a BLAS may pick another blocking, hence another order of additions, for
another number of rows. `LinearPacker` probes each shape once and keeps the fastest way of calling
the library for which every probed row came out bit-identical in every probed batch: whole chunks of
up to 256 rows where that holds, smaller ones, padded ones of a fixed size, and at the end single
rows, which are invariant by construction.

Owns the packed weights. Invariant: `linear(x)[i]` depends on x[i] alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ...errors import DeviceError
from .linear_tiles import TileLinear, TilePacker

logger = logging.getLogger("rota.gpu.kernels.linear")

PROBE_SEED = 20
SMALL_WEIGHT = 4_000_000
"""Weights of up to this many elements are probed with chunks of 256 rows, larger ones with 64."""

Operation = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class RowPlan:
    """How rows are given to the library: oneDNN's `packed` weights or `F.linear`, and chunk bounds.

    A chunk has at most `max_rows` rows; one with fewer than `min_rows` is padded with zero rows.
    """

    packed: bool
    min_rows: int
    max_rows: int


class PackedLinear:
    """y = x W^T + b with weights packed for the library. Made by `LinearPacker`.

    ``place``: address and bytes of the weights.
    """

    def __init__(
        self,
        operation: Operation,
        plan: RowPlan,
        n_out: int,
        k_in: int,
        dtype: torch.dtype,
        place: tuple[int, int],
    ) -> None:
        self._operation = operation
        self.place = place
        self.plan = plan
        self.n_out = n_out
        self.k_in = k_in
        self.dtype = dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + b.

        Args:
            x: [m, k_in] of the weight's dtype, columns contiguous.

        Returns:
            [m, n_out], newly allocated, contiguous.
        """
        rows = x.shape[0]
        plan = self.plan
        if plan.min_rows <= rows <= plan.max_rows:
            return self._operation(x)
        if rows == 0:
            return x.new_empty((0, self.n_out))
        out = x.new_empty((rows, self.n_out))
        for start in range(0, rows, plan.max_rows):
            part = x[start : start + plan.max_rows]
            count = part.shape[0]
            if count < plan.min_rows:
                padded = x.new_zeros((plan.min_rows, self.k_in))
                padded[:count] = part
                part = padded
            out[start : start + count] = self._operation(part)[:count]
        return out


Linear = PackedLinear | TileLinear


def check_row_invariance(
    linear: Callable[[torch.Tensor], torch.Tensor],
    sizes: Sequence[int],
    rows: torch.Tensor | None = None,
) -> bool:
    """Tell whether rows of `linear` are bit-identical for every batch size in `sizes`.

    Args:
        linear: a `PackedLinear`, or anything callable with its `k_in` and `dtype`.
        sizes: batch sizes to compare; each is run with the same rows at two different places.
        rows: ``[max(sizes) + 3, k_in]`` to compare with; random ones if None.
    """
    k_in: int = getattr(linear, "k_in")  # noqa: B009  # anything callable with these two
    dtype: torch.dtype = getattr(linear, "dtype")  # noqa: B009  # anything callable with these two
    generator = torch.Generator().manual_seed(PROBE_SEED)
    shift = 3
    largest = max(sizes)
    if rows is None:
        rows = torch.randn((largest + shift, k_in), generator=generator).to(dtype)
    x = rows
    alone = torch.cat([linear(x[row : row + 1]) for row in range(min(16, largest + shift))])
    whole = [linear(x[:largest]), linear(x[shift:])]
    if not torch.equal(whole[0][: alone.shape[0]], alone[:largest]):
        return False
    if not torch.equal(whole[0][shift:], whole[1][: largest - shift]):
        return False
    for size in sizes:
        for start in (0, largest - size):
            if not torch.equal(linear(x[start : start + size]), whole[0][start : start + size]):
                return False
    return True


def cancelling_probe(
    n_out: int, k_in: int, rows: int, dtype: torch.dtype, biased: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Weight, bias and rows whose outputs are exactly 0 but for the rounding of partial sums.

    Each product has its negative at another place, and the bias one too. What is left depends on
    the order of the additions alone and is the whole output, so that another order shows in most
    elements; with random values it shows in one bf16 of ten thousand.
    """
    generator = torch.Generator().manual_seed(PROBE_SEED)
    half = max((k_in - 1) // 2, 0)
    weight, x = torch.zeros((n_out, k_in), dtype=dtype), torch.zeros((rows, k_in), dtype=dtype)
    order = torch.randperm(k_in, generator=generator)
    first, second, last = order[:half], order[half : 2 * half], order[2 * half]
    weight[:, first] = torch.randn((n_out, half), generator=generator).to(dtype)
    weight[:, second] = -weight[:, first]
    x[:, first] = torch.randn((rows, half), generator=generator).to(dtype)
    x[:, second] = x[:, first]
    if not biased:
        return weight, None, x
    bias = torch.randn(n_out, generator=generator).to(dtype)
    weight[:, last], x[:, last] = -bias, 1
    return weight, bias, x


class LinearPacker:
    """Packs weights of one dtype; remembers the plan of each shape, with and without bias.

    Args:
        tiles: takes the bf16 weights that fit it; the library gets the others.
    """

    def __init__(self, dtype: torch.dtype, tiles: TilePacker | None = None) -> None:
        self.dtype = dtype
        self._tiles = tiles
        self._plans: dict[tuple[int, int, bool], RowPlan] = {}

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """Pack `weight`; the caller may drop it afterwards unless the plan is not `packed`.

        Args:
            weight: [n_out, k_in] of the packer's dtype.
            bias: [n_out] or None.

        Raises:
            DeviceError: "bad-weight" for another dtype or shape.
        """
        if weight.dim() != 2 or weight.dtype != self.dtype:
            raise DeviceError(
                "a linear weight has the wrong shape or dtype",
                code="bad-weight",
                expected=f"[n_out, k_in] of {self.dtype}",
                found=f"{list(weight.shape)} of {weight.dtype}",
            )
        n_out, k_in = weight.shape
        if self._tiles is not None and self._tiles.fits(n_out, k_in):
            logger.debug("linear %dx%d: on tiles", n_out, k_in)
            return self._tiles.pack(weight, bias)
        shape = (n_out, k_in, bias is not None)
        plan = self._plans.get(shape)
        if plan is not None:
            return self._build(weight, bias, plan)
        small = n_out * k_in <= SMALL_WEIGHT
        for plan in _candidates(256 if small else 64):
            try:
                linear = self._build(weight, bias, plan)
                sizes = [size for size in _PROBE_SIZES if size <= plan.max_rows]
                # Rows above the chunk bound exercise the cut itself.
                sizes.append(plan.max_rows + 1)
                holds = plan.max_rows == 1 or check_row_invariance(linear, sizes)
                if holds and small and plan.max_rows > 1:
                    # How the library adds depends on the shape alone, so other weights tell more.
                    # A large weight's outputs are so many that the check above is enough.
                    probe, zero, rows = cancelling_probe(
                        n_out, k_in, sizes[-1] + 3, self.dtype, bias is not None
                    )
                    holds = check_row_invariance(self._build(probe, zero, plan), sizes, rows)
            # What this torch or this processor has not.
            except (RuntimeError, AttributeError, NotImplementedError) as error:
                logger.info("linear %dx%d: %s not usable: %s", n_out, k_in, plan, error)
                continue
            if holds:
                logger.debug("linear %dx%d %s: %s", n_out, k_in, self.dtype, plan)
                self._plans[shape] = plan
                return linear
        raise DeviceError(
            "no linear operation works on this machine", code="no-linear", subject=f"{n_out}x{k_in}"
        )

    def _build(
        self, weight: torch.Tensor, bias: torch.Tensor | None, plan: RowPlan
    ) -> PackedLinear:
        n_out, k_in = weight.shape
        if plan.packed:
            operation, place = _packed_operation(weight, bias)
        else:
            operation = _plain_operation(weight, bias)
            place = weight.data_ptr(), weight.nbytes
        return PackedLinear(operation, plan, n_out, k_in, self.dtype, place)


_PROBE_SIZES = (1, 2, 3, 5, 8, 13, 16, 17, 24, 25, 31, 32, 33, 48, 63, 64, 65, 100, 128, 200, 256)


def _candidates(largest: int) -> list[RowPlan]:
    plans = []
    for packed in (True, False):
        for max_rows in (largest, 128, 64, 16):
            if max_rows <= largest:
                plans += [RowPlan(packed, 1, max_rows), RowPlan(packed, 2, max_rows)]
        plans.append(RowPlan(packed, 16, 16))
    plans.append(RowPlan(False, 1, 1))
    return plans


def _packed_operation(
    weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[Operation, tuple[int, int]]:
    ops = torch.ops.mkldnn
    # The hint is the number of rows oneDNN lays the weight out for; these two were found invariant.
    hint = 1 if weight.dtype == torch.bfloat16 else 16
    packed = ops._reorder_linear_weight(weight.contiguous(), hint)
    bias = None if bias is None else bias.contiguous()  # the library reads it so, whatever it is
    pointwise = ops._linear_pointwise

    def operation(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = pointwise(x, packed, bias, "none", [], "")
        return y

    return operation, (ops.data_ptr(packed), ops._nbytes(packed))


def _plain_operation(weight: torch.Tensor, bias: torch.Tensor | None) -> Operation:
    def operation(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, weight, bias)

    return operation
