"""Sampling parameters: limits, and a code for each refusal."""

from __future__ import annotations

import math

import msgspec
import pytest

from rota.errors import RequestError
from rota.gpu.model.params import SamplingParams


def test_the_default_is_plain_greedy():
    assert SamplingParams().plain_greedy
    assert not SamplingParams(temperature=0.5).plain_greedy
    assert not SamplingParams(logprobs=0).plain_greedy
    assert not SamplingParams(repetition_penalty=1.1).plain_greedy
    assert not SamplingParams(min_tokens=1).plain_greedy


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("max_tokens", 0, "bad-max-tokens"),
        ("max_tokens", True, "bad-max-tokens"),
        ("max_tokens", 1.5, "bad-max-tokens"),
        ("min_tokens", -1, "bad-min-tokens"),
        ("min_tokens", 129, "bad-min-tokens"),
        ("temperature", -0.1, "bad-temperature"),
        ("temperature", math.nan, "bad-temperature"),
        ("temperature", math.inf, "bad-temperature"),
        ("temperature", "1", "bad-temperature"),
        ("top_k", -1, "bad-top-k"),
        ("top_p", 0.0, "bad-top-p"),
        ("top_p", 1.01, "bad-top-p"),
        ("min_p", -0.1, "bad-min-p"),
        ("min_p", 1.1, "bad-min-p"),
        ("seed", -1, "bad-seed"),
        ("seed", 1 << 64, "bad-seed"),
        ("repetition_penalty", 0.0, "bad-repetition-penalty"),
        ("presence_penalty", 2.5, "bad-presence-penalty"),
        ("frequency_penalty", -2.5, "bad-frequency-penalty"),
        ("stop", "text", "bad-stop"),
        ("stop", ("",), "bad-stop"),
        ("stop", ("x",) * 17, "bad-stop"),
        ("stop", ("x" * 1025,), "bad-stop"),
        ("stop_token_ids", (-1,), "bad-stop-token-ids"),
        ("stop_token_ids", (1,) * 1025, "bad-stop-token-ids"),
        ("ignore_eos", 1, "bad-ignore-eos"),
        ("logprobs", 21, "bad-logprobs"),
        ("logprobs", -1, "bad-logprobs"),
        ("n", 65, "bad-n"),
    ],
)
def test_each_field_has_its_refusal(field, value, code):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.code == code
    assert caught.value.subject == field
    with pytest.raises(RequestError):
        msgspec.structs.replace(SamplingParams(), **{field: value}).__post_init__()


def test_limits_themselves_are_accepted():
    SamplingParams(
        max_tokens=1,
        min_tokens=1,
        temperature=100,
        top_p=1,
        min_p=1,
        seed=(1 << 64) - 1,
        repetition_penalty=10,
        presence_penalty=-2,
        frequency_penalty=2,
        logprobs=20,
        stop=("x" * 1024,) * 16,
        stop_token_ids=(0,) * 1024,
    )
