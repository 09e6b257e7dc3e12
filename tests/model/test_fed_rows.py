"""Rows fed what the step before sampled: as if the token had been sent, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from rota.errors import InternalError
from rota.gpu.model.rows import RowInput
from rota.gpu.model.sampling import SamplingParams

RUNNERS = [("llama", "host"), ("llama", "torch"), ("qwen35", "host"), ("qwen35", "torch")]
GREEDY = SamplingParams(max_tokens=8, logprobs=2)
DRAWN = SamplingParams(
    max_tokens=8, temperature=1.2, seed=3, repetition_penalty=1.3, presence_penalty=0.5, logprobs=0
)
PROMPTS = {0: [5, 9, 7], 1: [11, 3]}


@pytest.fixture(params=RUNNERS, ids=lambda p: "-".join(p))
def runner(request: pytest.FixtureRequest, open_bench: Any) -> Any:
    """A runner with sequences 0 (greedy) and 1 (drawn, with penalties) open."""
    family, math = request.param
    found = open_bench(family, math=math).runner
    for seq, sampling in ((0, GREEDY), (1, DRAWN)):
        found.open_sequence(seq, PROMPTS[seq], sampling)
    yield found
    for seq in PROMPTS:
        found.close_sequence(seq)


def row(seq: int, start: int, *tokens: int, blocks: tuple[int, ...] = ()) -> RowInput:
    return RowInput(seq, -1, start, tokens, blocks or (seq,), True)


def prefill(runner: Any) -> list[Any]:
    # The fixture is Any.
    return runner.step([row(seq, 0, *PROMPTS[seq]) for seq in (0, 1)])  # type: ignore[no-any-return]


def told(runner: Any, steps: int) -> list[Any]:
    outputs = [prefill(runner)]
    for at in range(steps):
        last = {o.seq: o.token for o in outputs[-1]}
        rows = [row(seq, len(PROMPTS[seq]) + at, last[seq]) for seq in (1, 0)]
        outputs.append(runner.step(rows))
    return outputs


def test_fed_rows_are_as_if_told(runner: Any) -> None:
    want = told(runner, 4)
    for seq, sampling in ((0, GREEDY), (1, DRAWN)):
        runner.close_sequence(seq)
        runner.open_sequence(seq, PROMPTS[seq], sampling)
    got = [prefill(runner)]
    for at in range(4):
        before = [o.seq for o in got[-1]]
        rows = [row(s, len(PROMPTS[s]) + at, ~before.index(s)) for s in (1, 0)]
        got.append(runner.step(rows))
    assert got == want
    assert len({o.token for step in got for o in step}) > 2


def test_a_row_without_a_sample_to_feed_fails_alone(runner: Any) -> None:
    first = runner.step([RowInput(0, -1, 0, (5, 9, 7), (0,), False), row(1, 0, 11, 3)])
    assert first[0].token == -1
    unfed, other = runner.step([row(0, 3, ~0), row(1, 2, ~1)])
    assert (unfed.token, unfed.error.code) == (-1, "row-not-fed")
    assert other.error is None and other.token >= 0


def test_behind_a_step_that_failed_nothing_runs(runner: Any) -> None:
    prefill(runner)
    with pytest.raises(InternalError) as caught:
        runner.step([row(0, 3, 1, blocks=(99,)), row(1, 2, 1)])
    assert caught.value.code == "bad-row"
    outputs = runner.step([row(0, 4, ~0), row(1, 3, ~1)])
    assert [(o.seq, o.token, o.error.code) for o in outputs] == [
        (0, -1, "row-not-fed"),
        (1, -1, "row-not-fed"),
    ]
    assert [o.error for o in runner.step([row(0, 3, 1), row(1, 2, 1)])] == [None, None]


def test_only_by_its_own_row_and_one_token(runner: Any) -> None:
    for rows in ([row(0, 3, ~1)], [row(0, 3, ~0, 4)], [row(0, 3, 4, ~0)]):
        prefill(runner)
        with pytest.raises(InternalError) as caught:
            runner.step(rows)
        assert caught.value.code == "bad-row"
        for seq in PROMPTS:
            runner.drop_state(seq)
