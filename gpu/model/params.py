"""What a request may ask of the sampler.

What it owns: the fields, their limits and their refusals. Light on purpose (no torch), since every
face of the engine speaks it. Invariant: an instance that exists is valid.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from ...errors import RequestError

MAX_TOKENS: Final = 1 << 24
MAX_LOGPROBS: Final = 20
MAX_STOP: Final = 16
MAX_STOP_CHARS: Final = 1024
MAX_STOP_IDS: Final = 1024
MAX_SAMPLES: Final = 64
MAX_SEED: Final = (1 << 64) - 1

_NUMBERS: Final = {
    # field: (low, high, low itself allowed)
    "temperature": (0.0, 100.0, True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, True),
    "repetition_penalty": (0.0, 10.0, False),
    "presence_penalty": (-2.0, 2.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
}
_INTEGERS: Final = {
    "max_tokens": (1, MAX_TOKENS),
    "min_tokens": (0, MAX_TOKENS),
    "top_k": (0, 1 << 31),
    "n": (1, MAX_SAMPLES),
}


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to choose tokens. The default is greedy.

    Attributes:
        max_tokens: most tokens to produce.
        min_tokens: no end-of-sequence or stop id is chosen before this many.
        temperature: 0 is greedy (the lowest id wins a tie); else logits are divided by it.
        top_k: keep this many of the likeliest; 0 is off.
        top_p: keep the likeliest until they hold this much of the mass; 1 is off.
        min_p: keep tokens at least this likely relative to the likeliest; 0 is off.
        seed: of this sequence's draws; the same seed gives the same draws in any batch. ``None``:
            one from the system.
        repetition_penalty: over prompt and output (Keskar et al. 2019, as transformers does it).
        presence_penalty, frequency_penalty: over the output, as in OpenAI's API.
        stop: strings that end the text.
        stop_token_ids: ids that end the sequence, besides the model's own.
        ignore_eos: do not end at the model's own end ids.
        logprobs: ``None``, or how many alternatives to report (0: the chosen token alone).
        n: samples of one prompt, at most 64; the i-th (from 0) draws with ``seed + i``.

    Raises:
        RequestError: bad-<field with hyphens>, e.g. ``bad-top-p``.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        for field, (low, high) in _INTEGERS.items():
            _check_integer(field, getattr(self, field), low, high)
        if self.min_tokens > self.max_tokens:
            raise _bad("min_tokens", f"at most max_tokens ({self.max_tokens})", self.min_tokens)
        for field, (least, most, closed) in _NUMBERS.items():
            value = getattr(self, field)
            number = type(value) in (int, float) and math.isfinite(value)
            if not number or not least <= value <= most or (value == least and not closed):
                sign = "[" if closed else "("
                raise _bad(field, f"a number in {sign}{least}, {most}]", value)
        for field, top in (("seed", MAX_SEED), ("logprobs", MAX_LOGPROBS)):
            if getattr(self, field) is not None:
                _check_integer(field, getattr(self, field), 0, top)
        if type(self.ignore_eos) is not bool:
            raise _bad("ignore_eos", "true or false", self.ignore_eos)
        if (
            not isinstance(self.stop, (tuple, list))
            or len(self.stop) > MAX_STOP
            or not all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_CHARS for s in self.stop)
        ):
            expected = f"at most {MAX_STOP} strings of 1..{MAX_STOP_CHARS} characters"
            raise _bad("stop", expected, self.stop)
        if (
            not isinstance(self.stop_token_ids, (tuple, list))
            or len(self.stop_token_ids) > MAX_STOP_IDS
            or not all(type(i) is int and i >= 0 for i in self.stop_token_ids)
        ):
            raise _bad("stop_token_ids", f"at most {MAX_STOP_IDS} ids >= 0", self.stop_token_ids)

    def of_sample(self, index: int) -> SamplingParams:
        """Of the ``index``-th sample alone: its seed is the first's plus its index."""
        if self.n == 1 and not index:
            return self
        seed = None if self.seed is None else (self.seed + index) & MAX_SEED
        return msgspec.structs.replace(self, n=1, seed=seed)

    @property
    def plain_greedy(self) -> bool:
        """True when the choice is the argmax of the raw logits and nothing else is asked for."""
        return (
            self.temperature == 0
            and self.repetition_penalty == 1
            and self.presence_penalty == 0
            and self.frequency_penalty == 0
            and self.logprobs is None
            and self.min_tokens == 0
        )


def _check_integer(field: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise _bad(field, f"an integer in {low}..{high}" if low < high else str(low), value)


def _bad(field: str, expected: str, found: object) -> RequestError:
    return RequestError(
        "a sampling parameter is out of range",
        code="bad-" + field.replace("_", "-"),
        subject=field,
        expected=expected,
        found=repr(found)[:200],
    )
