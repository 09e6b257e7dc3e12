"""Incremental detokenizer: what is given out equals the whole decode, and never changes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rota.errors import InternalError
from rota.sched.text import IncrementalDetokenizer, Tokenizer

PROPERTY = settings(derandomize=True, deadline=None, max_examples=300)
IDS = st.lists(st.integers(min_value=0, max_value=430), max_size=60)
TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40)


def deltas(tokenizer: Tokenizer, ids: Sequence[int], skip: bool = True) -> list[str]:
    stream = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    return [*map(stream.push, ids), stream.flush()]


@PROPERTY
@given(ids=IDS, skip=st.booleans())
def test_byte_level_deltas_join_to_the_whole_decode_for_any_ids(
    bytes_tokenizer: Tokenizer, ids: list[int], skip: bool
) -> None:
    assert "".join(deltas(bytes_tokenizer, ids, skip)) == bytes_tokenizer.decode(ids, skip)


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token a byte, so that any byte string can be spelled."""
    from rota.sched.text.detokenizer import byte_alphabet

    char = {byte: char for char, byte in byte_alphabet().items()}
    ids = [tokenizer.token_id(char[byte]) for byte in data]
    assert None not in ids
    return [i for i in ids if i is not None]


@PROPERTY
@given(data=st.binary(max_size=24))
@example(data=b"\xf0\x9f\x98")
@example(data=b"\xf0\x9f\xc3\xa9\xe2\x82")
@example(data=b"\xed\xa0\x80\xc0\xaf\xf5\x80")
@example(data=b"\xe0\x80\xe0\xa0\xf4\x90\xf0\x80")
def test_malformed_bytes_are_replaced_as_the_whole_decode_replaces_them(
    bytes_tokenizer: Tokenizer, data: bytes
) -> None:
    ids = byte_ids(bytes_tokenizer, data)
    assert "".join(deltas(bytes_tokenizer, ids)) == bytes_tokenizer.decode(ids)


@PROPERTY
@given(text=TEXT)
def test_bytes_of_real_text_give_whole_characters_as_soon_as_they_are_whole(
    bytes_tokenizer: Tokenizer, text: str
) -> None:
    stream = IncrementalDetokenizer(bytes_tokenizer)
    for char in text:
        pushed = [stream.push(i) for i in byte_ids(bytes_tokenizer, char.encode())]
        assert pushed == [""] * (len(pushed) - 1) + [char]
    assert stream.flush() == ""


def test_an_unfinished_character_comes_out_at_the_flush_only(bytes_tokenizer: Tokenizer) -> None:
    stream = IncrementalDetokenizer(bytes_tokenizer)
    ids = byte_ids(bytes_tokenizer, "a😀".encode())[:-1]
    assert [stream.push(i) for i in ids] == ["a", "", "", ""]
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_a_special_token_inside_a_character_does_not_split_it(bytes_tokenizer: Tokenizer) -> None:
    first, second = byte_ids(bytes_tokenizer, "é".encode())
    end = bytes_tokenizer.token_id("<|end|>")
    assert end is not None
    assert deltas(bytes_tokenizer, [first, end, second]) == ["", "", "é", ""]


def test_added_tokens_outside_the_byte_alphabet_are_text(bytes_tokenizer: Tokenizer) -> None:
    ids = bytes_tokenizer.encode("x東京 Towery")
    assert bytes_tokenizer.token_id("東京 Tower") in ids
    assert "".join(deltas(bytes_tokenizer, ids)) == "x東京 Towery"


def test_ids_without_a_token_give_nothing_and_ids_below_zero_are_a_bug(
    bytes_tokenizer: Tokenizer, words_tokenizer: Tokenizer
) -> None:
    for tokenizer in (bytes_tokenizer, words_tokenizer):
        assert deltas(tokenizer, [tokenizer.vocab_size + 1]) == ["", ""]
        with pytest.raises(InternalError) as bug:
            IncrementalDetokenizer(tokenizer).push(-1)
        assert bug.value.code == "bad-token-id"


@PROPERTY
@given(ids=st.lists(st.integers(min_value=0, max_value=310), max_size=60), skip=st.booleans())
def test_word_start_deltas_join_to_the_whole_decode_for_any_ids(
    words_tokenizer: Tokenizer, ids: list[int], skip: bool
) -> None:
    assert "".join(deltas(words_tokenizer, ids, skip)) == words_tokenizer.decode(ids, skip)


@PROPERTY
@given(ids=st.lists(st.integers(min_value=0, max_value=310), min_size=1, max_size=40))
def test_word_start_context_keeps_the_space_of_the_first_word(
    words_tokenizer: Tokenizer, ids: list[int]
) -> None:
    context = words_tokenizer.encode("the quick")
    stream = IncrementalDetokenizer(words_tokenizer, context=context)
    text = "".join([*map(stream.push, ids), stream.flush()])
    assert words_tokenizer.decode(context) + text == words_tokenizer.decode(context + ids)


@PROPERTY
@given(text=st.text(alphabet="abchi é日😀", max_size=20))
def test_byte_fallback_deltas_join_to_the_whole_decode_of_any_text(
    fallback_tokenizer: Tokenizer, text: str
) -> None:
    ids = fallback_tokenizer.encode(text)
    parts = deltas(fallback_tokenizer, ids)
    assert "".join(parts) == fallback_tokenizer.decode(ids)
    assert "\ufffd" not in "".join(parts)


def test_a_run_that_never_becomes_a_character_is_held_for_a_bounded_time(
    fallback_tokenizer: Tokenizer,
) -> None:
    bad = fallback_tokenizer.token_id("<0xFF>")
    assert bad is not None
    parts = deltas(fallback_tokenizer, [bad] * 100)
    assert max(i for i, part in enumerate(parts) if part == "") < 100
    assert any(parts[:40])
    assert "".join(parts) == "\ufffd" * 100


def test_the_window_stays_short(words_tokenizer: Tokenizer) -> None:
    """Cost per token does not grow with the sequence: the ids decoded at a time stay few."""
    sizes: list[int] = []

    class Counting(Tokenizer):
        def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            sizes.append(len(ids))
            return super().decode(ids, skip_special_tokens)

    tokenizer = Counting(words_tokenizer._raw)
    ids = tokenizer.encode("the quick brown fox jumps over the lazy dog " * 30)
    deltas(tokenizer, ids)
    assert max(sizes) <= 4
