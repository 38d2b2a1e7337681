"""The sums of a step come from the GPU in one transfer, with the same bits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from asyncrl.learner.ranks.ranks import as_bytes, from_bytes, on_host

SUMS: dict[str, Tensor] = {
    "count": torch.tensor(7),
    "loss": torch.tensor(-0.0, dtype=torch.float64),
    "small": torch.tensor(5e-324, dtype=torch.float64),
    "odd": torch.tensor([True, False, True]),
    "nan": torch.tensor([math.nan, -math.inf, 0.1], dtype=torch.float32),
    "half": torch.tensor([1.5], dtype=torch.bfloat16),
    "empty": torch.zeros(0),
    "turned": torch.arange(12, dtype=torch.float64).reshape(3, 4).T,
    "thinned": torch.arange(10)[::3],
}


def bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same_bits(found: dict[str, Tensor]) -> None:
    assert list(found) == list(SUMS)
    assert {name: bits(each) for name, each in found.items()} == {name: bits(each) for name, each in SUMS.items()}


def test_tensors_come_back_from_their_joined_bytes_with_the_same_bits() -> None:
    assert_same_bits(from_bytes(as_bytes(SUMS.values()), SUMS))


def test_copies_on_the_host_are_no_views_of_what_was_given() -> None:
    found = on_host(SUMS)
    assert_same_bits(found)
    given = {each.data_ptr() for each in SUMS.values()}
    assert not given & {each.data_ptr() for each in found.values() if each.numel()}


def test_all_tensors_of_a_gpu_come_in_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, tensors of the CPU that deny it take its place."""
    has_gpu = torch.cuda.is_available()
    given = {name: each.cuda() if has_gpu else each.clone() for name, each in SUMS.items()}
    copied, copy = [], Tensor.cpu
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "cpu", lambda self: (copied.append(self), copy(self))[1])
        if not has_gpu:
            patch.setattr(Tensor, "is_cpu", False)
        found = on_host(given)
    assert len(copied) == 1
    assert_same_bits(found)
