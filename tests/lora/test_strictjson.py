"""JSON read strictly: the quick way to an object never takes what the strict one refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.errors import RejectError
from rota.gpu.lora import strictjson
from rota.gpu.lora.strictjson import loads_object

GOOD = b'{"m":{"a":"b"}, "x" : {"dtype":"F32","n":[1,2]},"y":{"dtype":"F16","n":[3]} }'


def strings(value: Any) -> int:
    """Strings of any object."""
    if isinstance(value, dict):
        return len(value) + sum(map(strings, value.values()))
    return sum(map(strings, value)) if isinstance(value, list) else isinstance(value, str)


def outcome(raw: bytes, **more: Any) -> Any:
    """The object, or the whole refusal."""
    try:
        return loads_object(raw, code="bad-safetensors", subject="file", **more)
    except RejectError as refusal:
        return refusal.code, refusal.message, refusal.subject


def test_a_good_object_takes_the_quick_way_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: Any, **__: Any) -> Any:
        raise AssertionError("the slow parser was asked")

    expected = json.loads(GOOD)
    monkeypatch.setattr(strictjson.json, "loads", slow)
    assert outcome(GOOD, strings=strings) == expected


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
    assert outcome(raw, strings=strings)[0] == "duplicate-json-key"


@pytest.mark.parametrize(
    "raw",
    [rb'{"\ud800":1}', rb'{"x":"\uDFFF"}', rb'{"x":[{"y":"\ude00\ud83d"}]}'],
)
def test_half_of_a_surrogate_pair_is_not_text(raw: bytes) -> None:
    """What is accepted is told to others, in UTF-8."""
    assert outcome(raw)[:2] == ("bad-safetensors", "half of a surrogate pair")
    assert outcome(raw, constants=True) == outcome(raw, strings=strings) == outcome(raw)


def test_a_whole_pair_is_text() -> None:
    assert outcome(rb'{"\ud83d\ude00":"\u00e9"}') == {"\U0001f600": "\u00e9"}


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 2), st.binary(max_size=2)), max_size=3),
)
def test_both_ways_say_the_same(edits: list[tuple[int, int, bytes]]) -> None:
    raw = bytearray(GOOD)
    for place, removed, added in edits:
        at = place % (len(raw) + 1)
        raw[at : at + removed] = added
    assert outcome(bytes(raw), strings=strings) == outcome(bytes(raw))
