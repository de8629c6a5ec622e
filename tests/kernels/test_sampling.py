"""Tokens drawn by seed and position alone: the same on the device as by the engine's sampler."""

import pytest
import torch

from disconnect_watch.engine import SamplingParams
from disconnect_watch.engine.request import Request
from disconnect_watch.engine.rng import uniform as host_uniform
from disconnect_watch.engine.sampler import sample as host_sample
from disconnect_watch.kernels import Kernels, Sampling
from disconnect_watch.kernels.random import uniform

SEEDS = [0, 1, 2**31, 2**62 + 12345, 2**63 - 1]
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=1.0, top_k=3),
    SamplingParams(temperature=2.0, top_p=0.5),
    SamplingParams(temperature=1.0, top_k=40, top_p=0.9),
]


def sampling_of(params: list[SamplingParams], seeds: list[int], *, is_filtered: bool) -> Sampling:
    return Sampling(
        temperatures=torch.tensor([p.temperature for p in params]),
        seeds=torch.tensor(seeds),
        top_k=torch.tensor([p.top_k for p in params], dtype=torch.int32) if is_filtered else None,
        top_p=torch.tensor([p.top_p for p in params]) if is_filtered else None,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_numbers_are_the_engines_bit_for_bit(seed: int) -> None:
    positions = [0, 1, 77, 2**20, 2**40]
    numbers = uniform(torch.full((5,), seed), torch.tensor(positions))
    assert numbers.tolist() == [host_uniform(seed, position) for position in positions]


@pytest.mark.parametrize("is_filtered", [False, True])
@pytest.mark.parametrize("vocab_size", [5, 1024, 1500])
def test_tokens_are_those_of_the_engines_sampler(
    kernels: Kernels, is_filtered: bool, vocab_size: int
) -> None:
    torch.manual_seed(0)
    kinds = PARAMS if is_filtered else PARAMS[:3]
    params = [kinds[i % len(kinds)] for i in range(12)]
    seeds = [SEEDS[i % len(SEEDS)] for i in range(12)]
    lengths = [1 + 7 * i for i in range(12)]
    logits = torch.randn(12, vocab_size) * 3
    requests = [
        Request("r", [0] * length, params=each, seed=seed)
        for length, each, seed in zip(lengths, params, seeds, strict=True)
    ]
    drawn = kernels.sample(
        logits, torch.tensor(lengths), sampling_of(params, seeds, is_filtered=is_filtered)
    )
    assert drawn.tolist() == host_sample(logits, requests)


@pytest.mark.parametrize("is_filtered", [False, True])
@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf, -torch.inf])
def test_scores_that_are_no_finite_numbers_give_no_token(
    kernels: Kernels, spoilt: float, is_filtered: bool
) -> None:
    logits = torch.zeros(3, 2000)
    logits[1, 1500 if spoilt != -torch.inf else slice(None)] = spoilt
    for params in (PARAMS[0], PARAMS[1]):
        sampling = sampling_of([params] * 3, [1, 2, 3], is_filtered=is_filtered)
        drawn = kernels.sample(logits, torch.tensor([4, 5, 6]), sampling)
        assert [token >= 0 for token in drawn.tolist()] == [True, False, True]


def test_first_of_equal_scores_is_the_likeliest(kernels: Kernels) -> None:
    logits = torch.zeros(2, 3000)
    logits[0, [1030, 2050]] = 4.0
    sampling = sampling_of([PARAMS[0]] * 2, [1, 2], is_filtered=False)
    assert kernels.sample(logits, torch.tensor([1, 1]), sampling).tolist() == [1030, 0]


def test_greedy_scores_near_the_largest_float_stay_finite(kernels: Kernels) -> None:
    logits = torch.tensor([[1e38, 3e38, 2e38]])
    sampling = sampling_of([PARAMS[0]], [1], is_filtered=False)
    assert kernels.sample(logits, torch.tensor([1]), sampling).tolist() == [1]
