"""Tokens to text with stop strings: the two parts together equal a search of the whole decode."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rota.sched.text import Tokenizer
from rota.sched.text.sink import TextSink

PROPERTY = settings(derandomize=True, deadline=None, max_examples=300)
STOPS = ["fox", "é", "日本", "\ufffd", " the", "ju"]


@PROPERTY
@given(
    text=st.text(alphabet="the foxju é日本😀", max_size=30),
    cut=st.integers(min_value=0, max_value=2),
    stops=st.lists(st.sampled_from(STOPS), max_size=3, unique=True),
)
def test_text_and_stop_are_those_of_a_search_of_the_whole_decode(
    bytes_tokenizer: Tokenizer, text: str, cut: int, stops: list[str]
) -> None:
    ids = bytes_tokenizer.encode(text)
    ids = ids[: len(ids) - cut]  # may end inside a character
    sink = TextSink(bytes_tokenizer, stops)
    out, stopped = "", False
    for token in ids:
        delta, stopped = sink.push(token)
        out += delta
        if stopped:
            break
    if not stopped:
        out += sink.finish()
    whole = bytes_tokenizer.decode(ids)
    ends = [(whole.find(s) + len(s), whole.find(s)) for s in stops if s in whole]
    assert out == (whole[: min(ends)[1]] if ends else whole)


def test_a_stop_string_ends_the_text_at_its_token(bytes_tokenizer: Tokenizer) -> None:
    sink = TextSink(bytes_tokenizer, ["fox"])
    results = [sink.push(token) for token in bytes_tokenizer.encode("brown fo")]
    assert "".join(text for text, _ in results) == "brown "
    assert not any(stopped for _, stopped in results)
    results = [sink.push(token) for token in bytes_tokenizer.encode("x lazy")]
    assert any(stopped for _, stopped in results)
    assert "".join(text for text, _ in results) == ""
    assert sink.finish() == ""
