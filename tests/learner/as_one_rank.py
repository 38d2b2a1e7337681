"""Compares the results of several ranks that compute together with those of one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

MEASURED = ("seconds/", "memory/", "idle", "tokens_per_s", "kept/")
"""The beginnings of metrics that depend on time. A thread counts kept episodes some time after their step."""


def assert_close(found: Tensor, expected: Tensor, name: str) -> None:
    size = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(found, expected, atol=2e-5 * size, rtol=1e-4, msg=lambda m: f"{name}: {m}")


def assert_same_pass(found: Sequence[Any], expected: Sequence[Any], name: str) -> None:
    """Tensors, and tensors by name, of a pass."""
    for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if isinstance(theirs, Tensor):
            assert_close(ours, theirs, f"{name} {index}")
            continue
        assert ours.keys() == theirs.keys()
        for parameter in theirs:
            assert_close(ours[parameter], theirs[parameter], f"{name} {parameter}")


def assert_same_runs(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Weights by version, metrics by step, and kept episodes, of runs by name."""
    assert found.keys() == expected.keys()
    for name, run in expected.items():
        ours = found[name]
        assert ours["weights"].keys() == run["weights"].keys()
        for version, tensors in run["weights"].items():
            assert ours["weights"][version].keys() == tensors.keys()
            for tensor in tensors:
                assert_close(ours["weights"][version][tensor], tensors[tensor], f"{name} {tensor}")
        assert ours["kept"] == run["kept"]
        assert [step for step, _ in ours["metrics"]] == [step for step, _ in run["metrics"]]
        for (_, left), (_, right) in zip(ours["metrics"], run["metrics"], strict=True):
            assert left.keys() == right.keys()
            different = {
                key: (left[key], right[key])
                for key in right
                if not key.startswith(MEASURED)
                if {key: left[key]} != pytest.approx({key: right[key]}, rel=1e-4, abs=1e-5)
            }
            assert different == {}, f"{name}: {different}"
