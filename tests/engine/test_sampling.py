"""Sampling: frequencies follow the softmax, impossible tokens never come, and noise belongs to its request."""

from __future__ import annotations

import numpy as np
import torch

from asyncrl.engine.sampling import request_key, request_seed, sample, uniforms


def test_frequencies_follow_the_softmax_at_the_temperature():
    torch.manual_seed(0)
    logits, draws = torch.randn(16), 40_000
    noise = uniforms([request_key(0, "session")] * draws, range(draws))
    for temperature in (0.5, 1.0, 2.0):
        tokens, _ = sample(logits.expand(draws, -1), torch.full((draws,), temperature), torch.from_numpy(noise))
        expected = (logits / temperature).softmax(-1) * draws
        chi_square = ((torch.bincount(tokens, minlength=16) - expected) ** 2 / expected).sum()
        assert chi_square < 44.3  # the 0.9999 quantile with 15 degrees of freedom


def test_logprobs_are_those_at_each_rows_own_temperature_and_at_one_where_it_is_greedy():
    logits = torch.randn(3, 9)
    tokens, logprobs = sample(logits, torch.tensor([0.0, 0.7, 1.0]), torch.full((3,), 0.4, dtype=torch.float64))
    assert tokens[0] == logits[0].argmax()
    for row, temperature in enumerate((1.0, 0.7, 1.0)):
        expected = (logits[row] / temperature).log_softmax(-1)[tokens[row]]
        torch.testing.assert_close(logprobs[row], expected)


def test_a_token_of_probability_zero_is_never_sampled():
    logits = torch.full((3, 8), -torch.inf)
    logits[:, [2, 5]] = 0.0
    lowest, highest = 2.0**-49, 1.0 - 2.0**-49
    tokens, _ = sample(logits, torch.ones(3), torch.tensor([lowest, 0.5, highest], dtype=torch.float64))
    assert tokens.tolist() == [2, 5, 5]


def test_logits_that_are_not_finite_show_in_the_logprob():
    logits = torch.zeros(2, 4)
    logits[:, 1] = torch.nan
    _, logprobs = sample(logits, torch.tensor([0.0, 1.0]), torch.full((2,), 0.5, dtype=torch.float64))
    assert not logprobs.isfinite().any()


def test_noise_is_fixed_by_key_and_position_and_fills_the_open_unit_interval():
    keys = [request_key(seed, session) for seed in (0, 1) for session in ("a", "b")]
    noise = uniforms(np.repeat(np.array(keys, np.uint64), 5000).tolist(), list(range(5000)) * 4)
    assert noise.dtype == np.float64
    assert len(np.unique(noise)) == len(noise)
    assert 0 < noise.min() < 0.001
    assert 0.999 < noise.max() < 1
    assert abs(noise.mean() - 0.5) < 0.01
    assert uniforms([keys[2]], [17])[0] == noise[2 * 5000 + 17]
    assert np.abs(np.corrcoef(noise.reshape(4, -1)) - np.eye(4)).max() < 0.06


def test_each_session_of_each_run_has_a_seed_that_fits_into_a_signed_integer():
    seeds = [request_seed(run, f"t000000012.{member}.0/1") for run in range(8) for member in range(128)]
    assert len(set(seeds)) == len(seeds)
    assert 0 <= min(seeds) < 1 << 24
    assert 1 << 30 < max(seeds) < 1 << 31
