"""Sampling: the right distribution, and nothing of it from the neighbours."""

from collections import Counter

import pytest
import torch

from disconnect_watch.engine import SamplingParams
from disconnect_watch.engine.params import MAX_TEMPERATURE
from disconnect_watch.engine.request import Request
from disconnect_watch.engine.rng import uniform
from disconnect_watch.engine.sampler import sample

SCORES = torch.tensor([0.0, 3.0, 1.0, 2.0, -torch.inf])


def make_request(position: int, params: SamplingParams, seed: int = 1) -> Request:
    return Request("r", [0] * position, params=params, seed=seed)


def draw(params: SamplingParams, num: int = 4000, scores: torch.Tensor = SCORES) -> Counter[int]:
    """Sample ``num`` positions of one request from the same scores."""
    requests = [make_request(position, params) for position in range(1, num + 1)]
    tokens = sample(scores.expand(num, -1), requests)
    assert None not in tokens
    return Counter(token for token in tokens if token is not None)


def assert_distributed(counts: Counter[int], expected: torch.Tensor) -> None:
    """Hold each share within five standard deviations; seeds are fixed, so this cannot flicker."""
    total = sum(counts.values())
    for token, probability in enumerate(expected.tolist()):
        deviation = (probability * (1 - probability) / total) ** 0.5
        assert abs(counts[token] / total - probability) <= 5 * deviation, (token, counts)


def test_temperature_zero_takes_the_likeliest() -> None:
    assert draw(SamplingParams(temperature=0.0), num=50) == {1: 50}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_shares_follow_the_softmax_of_the_scores(temperature: float) -> None:
    counts = draw(SamplingParams(temperature=temperature))
    assert_distributed(counts, (SCORES / temperature).softmax(-1))


def test_the_greatest_temperature_draws_evenly_and_a_greater_one_is_refused() -> None:
    """A score of minus infinity, divided by an infinite number, would be none."""
    counts = draw(SamplingParams(temperature=MAX_TEMPERATURE))
    assert_distributed(counts, torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0]) / 4)
    for greater in (3.5e38, 1e308, 10**39, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=r"temperature is .* must be in \[0, 3.4028235e\+38\]"):
            SamplingParams(temperature=greater)


def test_a_tiny_temperature_is_greedy_and_not_infinite() -> None:
    for temperature in (1e-5, 1e-40, 5e-324):
        assert draw(SamplingParams(temperature=temperature), num=50) == {1: 50}
    # Close scores are told apart all the same.
    close = torch.tensor([1.0, 1.0001])
    assert draw(SamplingParams(temperature=1e-4), scores=close)[0] > 1000


def test_top_k_keeps_the_k_likeliest() -> None:
    kept = SCORES.clone()
    kept[[0, 2]] = -torch.inf
    assert_distributed(draw(SamplingParams(temperature=1.0, top_k=2)), kept.softmax(-1))


def test_top_p_keeps_the_fewest_that_reach_the_mass() -> None:
    # Shares are 0.032, 0.644, 0.087, 0.237: the two likeliest hold 0.88.
    kept = SCORES.clone()
    kept[[0, 2]] = -torch.inf
    assert_distributed(draw(SamplingParams(temperature=1.0, top_p=0.8)), kept.softmax(-1))
    assert draw(SamplingParams(temperature=1.0, top_p=1e-9), num=50) == {1: 50}


def test_top_p_applies_to_what_top_k_left() -> None:
    # Of the two likeliest the first holds 0.73, so a mass of 0.7 needs no second one.
    assert draw(SamplingParams(temperature=1.0, top_k=2, top_p=0.7), num=50) == {1: 50}


def test_tokens_do_not_depend_on_the_neighbours() -> None:
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(6, 50, generator=generator)
    params = [
        SamplingParams(temperature=0.9),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.1, top_k=5),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=2.0, top_p=0.5),
        SamplingParams(temperature=5.0),
    ]
    requests = [make_request(9, p, seed=index) for index, p in enumerate(params)]
    alone = [sample(scores[i : i + 1], [requests[i]])[0] for i in range(6)]
    assert sample(scores, requests) == alone
    assert sample(scores.flip(0), requests[::-1]) == alone[::-1]


def test_scores_that_are_not_finite_spoil_their_own_row_only() -> None:
    scores = SCORES.repeat(4, 1)
    scores[1, 2] = torch.nan
    scores[2, 2] = torch.inf
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature)
        tokens = sample(scores, [make_request(5, params) for _ in range(4)])
        assert tokens[1:3] == [None, None]
        assert None not in (tokens[0], tokens[3])


def test_half_precision_scores_are_sampled_as_float32() -> None:
    scores = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16)
    assert sample(scores, [make_request(1, SamplingParams())]) == [2]


def test_numbers_are_spread_evenly_over_positions_and_seeds() -> None:
    for numbers in (
        [uniform(0, position) for position in range(2000)],
        [uniform(seed, 5) for seed in range(2000)],
        [uniform(seed, seed) for seed in range(-1000, 1000)],
    ):
        assert all(0 <= number < 1 for number in numbers)
        tenths = Counter(int(number * 10) for number in numbers)
        assert set(tenths) == set(range(10))
        assert all(140 < count < 260 for count in tenths.values())


def test_seeds_have_sequences_of_their_own() -> None:
    golden = 0x9E3779B97F4A7C15
    first = {uniform(0, position) for position in range(100)}
    shifted = {uniform(golden, position) for position in range(100)}
    assert len(first) == len(shifted) == 100
    assert not first & shifted


def test_a_temperature_that_is_a_great_integer_is_that_temperature() -> None:
    """Symptom: torch could not hold it, so the request failed."""
    scores = torch.zeros(1, 8)
    whole, real = SamplingParams(temperature=10**30), SamplingParams(temperature=1e30)
    assert draw(whole, num=50, scores=scores) == draw(real, num=50, scores=scores)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("top_k", 2**31),
        ("seed", 2**64),
        ("seed", "x"),
        ("ignore_eos", 1),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^{field} is .*, it must be "):
        SamplingParams(**{field: value})  # type: ignore[arg-type]
