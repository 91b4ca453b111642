from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dockyard_actors.engines.sampling import greedy, sample, uniforms

SEEDS = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20)


@given(SEEDS, st.integers(0, 10_000))
def test_uniforms_lie_in_the_unit_interval_and_depend_on_their_own_seed_only(seeds: list[int], position: int):
    array = np.array(seeds, dtype=np.uint64)
    draws = uniforms(array, position)
    assert ((draws >= 0) & (draws < 1)).all()
    alone = [uniforms(array[i : i + 1], position)[0] for i in range(len(seeds))]
    assert draws.tolist() == alone


def test_uniforms_of_neighbouring_seeds_and_positions_look_independent():
    grid = np.stack([uniforms(np.arange(2000, dtype=np.uint64), position) for position in range(50)])
    assert abs(grid.mean() - 0.5) < 0.005
    assert abs(grid.var() - 1 / 12) < 0.002
    for shifted in (grid[:, 1:], grid[1:]):
        overlap = grid[: len(shifted), : shifted.shape[1]]
        assert abs(np.corrcoef(overlap.ravel(), shifted.ravel())[0, 1]) < 0.02
    counts, _ = np.histogram(grid, bins=100, range=(0, 1))
    assert counts.min() > 0.85 * grid.size / 100


@pytest.mark.parametrize("vocabulary", [2, 99, 256, 257, 1000])
def test_tokens_follow_the_softmax_at_the_temperature(vocabulary: int):
    torch.manual_seed(0)
    logits, draws = torch.randn(vocabulary) * 3, 40_000
    expected = torch.softmax(logits.double() / 1.7, -1)
    tokens, logprobs = sample(
        logits.repeat(draws, 1), 1.7, torch.from_numpy(uniforms(np.arange(draws, dtype=np.uint64), 3))
    )
    found = torch.bincount(tokens, minlength=vocabulary).double() / draws
    assert (found - expected).abs().max() < 4 * (0.25 / draws) ** 0.5
    assert (logprobs.double() - expected.log()[tokens]).abs().max() < 1e-5


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 600), st.floats(0, 1, exclude_max=True), st.integers(0, 2**32 - 1))
def test_a_token_without_probability_is_never_drawn(vocabulary: int, draw: float, seed: int):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, vocabulary, generator=generator) * 10
    allowed = torch.rand(1, vocabulary, generator=generator) < 0.2
    allowed[0, seed % vocabulary] = True
    logits = logits.masked_fill(~allowed, -torch.inf)
    for point in (draw, 0.0, 1 - 2.0**-53):
        token, logprob = sample(logits.clone(), 1.0, torch.tensor([point], dtype=torch.float64))
        assert allowed[0, token].all()
        assert logprob.isfinite().all()


def test_greedy_takes_the_mode_and_tells_its_logprob_at_the_temperature():
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 2.0, 0.0]])
    tokens, logprobs = greedy(logits.clone(), 0.5)
    assert tokens.tolist() == [1, 0]
    assert torch.allclose(logprobs, torch.log_softmax(logits / 0.5, -1).amax(-1))
