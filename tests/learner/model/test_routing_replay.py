"""Experts that the engine used, in the learner's passes: they are the ones that compute, with weights of the learner's
own router; and the router's own choice changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import Tensor
from transformers import AutoModelForCausalLM

from asyncrl.commands.demo.tokenizer import build_tokenizer
from asyncrl.config.schema import ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.batch.local_batch import build_local_batch
from asyncrl.learner.batch.packing import PackedSequences
from asyncrl.learner.batch.prefixes import EVERY
from asyncrl.learner.model.policy import Policy, load_policy
from asyncrl.learner.model.routing_replay import CHANGED, CHOICES, REPLAYED, TOKENS
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.modelling.routing import FAMILIES, routers_of, routing_shape
from tests.learner.support import VOCABULARY, Run, make_config, random_routing, random_sequences, random_trajectory
from tests.mixtures import save_mixture

pytestmark = pytest.mark.slow

CASES = [*FAMILIES, "qwen3_moe normalised"]
LENGTHS = (9, 14, 5)


def save(folder: Path, case: str, **more: Any) -> Path:
    family, _, kind = case.partition(" ")
    save_mixture(folder, family, vocab_size=VOCABULARY, **({"norm_topk_prob": True} if kind else {}), **more)
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(params=CASES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save(tmp_path / "policy", request.param)


def loaded(folder: Path, ranks: Ranks, **model: Any) -> Policy:
    return load_policy(ModelConfig(str(folder), **model), 1.0, ranks, 64, replays_routing=True)


def packed_of(sequences: Sequence[Tensor], routing: np.ndarray | None = None, sharing: Any = None) -> PackedSequences:
    positions = torch.cat([torch.arange(len(each)) for each in sequences])
    rows = None if routing is None else torch.from_numpy(routing)
    lengths = [len(each) for each in sequences]
    return PackedSequences.build(torch.cat(list(sequences)), positions, positions > 0, lengths, sharing, rows)


def outputs(policy: Policy, packed: PackedSequences) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs, and the gradients of their weighted sum."""
    logprobs, _ = policy(packed)
    (torch.linspace(-1, 1, len(logprobs)) * logprobs).sum().backward()
    gradients = {
        name: each.grad.full_tensor().clone() for name, each in policy.named_parameters() if each.grad is not None
    }
    policy.zero_grad()
    return logprobs.detach(), gradients


def own_routing(policy: Policy, packed: PackedSequences) -> np.ndarray:
    """The rows of what the policy's routers choose themselves."""
    chosen: list[Tensor] = []
    hooks = [
        router.register_forward_hook(lambda _, __, output: chosen.append(output[2]))
        for router in routers_of(policy.model, policy.model.config)
    ]
    with torch.no_grad():
        policy(packed.unrouted())
    for hook in hooks:
        hook.remove()
    assert policy.replays is not None
    return policy.replays.pack(torch.stack(chosen, 1).numpy())


def test_a_models_own_experts_change_nothing_bit_for_bit(folder: Path, ranks: Ranks) -> None:
    policy, sequences = loaded(folder, ranks), random_sequences(*LENGTHS)
    expected, gradients = outputs(policy, packed_of(sequences))
    rows = own_routing(policy, packed_of(sequences))
    partly = np.where(np.arange(len(rows))[:, None] % 3 == 0, 255, rows).astype(np.uint8)
    for routing in (rows, partly, np.full_like(rows, 255)):
        packed = packed_of(sequences, routing)
        logprobs, replayed = outputs(policy, packed)
        assert torch.equal(logprobs, expected)
        assert all(torch.equal(replayed[name], gradients[name]) for name in gradients)
        counts = {name: int(each) for name, each in policy.replay_sums(packed).items()}
        known = int((routing != 255).any(1).sum())
        assert policy.replays is not None
        assert counts == {
            TOKENS: sum(LENGTHS),
            REPLAYED: known,
            CHOICES: known * len(policy.replays.layers),
            CHANGED: 0,
        }


class Forced:
    """Transformers' own model, whose routers are told their experts [T, layers, top_k]. Weights follow from the
    families' papers: a softmax over the chosen ones alone is the renormalised softmax over all."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self._experts: Tensor
        for index, router in enumerate(routers_of(self.model, self.model.config)):
            router.register_forward_hook(lambda router, _, output, index=index: self._force(router, index, output))

    def _force(self, router: Any, index: int, output: Any) -> Any:
        logits, experts = output[0], self._experts[:, index]
        chosen = logits.gather(1, experts)
        if "Glm4" in type(router).__name__:
            scores = chosen.sigmoid()
            weights = router.routed_scaling_factor * scores / scores.sum(1, keepdim=True)
        elif getattr(router, "norm_topk_prob", True):
            weights = chosen.softmax(1)
        else:
            weights = chosen.exp() / logits.exp().sum(1, keepdim=True)
        return logits, weights, experts

    def logprobs(self, ids: Tensor, experts: np.ndarray) -> Tensor:
        self._experts = torch.from_numpy(experts).long()
        logits = self.model(ids[None], use_cache=False).logits[0, :-1]
        return torch.cat([logits.new_zeros(1), logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]])


def test_other_experts_give_what_a_model_with_forced_experts_gives_packed_or_alone(folder: Path, ranks: Ranks) -> None:
    policy, sequences, forced = loaded(folder, ranks), random_sequences(*LENGTHS), Forced(folder)
    shape = policy.replays
    assert shape is not None
    rows = random_routing(shape, sum(LENGTHS), np.random.default_rng(0))
    logprobs, gradients = outputs(policy, packed_of(sequences, rows).padded())
    parts = np.split(shape.unpack(rows), np.cumsum(LENGTHS)[:-1])
    expected = torch.cat([forced.logprobs(ids, part) for ids, part in zip(sequences, parts, strict=True)])
    torch.testing.assert_close(logprobs, expected.detach(), atol=1e-5, rtol=0)
    own, _ = outputs(policy, packed_of(sequences))
    assert (own - logprobs).abs().max() > 0.1
    (torch.linspace(-1, 1, len(expected)) * expected).sum().backward()
    for name, parameter in forced.model.named_parameters():
        torch.testing.assert_close(gradients[f"model.{name}"], parameter.grad, atol=2e-5, rtol=1e-4)
    routers = [name for name in gradients if name.endswith("mlp.gate.weight")]
    assert len(routers) == len(shape.layers)
    assert all(gradients[name].abs().max() > 1e-3 for name in routers)


@pytest.mark.parametrize("activations", [0.0, 0.5, 1.0])
def test_layers_that_are_computed_again_have_the_same_experts_again(
    tmp_path: Path, ranks: Ranks, activations: float
) -> None:
    folder = save(tmp_path / "policy", "qwen3_moe", num_hidden_layers=4)
    policies = [loaded(folder, ranks, activations=share) for share in (1.0, activations)]
    shape = routing_shape(policies[0].model.config)
    for seed in range(2):
        rows = random_routing(shape, sum(LENGTHS), np.random.default_rng(seed))
        packed = packed_of(random_sequences(*LENGTHS), rows)
        (expected, gradients), (logprobs, ours) = (outputs(policy, packed) for policy in policies)
        torch.testing.assert_close(logprobs, expected, atol=1e-6, rtol=0)
        for name in gradients:
            torch.testing.assert_close(ours[name], gradients[name], atol=1e-6, rtol=1e-5)


def test_sequences_that_share_a_prefix_with_its_experts_give_what_they_give_alone(tmp_path: Path, ranks: Ranks) -> None:
    policy = loaded(save(tmp_path / "policy", "qwen3_moe"), ranks)
    shape, (prefix, *ends) = policy.replays, random_sequences(8, 3, 6, 4)
    assert shape is not None
    rng = np.random.default_rng(0)
    rows = random_routing(shape, len(prefix), rng)
    routing = np.concatenate([part for end in ends for part in (rows, random_routing(shape, len(end), rng))])
    sequences = [torch.cat([prefix, end]) for end in ends]
    shared = packed_of(sequences, routing, EVERY)
    assert len(shared.ids) == 8 + 3 + 6 + 4
    (expected, gradients), (logprobs, ours) = (
        outputs(policy, packed) for packed in (packed_of(sequences, routing), shared)
    )
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
    for name in gradients:
        torch.testing.assert_close(ours[name], gradients[name], atol=1e-4, rtol=1e-4)
    assert int(policy.replay_sums(shared)[REPLAYED]) == len(shared.ids)


def test_other_families_are_refused_by_name(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="qwen3 model cannot be replayed"):
        loaded(model, ranks)
    with pytest.raises(ConfigError, match="deepseek_v3 model cannot be replayed"):
        loaded(save(tmp_path / "policy", "deepseek_v3"), ranks)


def test_experts_that_are_none_of_the_models_are_counted_and_the_policy_routes_those_tokens_itself(
    tmp_path: Path, ranks: Ranks
) -> None:
    shape = routing_shape(loaded(save(tmp_path / "policy", "qwen3_moe"), ranks).model.config)
    rng = np.random.default_rng(0)
    plain = [random_trajectory(0, rng) for _ in range(4)]
    good = random_routing(shape, len(plain[0]), rng)
    wide = np.zeros((len(plain[1]), shape.width + 1), np.uint8)
    high = random_routing(shape, len(plain[2]), rng)
    high[3, 0] = shape.experts
    routings = [good, wide, high]
    given = [structs.replace(each, routed_experts=rows) for each, rows in zip(plain, routings, strict=False)]
    batch = build_local_batch(range(4), [*given, plain[3]], ranks.device, routing=shape)
    assert batch.refused == 2
    assert batch.routing is not None
    np.testing.assert_array_equal(batch.routing[: len(good)].numpy(), good)
    assert (batch.routing[len(good) :] == 255).all()


def test_a_run_trains_with_replayed_experts_and_says_how_many_differ(tmp_path: Path, ranks: Ranks) -> None:
    folder = save(tmp_path / "policy", "qwen3_moe")
    runs = [
        Run(make_config(folder, tmp_path / f"{replay}", steps=2, router_replay=replay)).train(ranks)
        for replay in (True, False)
    ]
    replayed, changed, refused = (runs[0].metrics.of(f"routing/{name}") for name in ("replayed", "changed", "refused"))
    assert all(0.5 < each < 0.8 for each in replayed.values())
    assert all(0.5 < each < 1 for each in changed.values())
    assert refused == {0: 1, 1: 1}
    assert not runs[1].metrics.of("routing/replayed")
    assert any(not torch.equal(runs[0].final[name], runs[1].final[name]) for name in runs[0].final)
