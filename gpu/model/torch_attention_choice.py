"""Which way a model attends by: the first of the paged kernels that is there and agrees.

What it owns: the order of the candidates. Invariants: a way is used only after
`torch_attention_probe` has seen it agree on this device with this model's geometry; what is passed
over is logged once and kept with its reason; a way asked for by name is used or refused, never
replaced.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from ...errors import DeviceError
from .torch_attention import AttentionName, AttentionSpec, TorchAttention
from .torch_attention_flashinfer import FlashInferAttention
from .torch_attention_probe import Make, why_not
from .torch_attention_varlen import restore_varlen, varlen_activated, varlen_as_it_is

logger = logging.getLogger("rota.gpu.model.torch_attention")


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to try.

    Attributes:
        name: what the option calls it. via: what sets it apart from others of that name.
        make: raises where it cannot be had. undo: called when it was passed over.
    """

    name: AttentionName
    via: str
    make: Make
    undo: Callable[[], None] = _nothing

    def __str__(self) -> str:
        return f"{self.name} ({self.via})" if self.via else self.name


CANDIDATES: Final[tuple[Candidate, ...]] = (
    Candidate("torch-varlen", "", varlen_as_it_is),
    Candidate("torch-varlen", "FA3", varlen_activated("FA3"), restore_varlen),
    Candidate("torch-varlen", "FA4", varlen_activated("FA4"), restore_varlen),
    Candidate("flashinfer", "", FlashInferAttention),
)
"""In order of preference; behind them `TorchAttention`, which needs no trial."""


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """What was chosen.

    Attributes:
        make: the way, of any limits.
        passed_over: the ways before it, each with the reason.
    """

    name: str
    make: Make
    passed_over: tuple[str, ...] = ()


def choose_attention(
    wanted: AttentionName,
    spec: AttentionSpec,
    *,
    graphs: bool,
    candidates: Sequence[Candidate] = CANDIDATES,
) -> AttentionChoice:
    """Try the candidates in order and take the first that agrees.

    Args:
        wanted: "auto" tries all and ends at torch's own operations; a name tries those of it.
        graphs: whether decode steps will be captured.

    Raises:
        DeviceError: attention-unavailable (a way asked for by name; ``found`` says why), and that
            of a device that a candidate has broken.
    """
    passed: list[str] = []
    for candidate in candidates:
        if wanted not in ("auto", candidate.name):
            continue
        begin = time.perf_counter()
        try:
            fault = why_not(candidate.make, spec, graphs=graphs)
        except DeviceError:
            logger.error("attention: the device was lost while %s was tried", candidate)
            raise
        if fault is None:
            seconds = time.perf_counter() - begin
            logger.info("attention: %s agrees with torch's (%.1f s)", candidate, seconds)
            return AttentionChoice(candidate.name, candidate.make, tuple(passed))
        candidate.undo()
        passed.append(f"{candidate}: {fault.reason}")
        # A kernel that is not installed is nobody's fault; one that is there and wrong is.
        level = logging.WARNING if fault.made else logging.INFO
        logger.log(level, "attention: %s is not used: %s", candidate, fault.reason)
    if wanted in ("auto", "torch"):
        return AttentionChoice("torch", TorchAttention, tuple(passed))
    raise DeviceError(
        "the way to attend that was asked for cannot be used",
        code="attention-unavailable",
        subject=wanted,
        expected='a kernel that agrees with torch\'s, or attention="auto"',
        found="; ".join(passed),
    )
