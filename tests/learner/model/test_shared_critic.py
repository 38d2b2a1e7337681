"""A critic on the policy's own backbone: one pass, one model, and the sum of both gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from asyncrl.commands.export import export_run
from asyncrl.config.refusals import refusals
from asyncrl.config.schema import ModelConfig, TrainConfig
from asyncrl.learner.batch.packing import PackedSequences
from asyncrl.learner.model.optimizer import Trainable
from asyncrl.learner.model.policy import Policy, load_policy
from asyncrl.learner.ranks.ranks import Ranks
from tests.learner.support import (
    Run,
    assert_weights_close,
    assert_weights_equal,
    make_config,
    random_sequences,
    with_critic,
    write_model,
)

pytestmark = pytest.mark.slow

WEIGHT = 0.3


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy whose files have a value head too, so that values have a gradient by the backbone from the start."""
    folder = write_model(tmp_path_factory.mktemp("headed"))
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(5)
    head = {"v_head.summary.weight": torch.randn(1, 32) / 4, "v_head.summary.bias": torch.randn(1)}
    save_file(tensors | head, folder / "model.safetensors", {"format": "pt"})
    return folder


def configured(model: Path, folder: Path, shared: bool, **learner: Any) -> TrainConfig:
    config = with_critic(make_config(model, folder, **{"steps": 2, "micro_tokens": 10_000, **learner}))
    config.critic.shared, config.critic.weight = shared, WEIGHT
    return config


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Tensor]]:
    """The gradients of the first update of each model, by the name of its class."""
    found: dict[str, dict[str, Tensor]] = {}
    update = Trainable.update

    def noting(self: Any, step: int, scale: float) -> Any:
        named = self.module.named_parameters()
        first = {name: whole(each.grad) for name, each in named if each.grad is not None}
        found.setdefault(type(self.module).__name__.removeprefix("FSDP"), first)
        return update(self, step, scale)

    monkeypatch.setattr(Trainable, "update", noting)
    return found


def test_its_gradients_are_those_of_a_policy_and_of_a_critic_by_themselves_added_up(
    headed: Path, ranks: Ranks, tmp_path: Path, gradients: dict[str, dict[str, Tensor]]
) -> None:
    separate = Run(configured(headed, tmp_path / "separate", shared=False)).train(ranks)
    policy, critic = gradients.pop("Policy"), gradients.pop("Critic")
    shared = Run(configured(headed, tmp_path / "shared", shared=True)).train(ranks)
    both = gradients["Policy"]
    assert "Critic" not in gradients
    assert both.keys() == policy.keys() | {"value_head.weight", "value_head.bias"}
    for name, gradient in both.items():
        if name.startswith("value_head."):
            expected = WEIGHT * critic[name.replace("value_head", "head")]
        else:
            of_values = critic.get(name.replace("model.model.", "decoder."))
            assert of_values is not None
            assert float(of_values.abs().max()) > 1e-3, name
            expected = policy[name] + WEIGHT * of_values
        torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-4, msg=lambda text, name=name: name + text)
    for name in ("loss", "value/bias", "value/explained_variance"):
        assert shared.metrics.of(name)[0] == pytest.approx(separate.metrics.of(name)[0], abs=1e-5), name


def test_a_pass_with_values_is_one_pass_of_the_backbone_and_gives_what_two_would(headed: Path, ranks: Ranks) -> None:
    policy = load_policy(ModelConfig(str(headed)), 1.0, ranks, 64, with_values=True)
    packed, passes = PackedSequences.of(random_sequences(9, 5)), []
    policy.model.model.layers[0].register_forward_hook(lambda *_: passes.append(1))
    with torch.no_grad():
        logprobs, entropy, values = policy.with_values(packed, with_entropy=True)
        assert len(passes) == 1
        alone, alone_entropy = policy(packed, with_entropy=True)
        assert torch.equal(values, policy.values(packed))
    assert torch.equal(logprobs, alone)
    assert entropy is not None
    assert alone_entropy is not None
    assert torch.equal(entropy, alone_entropy)
    decoder = AutoModelForCausalLM.from_pretrained(headed).model
    head = load_file(headed / "model.safetensors")
    with torch.no_grad():
        states = torch.cat([decoder(each[None]).last_hidden_state[0, :-1] for each in random_sequences(9, 5)])
        expected = (states @ head["v_head.summary.weight"].T + head["v_head.summary.bias"])[:, 0]
    torch.testing.assert_close(values[packed.needed], expected, atol=1e-4, rtol=0)


@pytest.mark.heavy
def test_any_split_into_passes_trains_it_the_same_and_a_resume_gives_the_same_bits(
    headed: Path, ranks: Ranks, tmp_path: Path
) -> None:
    once, split = (
        Run(configured(headed, tmp_path / str(size), True, micro_tokens=size)).train(ranks) for size in (10_000, 40)
    )
    assert_weights_close(once.final, split.final, atol=1e-5)
    Run(configured(headed, tmp_path / "cut", True, checkpoint_every=1), stop_at=1).until_stopped(ranks)
    resumed = Run(configured(headed, tmp_path / "cut", True, checkpoint_every=1)).train(ranks)
    assert_weights_equal(resumed.final, once.final)


def test_there_is_no_second_model_and_what_is_published_and_exported_has_no_value_head(
    headed: Path, ranks: Ranks, tmp_path: Path
) -> None:
    run = Run(configured(headed, tmp_path, shared=True)).train(ranks)
    assert not any("value_head" in name or "score" in name for name in run.final)
    folder = tmp_path / "run"
    with safe_open(folder / "checkpoints" / "step-000002" / "rank-00000.safetensors", "pt") as stored:
        names = set(stored.keys())
        head = stored.get_tensor("policy/weights/value_head.weight")
    assert not any(name.startswith("critic/") for name in names)
    assert "policy/moments/exp_avg/value_head.weight" in names
    for policy, critic in (
        (folder / "model", folder / "critic"),
        (export_run(str(folder), to=tmp_path / "policy"), export_run(str(folder), to=tmp_path / "c", critic=True)),
    ):
        made = AutoModelForTokenClassification.from_pretrained(critic)
        assert torch.equal(made.score.weight, head)
        trained = AutoModelForCausalLM.from_pretrained(policy)
        for name, each in trained.model.state_dict().items():
            assert torch.equal(each, made.model.state_dict()[name]), name
        assert not torch.equal(trained.lm_head.weight, AutoModelForCausalLM.from_pretrained(headed).lm_head.weight)


@pytest.mark.parametrize("key", ["path", "freeze", "warmup_steps", "lora"])
def test_what_only_a_model_of_its_own_has_is_refused(key: str, headed: Path, tmp_path: Path) -> None:
    config = configured(headed, tmp_path, shared=True)
    if key == "lora":
        config.critic.lora.rank = 4
    else:
        setattr(config.critic, key, {"path": "elsewhere", "freeze": ["embeddings"], "warmup_steps": 1}[key])
    assert any("critic.shared" in line and f"critic.{key}" in line for line in refusals(config))


def test_a_policy_without_a_value_head_is_as_ever(headed: Path, ranks: Ranks) -> None:
    policy: Policy = load_policy(ModelConfig(str(headed)), 1.0, ranks, 64)
    assert policy.value_head is None
    assert not any("value_head" in name for name, _ in policy.named_parameters())
