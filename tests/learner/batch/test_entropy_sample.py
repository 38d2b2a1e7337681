"""The tokens whose entropy is a metric: a known share, evenly spread, and the same for every split of the batch."""

from __future__ import annotations

import pytest
import torch

from asyncrl.learner.batch.entropy_sample import FEWEST_TOKENS, LEAST_SHARE, entropy_sample, entropy_share


@pytest.mark.parametrize(
    ("tokens", "share"), [(0, 1.0), (FEWEST_TOKENS, 1.0), (1024, 0.25), (4096, LEAST_SHARE), (1 << 20, LEAST_SHARE)]
)
def test_small_steps_are_measured_whole_and_large_ones_by_a_sixteenth(tokens: int, share: float) -> None:
    assert entropy_share(tokens) == share


def test_every_place_of_a_sequence_and_every_sequence_has_its_share() -> None:
    length, count = 40, 4000
    sequence = torch.arange(count).repeat_interleave(length)
    chosen = entropy_sample(sequence, torch.arange(length).repeat(count), LEAST_SHARE).view(count, length)
    assert chosen.float().mean().item() == pytest.approx(LEAST_SHARE, rel=0.02)
    # An answer that always begins at the same position is measured as often as any other token.
    assert chosen.float().mean(0).tolist() == pytest.approx([LEAST_SHARE] * length, rel=0.1)
    assert set(chosen.sum(1).tolist()) <= {1, 2, 3, 4}


def test_the_choice_depends_on_nothing_but_the_place_in_the_batch() -> None:
    sequence, position = torch.tensor([7, 7, 3_000_000]), torch.tensor([0, 900, 1 << 40])
    whole = entropy_sample(sequence, position, 0.5)
    assert [
        bool(entropy_sample(sequence[at : at + 1], position[at : at + 1], 0.5)) for at in range(3)
    ] == whole.tolist()
