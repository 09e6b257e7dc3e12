"""JSON read strictly: one value per key, and text that can be told to others."""

from __future__ import annotations

from typing import Any

import pytest

from rota.errors import RejectError
from rota.gpu.lora.strictjson import loads_object


def outcome(raw: bytes, **more: Any) -> Any:
    """The object, or the whole refusal."""
    try:
        return loads_object(raw, code="bad-safetensors", subject="file", **more)
    except RejectError as refusal:
        return refusal.code, refusal.message, refusal.subject


@pytest.mark.parametrize(
    "raw",
    [
        b'{"x":{"n":1},"x":{"n":1}}',
        b'{"x" :1, "x": 1}',
        b'{"x":{"dtype":"F32","dtype":"F32"}}',
        b'{"m":{"a":"b","a":"b"},"x":1}',
        b'{"x":1,"\\u0078":1}',
        b'{"x":[{"a":1,"a":2}]}',
        b'{":x":1,"x" :2,"x" :2}',
    ],
)
def test_a_key_twice_is_found_at_any_depth(raw: bytes) -> None:
    assert outcome(raw)[0] == "duplicate-json-key"


@pytest.mark.parametrize(
    "raw",
    [rb'{"\ud800":1}', rb'{"x":"\uDFFF"}', rb'{"x":[{"y":"\ude00\ud83d"}]}'],
)
def test_half_of_a_surrogate_pair_is_not_text(raw: bytes) -> None:
    """What is accepted is told to others, in UTF-8."""
    assert outcome(raw)[:2] == ("bad-safetensors", "half of a surrogate pair")
    assert outcome(raw, constants=True) == outcome(raw)


def test_a_whole_pair_is_text() -> None:
    assert outcome(rb'{"\ud83d\ude00":"\u00e9"}') == {"\U0001f600": "\u00e9"}
