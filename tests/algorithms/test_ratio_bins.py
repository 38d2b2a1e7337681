"""Ratios are counted in bins that do not depend on how a batch is split."""

from __future__ import annotations

import math

import pytest
import torch

from asyncrl.algorithms.ratio_bins import BINS, SIDE, bin_counts, bin_edges
from tests.algorithms.test_metrics import summary


def test_each_ratio_is_counted_between_the_edges_of_its_bin() -> None:
    edges = torch.tensor(bin_edges(), dtype=torch.float64)
    assert len(edges) == BINS + 1
    inside = (edges[1:] + edges[:-1]) / 2
    assert torch.equal(bin_counts(inside), torch.ones(BINS, dtype=torch.float64))
    assert math.exp(edges[-1]) == pytest.approx(16)


def test_the_bins_of_all_ratios_mirror_those_of_their_inverses() -> None:
    logs = torch.randn(1000, dtype=torch.float64) * torch.logspace(-4, 1, 1000, dtype=torch.float64)
    assert torch.equal(bin_counts(-logs), bin_counts(logs).flip(0))


def test_counts_add_up_however_the_tokens_are_split() -> None:
    logs = torch.randn(100)
    parts = sum(bin_counts(part) for part in logs.split([7, 0, 93]))
    assert torch.equal(parts, bin_counts(logs))


def test_ratios_that_are_not_finite_are_counted_and_harm_nothing() -> None:
    found = bin_counts(torch.tensor([0.0, -math.inf, math.inf, math.nan]))
    assert found.sum() == 4
    assert (found[SIDE], found[0] >= 1, found[-1] >= 1) == (1, True, True)


def test_a_step_reports_the_shares_of_raw_and_of_corrected_weights() -> None:
    # The ratios are 1, 2, 0.5, 1 and 4; the correction drops 0.5 and 4.
    found = summary(correction=[("mask", {"low": 0.6, "high": 3.0})])
    raw = {name: value for name, value in found.items() if name.startswith("ratio_bin/")}
    assert sum(raw.values()) == pytest.approx(1)
    assert raw["ratio_bin/8"] == pytest.approx(0.4)
    assert {name: value for name, value in found.items() if name.startswith("weight_bin/")} == {
        "weight_bin/8": pytest.approx(2 / 3),
        "weight_bin/15": pytest.approx(1 / 3),
    }


def test_without_a_correction_there_are_no_corrected_weights() -> None:
    assert not any(name.startswith("weight_bin/") for name in summary(correction=[]))
