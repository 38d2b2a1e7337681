"""The routers of mixtures: in float32, counted, and balanced."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from asyncrl.config.schema import AlgorithmConfig, ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.batch.packing import PackedSequences
from asyncrl.learner.batch.prefixes import EVERY
from asyncrl.learner.model.policy import Policy, load_policy
from asyncrl.learner.model.router_balance import SEEN, TOKENS, Balance, load_summary
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.modelling.freezing import freeze
from asyncrl.modelling.routers import routers_of
from tests.learner.support import VOCABULARY, Run, make_config
from tests.learner.test_trainer import Setup
from tests.mixtures import BIASED, FAMILIES, mixture, save_mixture

pytestmark = pytest.mark.slow

MANY: dict[str, dict[str, Any]] = {
    **{family: {"num_experts": 32} for family in ("qwen3_moe", "olmoe")},
    "mixtral": {"num_local_experts": 32},
    "gpt_oss": {"num_local_experts": 32, "initializer_range": 0.1},
    **{family: {"n_routed_experts": 32} for family in BIASED},
}
"""So many experts that some tokens are close to a choice between two."""


def sequences() -> list[Tensor]:
    """Two that begin alike, and two others."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(64, (length,), generator=generator) for length in (40, 60, 90, 80, 99)]
    return [torch.cat([drawn[0], drawn[1]]), torch.cat([drawn[0], drawn[2]]), *drawn[3:]]


def recorded(model: torch.nn.Module) -> list[list[Any]]:
    """Record the inputs and outputs of each router from now on."""
    found: list[list[Any]] = []
    for router in routers_of(model):
        calls: list[Any] = []
        router.register_forward_hook(lambda _, given, made, calls=calls: calls.append((given[0].clone(), *made)))
        found.append(calls)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_router_of_a_bfloat16_model_chooses_as_one_in_float32_would(family: str, ranks: Ranks, tmp_path: Path):
    folder = save_mixture(tmp_path, family, **MANY[family])
    policy = load_policy(ModelConfig(str(folder), dtype="bfloat16"), 1.0, ranks, 256)
    routed = recorded(policy.model)
    with torch.no_grad():
        policy(PackedSequences.of(sequences()))
    exact = mixture(family, **MANY[family])
    for parameter in exact.parameters():
        parameter.data = parameter.data.bfloat16().float()
    assert len(routed) == (1 if family in BIASED else 2)
    changed = 0
    for calls, router in zip(routed, routers_of(exact), strict=True):
        [(states, _, weights, experts)] = calls
        assert states.dtype == torch.bfloat16
        _, their_weights, theirs = router(states.reshape(-1, states.shape[-1]).float())
        assert torch.equal(experts.sort(-1).values, theirs.sort(-1).values)
        torch.testing.assert_close(weights.float().sort(-1).values, their_weights.sort(-1).values)
        rounded = router.bfloat16()(states.reshape(-1, states.shape[-1]))[2]
        changed += int((rounded.sort(-1).values != theirs.sort(-1).values).any(-1).sum())
    # Otherwise this test would show nothing of those that transformers computes in bfloat16.
    assert changed > 0 or family in BIASED


@pytest.fixture(scope="module", params=["qwen3_moe", "glm4_moe", "gpt_oss"])
def policy(request: pytest.FixtureRequest, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    folder = save_mixture(tmp_path_factory.mktemp(request.param), request.param)
    return load_policy(ModelConfig(str(folder), activations=0.0), 1.0, ranks, 256)


def loads_of(policy: Policy, packed: PackedSequences) -> dict[str, Tensor]:
    policy(packed)[0].sum().backward()
    policy.zero_grad()
    return policy.loads.sums()


def test_loads_count_the_tokens_of_sequences_whether_prefixes_are_shared_and_passes_padded_or_not(policy: Policy):
    calls = recorded(policy.model)
    expected = loads_of(policy, PackedSequences.of(sequences()))
    counts = [torch.bincount(each[0][3].flatten(), minlength=4) for each in calls]
    assert expected[TOKENS] == sum(map(len, sequences()))
    assert torch.equal(expected[SEEN][:, :4].long(), torch.stack(counts))
    torch.testing.assert_close(expected[SEEN][:, 4:8].sum(1), expected[TOKENS].expand(len(counts)), rtol=1e-5, atol=0)
    shared = PackedSequences.of(sequences(), EVERY)
    assert len(shared.ids) == expected[TOKENS] - 40
    for packed in (shared, shared.padded(), PackedSequences.of(sequences()).padded()):
        found = loads_of(policy, packed)
        assert torch.equal(found[SEEN][:, :4], expected[SEEN][:, :4])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_tokens_of_a_pass_in_half_precision_are_counted_exactly(dtype: str, ranks: Ranks, tmp_path: Path):
    policy = load_policy(ModelConfig(str(save_mixture(tmp_path, "qwen3_moe")), dtype=dtype), 1.0, ranks, 256)
    many = [each for _ in range(9) for each in sequences()]
    expected = sum(map(len, many))
    # A number of this precision cannot hold the count.
    assert float(torch.tensor(expected).to(getattr(torch, dtype))) != expected
    for sharing in (None, EVERY):
        with torch.no_grad():
            policy(PackedSequences.of(many, sharing))
        loads = policy.loads.sums()
        assert loads[TOKENS] == expected
        # Each token goes to two experts.
        assert loads[SEEN][:, :4].sum(1).tolist() == [2 * expected] * len(loads[SEEN])


def test_the_summary_says_how_uneven_loads_are():
    seen = torch.tensor([[4.0, 4, 4, 4, 2, 2, 2, 2, 8], [16.0, 0, 0, 0, 8, 0, 0, 0, 4]], dtype=torch.float64)
    found = load_summary({SEEN: seen, TOKENS: torch.tensor(8.0)})
    assert found == {
        "experts/imbalance": 2.5,
        "experts/imbalance_max": 4.0,
        "experts/dead": 3 / 8,
        "experts/entropy": 6 / 8,
        "experts/balance_loss": (2.0 + 8.0) / 2,
    }
    assert load_summary({}) == {}


def balance_gradient(setup: Setup, passes: Sequence[Sequence[int]], weight: float) -> list[Tensor]:
    """Return the part of the gradient that the balance loss adds."""
    prepared = setup.prepared([setup.members])
    found = []
    for each in (weight, 0.0):
        setup.trainer.balance = Balance(each)
        found.append(setup.gradient(prepared, [list(members) for members in passes])[1])
    return [with_loss - without for with_loss, without in zip(*found, strict=True)]


@pytest.mark.parametrize("shape", [{"num_hidden_layers": 1}, {"decoder_sparse_step": 2}])
def test_the_balance_loss_has_the_gradient_of_transformers_one_over_all_tokens_of_the_minibatch(
    shape: dict[str, Any], ranks: Ranks, tmp_path: Path
):
    """Transformers' loss is of one layer here: of several, it adds the loads of their experts of equal numbers."""
    folder = save_mixture(tmp_path / "policy", "qwen3_moe", vocab_size=VOCABULARY, **shape)
    setup = Setup(make_config(folder, tmp_path), ranks)
    bare = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()
    rows = [length for branches in setup.batch.lengths.values() for length in branches]
    logits = [
        bare(each[None], output_router_logits=True, use_cache=False).router_logits
        for each in setup.batch.ids.split(rows)
    ]
    together = tuple(torch.cat(layer) for layer in zip(*logits, strict=True))
    (load_balancing_loss_func(together, 4, 2) * 0.5).backward()
    expected = [torch.zeros_like(each) if each.grad is None else each.grad for each in bare.parameters()]
    assert max(float(each.abs().max()) for each in expected) > 1e-3
    for passes in ([setup.members], [[3], [0, 1, 2], [4, 6, 7], [5], []]):
        for got, wanted in zip(balance_gradient(setup, passes, 0.5), expected, strict=True):
            torch.testing.assert_close(got, wanted, atol=2e-6, rtol=1e-4)


def test_the_balance_loss_of_layers_is_their_mean(ranks: Ranks, tmp_path: Path):
    folder = save_mixture(tmp_path / "policy", "glm4_moe", vocab_size=VOCABULARY, first_k_dense_replace=0)
    setup = Setup(make_config(folder, tmp_path), ranks)
    found = balance_gradient(setup, [setup.members], 1.0)
    bare = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    layers = recorded(bare)
    for each in setup.batch.ids.split([length for branches in setup.batch.lengths.values() for length in branches]):
        bare(each[None], use_cache=False)
    losses = []
    for calls in layers:
        logits, experts = torch.cat([each[1] for each in calls]), torch.cat([each[3] for each in calls])
        shares = (scores := logits.sigmoid()) / scores.sum(-1, keepdim=True)
        fractions = torch.bincount(experts.flatten(), minlength=4) / len(logits)
        losses.append(4 * (fractions * shares.mean(0)).sum())
    torch.stack(losses).mean().backward()
    for got, parameter in zip(found, bare.parameters(), strict=True):
        wanted = torch.zeros_like(got) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(got, wanted, atol=2e-6, rtol=1e-4)


@pytest.mark.heavy
def test_a_run_of_a_mixture_reports_its_routers_and_takes_the_weight_of_the_balance_loss(ranks: Ranks, tmp_path: Path):
    folder = save_mixture(tmp_path / "policy", "qwen3_moe", vocab_size=VOCABULARY)
    norms, reported = {}, {}
    for weight in (0.0, 100.0):
        config = make_config(folder, tmp_path / f"{weight}", steps=1)
        config.algorithm.balance_weight, config.learner.export = weight, False
        metrics = Run(config).train(ranks).metrics
        norms[weight] = metrics.of("grad_norm")[0]
        names = ("imbalance", "imbalance_max", "dead", "entropy", "balance_loss")
        reported[weight] = {name: metrics.of(f"experts/{name}")[0] for name in names}
    assert reported[0.0] == reported[100.0]
    assert norms[100.0] > 2 * norms[0.0]


def test_an_update_moves_biases_against_the_loads_and_versions_and_checkpoints_have_them(
    mixture: Path, ranks: Ranks, tmp_path: Path
):
    config = make_config(mixture, tmp_path / "whole", steps=4, checkpoint_every=2, minibatches=2)
    config.algorithm.balance_bias_rate = 0.25
    whole = Run(config).train(ranks)
    [name] = (each for each in whole.final if each.endswith("e_score_correction_bias"))
    before, after = (whole.weights[version][name] for version in (0, 1))
    moved = (after - before) / 0.25
    assert torch.equal(moved, moved.round())
    assert 0 < moved.abs().max() <= 2
    config.run.dir = str(tmp_path / "resumed")
    Run(config, stop_at=2).until_stopped(ranks)
    resumed = Run(config).train(ranks)
    assert torch.equal(resumed.final[name], whole.final[name])


def test_biases_rise_where_experts_get_too_few_tokens(ranks: Ranks, tmp_path: Path):
    folder = save_mixture(tmp_path, "deepseek_v3")
    policy = load_policy(ModelConfig(str(folder)), 1.0, ranks, 64)
    [router] = routers_of(policy.model)
    before = router.e_score_correction_bias.clone()
    policy.loads.move_biases({SEEN: torch.tensor([[1.0, 3.0, 2.0, 2.0, 0, 0, 0, 0, 0]])}, 0.5)
    torch.testing.assert_close(router.e_score_correction_bias - before, torch.tensor([0.5, -0.5, 0.0, 0.0]))


def test_what_a_family_cannot_do_is_refused_by_name(model: Path, ranks: Ranks, tmp_path: Path):
    dense = load_policy(ModelConfig(str(model)), 1.0, ranks, 64).model
    softmax = mixture("qwen3_moe")
    with pytest.raises(ConfigError, match=r"balance_weight=0\.1: experts of a qwen3 model cannot be balanced"):
        Balance.from_config(AlgorithmConfig(balance_weight=0.1), dense)
    with pytest.raises(ConfigError, match="balance_weight=null: the model's configuration has no router_aux_loss_coef"):
        Balance.from_config(AlgorithmConfig(balance_weight=None), dense)
    with pytest.raises(ConfigError, match=r"balance_bias_rate=0\.1: routers of a qwen3_moe model have no bias"):
        Balance.from_config(AlgorithmConfig(balance_bias_rate=0.1), softmax)
    assert Balance.from_config(AlgorithmConfig(), dense) == Balance()
    assert Balance.from_config(AlgorithmConfig(balance_weight=None), softmax) == Balance(0.001)
    assert Balance.from_config(AlgorithmConfig(balance_bias_rate=0.1), mixture("glm4_moe")) == Balance(0.0, 0.1)
    frozen = mixture("glm4_moe")
    freeze(frozen, ["moe_router"], "model.freeze")
    with pytest.raises(ConfigError, match=r"balance_bias_rate=0\.1 would move .*, which model\.freeze freezes"):
        Balance.from_config(AlgorithmConfig(balance_bias_rate=0.1), frozen)
