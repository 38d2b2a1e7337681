"""The experts of mixtures: grouped matrix products give what transformers' loop over the experts gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from asyncrl.config.schema import ModelConfig
from asyncrl.learner.batch.packing import PackedSequences
from asyncrl.learner.batch.prefixes import EVERY
from asyncrl.learner.model.policy import Policy, load_policy
from asyncrl.learner.ranks.ranks import Ranks
from tests.mixtures import FAMILIES, VOCABULARY, save_mixture

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mixture(tmp_path_factory.mktemp(request.param), request.param)


def sequences() -> list[Tensor]:
    """Three that begin alike, and one of its own."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(VOCABULARY, (length,), generator=generator) for length in (9, 7, 12, 5, 17)]
    return [*(torch.cat([drawn[0], each]) for each in drawn[1:4]), drawn[4]]


def weights(count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(2))


def by_loop(folder: Path) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs of all sequences' tokens but the first, each sequence alone, and the gradients of their weighted sum,
    with transformers' own loop over the experts."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()
    assert model.config._experts_implementation == "eager"
    found = []
    for each in sequences():
        logprobs = model(each[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        found.append(logprobs.gather(-1, each[1:, None])[:, 0])
    together = torch.cat(found)
    (together * weights(len(together))).sum().backward()
    return together.detach(), gradients(model)


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {name: (each.full_tensor() if isinstance(each, DTensor) else each).clone() for name, each in found.items()}


def packed(policy: Policy, shared: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the results of `by_loop` by a policy, in one packed pass."""
    policy.zero_grad()
    logprobs, _ = policy(PackedSequences.of(sequences(), EVERY if shared else None))
    firsts = torch.cat([torch.arange(len(each)) == 0 for each in sequences()])
    together = logprobs[~firsts]
    (together * weights(len(together))).sum().backward()
    return together.detach(), gradients(policy.model)


def assert_same(got: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(got[0], expected[0], atol=1e-5, rtol=1e-5)
    assert got[1].keys() == expected[1].keys()
    for name, each in expected[1].items():
        torch.testing.assert_close(got[1][name], each, atol=1e-5 * max(1.0, float(each.abs().max())), rtol=1e-4)


def test_grouped_products_of_packed_sequences_give_the_log_probs_and_gradients_of_a_loop_over_experts(
    folder: Path, ranks: Ranks
):
    policy, expected = load_policy(ModelConfig(str(folder)), 1.0, ranks, 64), by_loop(folder)
    assert policy.model.config._experts_implementation == "grouped_mm"
    assert any("experts" in name for name in expected[1])
    assert_same(packed(policy, shared=False), expected)
    assert_same(packed(policy, shared=True), expected)


def test_layers_that_are_computed_again_use_the_same_experts(folder: Path, ranks: Ranks):
    kept = packed(load_policy(ModelConfig(str(folder), activations=1.0), 1.0, ranks, 64), shared=False)
    again = load_policy(ModelConfig(str(folder), activations=0.0), 1.0, ranks, 64)
    # The first pass measures, and its last layer keeps everything.
    packed(again, shared=False)
    logprobs, found = packed(again, shared=False)
    assert torch.equal(logprobs, kept[0])
    assert all(torch.equal(found[name], each) for name, each in kept[1].items())
