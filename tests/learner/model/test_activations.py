from __future__ import annotations

import pytest
from torch import nn

from asyncrl.learner.model.activations import Activations, Kept


@pytest.mark.parametrize("attention", [1.0, 4.0, 6.0, 9.0, 10.0])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.15, 0.2, 0.5, 0.8, 0.99])
def test_layers_keep_no_more_than_the_budget(share: float, attention: float) -> None:
    activations = Activations(share, width=1)
    for _ in range(4):
        activations.wrap(nn.Identity())
    activations._attention, activations._all = attention, 10.0
    activations.keep(share)
    sizes = {Kept.INPUT: 0.0, Kept.ATTENTION: attention, Kept.ALL: 10.0}
    assert len(activations._kept) == 4
    assert sum(sizes[each] for each in activations._kept) <= share * activations.nbytes
