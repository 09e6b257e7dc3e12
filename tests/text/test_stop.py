"""Stop strings: equal to a naive search of the whole text, however it is cut."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rota.errors import RequestError
from rota.sched.text import StopMatcher
from rota.sched.text.stop import MAX_STOP_CHARS, MAX_STOPS

PROPERTY = settings(derandomize=True, deadline=None, max_examples=500)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)
CHUNKS = st.lists(st.text(alphabet="abc", max_size=6), max_size=12)


def naive(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The end and the stop string of the match that ends first, the longest there."""
    ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    return None if not ends else (min(ends)[0], min(ends)[2])


@PROPERTY
@given(stops=STOPS, chunks=CHUNKS, include=st.booleans())
@example(stops=["bcb", "cc"], chunks=["abc", "bcc"], include=False)
@example(stops=["aab"], chunks=["aaa", "ab"], include=False)
@example(stops=["abcab", "ca"], chunks=["abca", "b"], include=True)
def test_the_outcome_is_that_of_a_naive_search_of_the_whole_text(
    stops: list[str], chunks: list[str], include: bool
) -> None:
    matcher = StopMatcher(stops, include=include)
    out = "".join(map(matcher.push, chunks)) + matcher.flush()
    text = "".join(chunks)
    match = naive(text, stops)
    if match is None:
        assert (out, matcher.matched) == (text, None)
    else:
        end, stop = match
        assert (out, matcher.matched) == (text[: end if include else end - len(stop)], stop)


@PROPERTY
@given(stops=STOPS, chunks=CHUNKS)
def test_no_more_is_held_back_than_could_begin_a_stop_string(
    stops: list[str], chunks: list[str]
) -> None:
    matcher = StopMatcher(stops)
    seen = out = ""
    for chunk in chunks:
        seen, out = seen + chunk, out + matcher.push(chunk)
        if matcher.matched is not None:
            return
        held = seen[len(out) :]
        tails = [seen[i:] for i in range(len(seen))]
        longest = max(
            (t for t in tails if any(s.startswith(t) for s in stops)), key=len, default=""
        )
        assert held == longest


def test_a_stop_string_across_pieces_is_never_shown() -> None:
    matcher = StopMatcher(["\nUser:"])
    assert [matcher.push(p) for p in ["Hi", "!\n", "Us", "ing", "\nUser", ": x", "y"]] == [
        "Hi",
        "!",
        "",
        "\nUsing",
        "",
        "",
        "",
    ]
    assert matcher.matched == "\nUser:"
    assert matcher.flush() == ""


def test_text_held_back_comes_out_when_the_sequence_ends() -> None:
    matcher = StopMatcher(["END"])
    assert (matcher.push("the EN"), matcher.flush(), matcher.flush()) == ("the ", "EN", "")
    assert matcher.matched is None


def test_without_stop_strings_everything_passes() -> None:
    matcher = StopMatcher()
    assert (matcher.push("abc"), matcher.matched, matcher.flush()) == ("abc", None, "")


@pytest.mark.parametrize(
    ("stops", "subject"),
    [
        ([""], "stop[0]"),
        (["a", "x" * (MAX_STOP_CHARS + 1)], "stop[1]"),
        ([str(i) for i in range(MAX_STOPS + 1)], "stop"),
        ([3], "stop[0]"),
    ],
)
def test_stop_strings_over_the_limits_are_refused(stops: list[str], subject: str) -> None:
    with pytest.raises(RequestError) as refusal:
        StopMatcher(stops)
    assert (refusal.value.code, refusal.value.subject) == ("bad-stop", subject)


def test_limits_themselves_are_accepted_and_one_string_is_a_list_of_one() -> None:
    StopMatcher([chr(0x4E00 + i) * MAX_STOP_CHARS for i in range(MAX_STOPS)])
    matcher = StopMatcher("ab")
    assert (matcher.push("xaab"), matcher.matched) == ("xa", "ab")
