"""Choosing tokens: sets, distributions, seeds and penalties against closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rota.errors import InternalError, RequestError
from rota.gpu.model.sampling import RowSampler, Sampler, SamplingParams, candidates, uniform

PROBABILITIES = np.array([0.05, 0.4, 0.1, 0.25, 0.2])
LOGITS = np.log(PROBABILITIES).astype(np.float32)
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def sampler(prompt=(), vocab=5, eos=(), **fields):
    return Sampler(prompt, SamplingParams(**fields), vocab, eos)


def kept(**fields):
    ids, probabilities = candidates(LOGITS, **(OFF | fields))
    return dict(zip(ids.tolist(), probabilities.tolist(), strict=True))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {1, 3, 4}),
        ({"top_k": 9}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.3}, {1}),  # one token always stays, though it holds more
        ({"top_p": 0.45}, {1, 3}),
        ({"top_p": 0.66}, {1, 3, 4}),
        ({"top_p": 0.94}, {1, 3, 4, 2}),
        ({"min_p": 0.3}, {1, 3, 4}),
        ({"min_p": 0.6}, {1, 3}),
        ({"min_p": 1.0}, {1}),
        # 0.4/0.85, 0.25/0.85, 0.2/0.85: top_p sees what top_k left
        ({"top_k": 3, "top_p": 0.75}, {1, 3}),
        ({"top_k": 4, "min_p": 0.45}, {1, 3, 4}),
    ],
)
def test_the_filters_keep_the_right_ids_and_renormalise(fields, expected):
    found = kept(**fields)
    assert set(found) == expected
    total = sum(PROBABILITIES[i] for i in expected)
    for token, probability in found.items():
        assert probability == pytest.approx(PROBABILITIES[token] / total, rel=1e-6)


def test_ties_at_the_edge_of_top_k_keep_the_lowest_ids():
    flat = np.zeros(6, np.float32)
    assert candidates(flat, **(OFF | {"top_k": 2}))[0].tolist() == [0, 1]
    assert candidates(flat, **(OFF | {"top_p": 0.5}))[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_top_p_over_a_large_vocabulary_is_the_sorted_definition(top_p, spread):
    logits = (np.random.default_rng(8).standard_normal(5000) * spread).astype(np.float32)
    ids, _ = candidates(logits, **(OFF | {"top_p": top_p}))
    weights = np.exp(logits.astype(np.float64))
    order = np.argsort(-weights, kind="stable")
    before = np.concatenate([[0.0], np.cumsum(weights[order])[:-1]]) / weights.sum()
    assert ids.tolist() == order[before < top_p].tolist()


def test_temperature_divides_the_logits():
    found = kept(temperature=0.5)
    squares = PROBABILITIES**2
    for token, probability in found.items():
        assert probability == pytest.approx(squares[token] / squares.sum(), rel=1e-6)


def test_uniform_draws_fill_the_interval_and_repeat():
    draws = np.array([uniform(7, index) for index in range(4096)])
    assert draws.min() >= 0 and draws.max() < 1
    # 64 bins of 64 draws: chi-square with 63 degrees of freedom, five sigma is about 119.
    counts = np.bincount((draws * 64).astype(int), minlength=64)
    assert ((counts - 64) ** 2 / 64).sum() < 119
    assert draws.tolist() == [uniform(7, index) for index in range(4096)]
    assert len({uniform(seed, 0) for seed in range(1000)}) == 1000


def test_a_draw_is_the_inverse_of_the_cumulative_distribution():
    one = sampler(temperature=1.0, seed=11)
    found = [one.choose(LOGITS).token for _ in range(200)]
    edges = np.cumsum(PROBABILITIES)
    expected = [int(np.searchsorted(edges, uniform(11, i), side="right")) for i in range(200)]
    assert found == expected


def test_frequencies_follow_the_probabilities():
    one = sampler(temperature=1.0, seed=3)
    n = 4000
    counts = np.bincount([one.choose(LOGITS).token for _ in range(n)], minlength=5)
    sigma = np.sqrt(n * PROBABILITIES * (1 - PROBABILITIES))
    assert (abs(counts - n * PROBABILITIES) < 5 * sigma).all()


def test_draws_depend_on_the_own_seed_and_not_on_other_rows():
    logits = torch.from_numpy(np.stack([LOGITS] * 3))
    alone = sampler(temperature=1.0, seed=5)
    expected = [alone.choose(LOGITS).token for _ in range(50)]
    mine = sampler(temperature=1.0, seed=5)
    others = [sampler(temperature=1.0, seed=6), sampler()]
    found = [RowSampler(5)([others[0], mine, others[1]], logits)[1].token for _ in range(50)]
    assert found == expected
    assert [sampler(temperature=1.0, seed=s).choose(LOGITS).token for s in range(50)] != expected


def test_greedy_takes_the_lowest_id_of_a_tie():
    tied = np.array([1, 3, 3, 2, 3], np.float32)
    assert sampler().choose(tied).token == 1
    assert sampler(logprobs=1).choose(tied).token == 1
    assert RowSampler(5)([sampler()], torch.from_numpy(tied)[None].bfloat16())[0].token == 1


def test_repetition_penalty_is_that_of_transformers():
    one = sampler(prompt=[0, 2], repetition_penalty=2.0, logprobs=0)
    raw = np.array([4.0, 2.5, -1.0, -1.5, 0.0], np.float32)
    # 0: 4/2 = 2, 2: -1*2 = -2; then 1 is the largest, and seen, so 2.5/2 = 1.25 the next time.
    assert one.choose(raw).token == 1
    assert one.choose(raw).token == 0
    assert raw.tolist() == [4.0, 2.5, -1.0, -1.5, 0.0]


def test_frequency_and_presence_count_the_output_alone():
    raw = np.array([1.0, 0.9, 0.0], np.float32)
    one = sampler(prompt=[0, 0, 0], vocab=3, frequency_penalty=0.3)
    # 0 falls by 0.3 each time: 1.0 -> 0.7 < 0.9 -> 1 falls to 0.6 -> 0 again (0.7) -> 1 (0.6)
    assert [one.choose(raw).token for _ in range(4)] == [0, 1, 0, 1]
    two = sampler(vocab=3, presence_penalty=0.3)
    assert [two.choose(raw).token for _ in range(4)] == [0, 1, 0, 0]


def test_min_tokens_bans_the_ends_until_then():
    raw = np.array([5.0, 4.0, 3.0, 0.0, 0.0], np.float32)
    one = sampler(eos=(0,), min_tokens=2, stop_token_ids=(1,))
    assert [one.choose(raw).token for _ in range(3)] == [2, 2, 0]
    ignoring = sampler(eos=(0,), min_tokens=2, stop_token_ids=(1,), ignore_eos=True)
    assert ignoring.choose(raw).token == 0


def test_nothing_left_to_choose_is_an_error_of_the_row():
    one = sampler(vocab=2, eos=(0,), min_tokens=1, stop_token_ids=(1,))
    choice = one.choose(np.zeros(2, np.float32))
    assert choice.token == -1 and choice.error is not None and choice.error.code == "bad-logits"


def test_logprobs_are_of_the_raw_logits():
    raw = LOGITS + 3
    one = sampler(temperature=0.1, top_k=1, repetition_penalty=5.0, prompt=[3], logprobs=2)
    choice = one.choose(raw)
    assert choice.token == 1
    assert choice.logprob == pytest.approx(math.log(0.4), abs=1e-6)
    assert [token for token, _ in choice.top] == [1, 3]
    assert [math.exp(lp) for _, lp in choice.top] == pytest.approx([0.4, 0.25], rel=1e-5)
    assert sampler(logprobs=0).choose(raw).top == ()
    assert len(sampler(logprobs=20).choose(raw).top) == 5
    assert sampler(temperature=1.0).choose(raw).logprob is None


@pytest.mark.parametrize("poison", [math.nan, math.inf, "all -inf"])
@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "seed": 1}])
def test_unusable_logits_end_their_row_alone(poison, fields):
    logits = torch.from_numpy(np.stack([LOGITS] * 3)).clone()
    logits[1] = -math.inf if poison == "all -inf" else logits[1]
    if poison != "all -inf":
        logits[1, 2] = poison
    choices = RowSampler(5)([sampler(**fields) for _ in range(3)], logits)
    assert choices[1].token == -1
    assert isinstance(choices[1].error, RequestError) and choices[1].error.code == "bad-logits"
    for row in (0, 2):
        assert choices[row].error is None and choices[row].token >= 0


def test_ids_outside_the_vocabulary_are_refused():
    with pytest.raises(RequestError) as caught:
        sampler(prompt=[1, 5])
    assert (caught.value.code, caught.value.found) == ("bad-token", "5")
    with pytest.raises(RequestError) as caught:
        sampler(stop_token_ids=(7,))
    assert caught.value.code == "bad-stop-token-ids"


def test_one_sampler_for_each_row():
    with pytest.raises(InternalError):
        RowSampler(5)([sampler()], torch.zeros((2, 5)))


def test_more_rows_than_fit_in_one_piece():
    logits = torch.randn((21, 5), generator=torch.Generator().manual_seed(0))
    choose = RowSampler(5)
    expected = logits.argmax(dim=1).tolist()
    assert [c.token for c in choose([sampler() for _ in range(21)], logits)] == expected
    mixed = [sampler(logprobs=0) if i % 2 else sampler() for i in range(21)]
    assert [c.token for c in choose(mixed, logits)] == expected
    assert [c.logprob is None for c in choose(mixed, logits)[16:]] == [
        i % 2 == 0 for i in range(16, 21)
    ]
