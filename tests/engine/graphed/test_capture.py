"""Operations for which the host would wait are found without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from asyncrl.engine.graphed.capture import NoGraphError, RefuseWaiting


@pytest.mark.parametrize(
    ("waits", "name"),
    [
        (lambda x: x.sum().item(), "_local_scalar_dense"),
        (lambda x: bool((x > 0).any()), "_local_scalar_dense"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x[x > 1], "index"),
        (lambda x: x.masked_select(x > 1), "masked_select"),
        (lambda x: torch.equal(x, x + 1), "equal"),
        (lambda x: x.unique(), "_unique2"),
    ],
)
def test_an_operation_whose_result_the_host_needs_is_refused_by_name(waits: Callable[[Any], Any], name: str) -> None:
    with pytest.raises(NoGraphError, match=f"result of {name} "), RefuseWaiting():
        waits(torch.arange(4.0))


def test_indices_and_masks_of_fixed_shapes_are_no_reason_to_wait() -> None:
    x = torch.arange(4.0)
    with RefuseWaiting():
        found = torch.where(x > 1, x[torch.tensor([3, 2, 1, 0])], 0).masked_fill(x > 2, 7).topk(1).values
    assert found.item() == 7
