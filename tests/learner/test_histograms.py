"""The histograms of a step."""

from __future__ import annotations

import torch

from asyncrl.learner.step_metrics import BINS, spread


def test_a_histogram_counts_every_finite_number() -> None:
    for values in ([0.5, 0.5], [0.0, 1.0, 1.0], [1.0, 1.0 + 2**-23], [1e30, -1e30]):
        assert sum(spread(torch.tensor(values)).counts) == len(values)
    assert spread(torch.tensor([float("nan"), float("inf")])).counts == (0,) * BINS
