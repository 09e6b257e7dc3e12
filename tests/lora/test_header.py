"""Headers of safetensors files, read quickly and strictly: the two never say different things."""

from __future__ import annotations

import gc
import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.errors import RejectError
from rota.gpu.lora import safefile
from rota.gpu.lora.audit import audit
from rota.gpu.lora.config import PeftConfig
from rota.gpu.lora.dims import ModelDims
from rota.gpu.lora.layout import SlotLayout
from rota.gpu.lora.safefile import FileLimits, Tensor, parse_header, parse_shards
from rota.gpu.lora.source import BytesSource
from rota.gpu.lora.stage import stage

LIMITS = FileLimits()
GOOD = (
    b'{"__metadata__":{"format":"pt"}, "x" : {"dtype":"F32","shape":[2, 1],"data_offsets":[0,8]},'
    b'"y":{"data_offsets":[8,10],"shape":[1],"dtype":"F16"} }'
)
FIELDS = b'"dtype":"F32","shape":[2],"data_offsets":[0,8]'
MANY = ModelDims(150, hidden=4, q_out=4, kv_out=4, attn_in=4, intermediate=4, vocab=4)


def file_of(header: bytes, nbytes: int = 10) -> np.ndarray:
    return np.frombuffer(len(header).to_bytes(8, "little") + header + bytes(nbytes), np.uint8)


def told(tensor: Tensor) -> tuple[Any, ...]:
    types = tuple(map(type, (*tensor.shape, tensor.begin, tensor.end)))
    return tensor.key, tensor.dtype, tensor.shape, tensor.begin, tensor.end, types


def outcome(header: bytes, nbytes: int = 10) -> Any:
    """All tensors, or all of the refusal."""
    try:
        return [told(tensor) for tensor in parse_shards((file_of(header, nbytes),), LIMITS)]
    except RejectError as refusal:
        return refusal.code, refusal.message, refusal.subject, refusal.expected, refusal.found


def keys(header: bytes) -> Any:
    """What an index is held against."""
    try:
        return set(parse_header(file_of(header), LIMITS)[0])
    except RejectError as refusal:
        return refusal.code, refusal.message


def both_ways(header: bytes, nbytes: int = 10) -> Any:
    found = outcome(header, nbytes), keys(header)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safefile, "_quickly", lambda raw: None)
        assert (outcome(header, nbytes), keys(header)) == found
    return found[0]


def test_a_good_header_takes_the_quick_way_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def strict(*_: Any, **__: Any) -> Any:
        raise AssertionError("the strict reader was asked")

    expected = both_ways(GOOD)
    assert [key for key, *_ in expected] == ["x", "y"]
    monkeypatch.setattr(safefile, "loads_object", strict)
    assert outcome(GOOD) == expected
    assert outcome(b'{"__metadata__":null}', 0) == []


@pytest.mark.parametrize(
    "header",
    [
        b'{"x":{%b},"x":{%b}}' % (FIELDS, FIELDS),
        b'{"x" :1, "x": {%b}}' % FIELDS,
        b'{"x":{%b,"dtype":"F32"}}' % FIELDS,
        b'{"x":{%b},"__metadata__":{"a":"b","a":"b"}}' % FIELDS,
        b'{"x":{%b},"__metadata__":null,"__metadata__":null}' % FIELDS,
        b'{"x":{%b},"\\u0078":1}' % FIELDS,
        b'{"x":[{"a":1,"a":2}]}',
        b'{":x":1,"x" :{%b},"x" :2}' % FIELDS,
        # Null metadata has one string where an entry has five: no room for four more.
        b'{"__metadata__":null,"x":{"dtype":"F16","dtype":"BF16",%b}}' % FIELDS,
        b'{"__metadata__":null,"x":{"shape":[1],"shape":[3],"shape":[4],"shape":[2],%b}}' % FIELDS,
    ],
)
def test_a_key_twice_is_found_at_any_depth(header: bytes) -> None:
    assert both_ways(header, 8)[0] == "duplicate-json-key"


@pytest.mark.parametrize(
    "header",
    [
        b'{"x":{"dtype":"F\xff2","shape":[2],"data_offsets":[0,8]}}',
        b'{"\xff":{%b}}' % FIELDS,
        b'{"x":{%b},"__metadata__":{"\xff":"b"}}' % FIELDS,
        b'{"x":{%b},"__metadata__":{"a":"\xed\xa0\x80"}}' % FIELDS,
    ],
)
def test_what_is_skipped_at_first_is_text_as_well(header: bytes) -> None:
    code, message, *_ = both_ways(header, 8)
    assert code == "bad-safetensors" and message.startswith("not UTF-8 at byte ")


def test_escapes_are_left_to_the_strict_reader() -> None:
    assert safefile._quickly(rb'{"__metadata__":{"a":"\n"}}') is None
    assert safefile._quickly(rb'{"__metadata__":{"a":"n"}}') == {"__metadata__": {"a": "n"}}


@pytest.mark.parametrize("number", [b"2.0", b"2e0", b"true", b"null", b'"2"', b"-2", b"02", b"[2]"])
def test_an_extent_is_a_whole_number_in_digits(number: bytes) -> None:
    fields = FIELDS.replace(b"[2]", b"[" + number + b"]")
    assert both_ways(b'{"x":{' + fields + b"}}", 8)[0] == "bad-safetensors"


def test_zero_may_have_a_sign() -> None:
    fields = b'"dtype":"F32","shape":[-0],"data_offsets":[-0,0]'
    assert both_ways(b'{"x":{' + fields + b"}}", 0) == [("x", "F32", (0,), 0, 0, (int,) * 3)]


@pytest.mark.parametrize("order", ["yabz", "ybaz", "zbay"])
def test_tensors_come_in_the_order_of_their_data(order: str) -> None:
    """Empty ones at one place: by name."""
    spans = {"z": (4, 8), "b": (4, 4), "a": (4, 4), "y": (0, 4)}
    header = {
        key: {"dtype": "F32", "shape": [(end - begin) // 4], "data_offsets": [begin, end]}
        for key, (begin, end) in ((key, spans[key]) for key in order)
    }
    found = both_ways(json.dumps(header).encode(), 8)
    assert [key for key, *_ in found] == ["y", "a", "b", "z"]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 2), st.binary(max_size=2)), max_size=3),
)
def test_both_ways_say_the_same_of_edited_bytes(edits: list[tuple[int, int, bytes]]) -> None:
    raw = bytearray(GOOD)
    for place, removed, added in edits:
        at = place % (len(raw) + 1)
        raw[at : at + removed] = added
    both_ways(bytes(raw))


ODD = st.sampled_from(
    [
        *("1.0", "1e2", "1e999", "-0", "-1", "01", "9" * 30, "9" * 4000, "9" * 5000, "NaN"),
        *("true", "null", '"1"', '"\n"', '"\\u0041"', '"\\ud800"', "[]", "[[[1]]]", "{}"),
        '{"a":1,"a":1}',
    ]
)
NUMBERS = st.lists(st.sampled_from(["0", "1", "2", "4", "8"]) | ODD, max_size=3)
VALUES = {
    "dtype": st.sampled_from(['"F32"', '"BF16"', '"F64"', '"é"']) | ODD,
    "shape": NUMBERS.map(lambda found: f"[{','.join(found)}]") | ODD,
    "data_offsets": NUMBERS.map(lambda found: f"[{','.join(found)}]") | ODD,
}
USUAL = {"dtype": '"F32"', "shape": "[1]", "data_offsets": "[0, 4]"}


@st.composite
def entries(draw: st.DrawFn) -> str:
    """An entry with few faults."""
    names = draw(st.permutations(sorted(USUAL)))
    changed = draw(st.lists(st.sampled_from(names), max_size=2))
    told = [(name, draw(VALUES[name]) if name in changed else USUAL[name]) for name in names]
    if draw(st.integers(0, 9)) == 0:
        told.append((draw(st.sampled_from([*names, "more"])), draw(ODD)))
    return "{" + " ,".join(f'"{name}":{value}' for name, value in told) + "}"


METADATA = st.sampled_from(
    ["null", "{}", '{"a":"b"}', '{"a":"b","a":"b"}', '{"a":1}', '{"a":null}', "[]", '"a"', "1.0"]
)


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["x", "y", "é", "\\u0078"]), entries() | ODD), max_size=3),
    st.lists(METADATA, max_size=2),
    st.integers(0, 12),
)
def test_both_ways_say_the_same_of_odd_entries(
    found: list[tuple[str, str]], metadata: list[str], nbytes: int
) -> None:
    told = found + [("__metadata__", value) for value in metadata]
    both_ways(("{" + ", ".join(f'"{key}" :{value}' for key, value in told) + "}").encode(), nbytes)


# What the garbage collector has to look at


def large(kit: Any, root: str = "model.") -> tuple[SlotLayout, BytesSource, PeftConfig]:
    """A layout and an adapter of 2,100 tensors, and its config."""
    leaves = [module.leaf for module in MANY.modules]
    pairs: dict[str, Any] = {}
    for layer in range(MANY.num_layers):
        for leaf in leaves:
            for half, shape in (("A", (2, 4)), ("B", (4, 2))):
                key = kit.key(layer, leaf, half, f"base_model.model.{root}")
                pairs[key] = kit.tensor(shape, "BF16", layer)
    source = BytesSource(kit.file(pairs), kit.config(target_modules=leaves))
    return kit.layout(dims=MANY), source, kit.parsed(target_modules=leaves)


def test_what_is_read_is_not_the_garbage_collectors(kit: Any) -> None:
    layout, source, config = large(kit)
    shards = source.read(LIMITS).shards
    audit(config, parse_shards(shards, LIMITS), layout)  # what the layout keeps from now on
    gc.collect()
    gc.disable()
    try:
        alive = [len(gc.get_objects())]
        header = parse_header(shards[0], LIMITS)
        alive.append(len(gc.get_objects()))
        tensors = parse_shards(shards, LIMITS)
        alive.append(len(gc.get_objects()))
        audited = audit(config, tensors, layout)
        alive.append(len(gc.get_objects()))
    finally:
        gc.enable()
    assert len(header[0]) == len(tensors) == 2 * len(audited.pairs) == 2100
    assert all(after - before < 100 for before, after in pairwise(alive))


@pytest.mark.parametrize("root", ["model.", "language_model.model."])
def test_staging_a_large_adapter_brings_on_no_garbage_collection(kit: Any, root: str) -> None:
    """Objects that do not stay count as well, as long as they are there. The second name of the
    model is none that the layout knows the keys of."""
    layout, source, _ = large(kit, root)
    stage(source, layout)
    rounds: list[str] = []

    def note(phase: str, _: dict[str, int]) -> None:
        rounds.append(phase)

    before = gc.get_threshold()
    gc.collect()
    gc.callbacks.append(note)
    gc.set_threshold(700, 10, 10)
    try:
        stage(source, layout)
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*before)
    assert rounds == []
