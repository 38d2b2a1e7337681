"""LoRA (model.lora): what the learner trains, saves and publishes, compared with peft's own model."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftLora
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.commands.merge.merge import merge
from asyncrl.config.schema import CriticConfig, LearnerConfig, LoraConfig, ModelConfig
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.learner.batch.packing import PackedSequences
from asyncrl.learner.checkpoint.checkpoint import Checkpoints
from asyncrl.learner.checkpoint.critic_export import export_checkpoint_critic, export_critic
from asyncrl.learner.checkpoint.export import export_checkpoint, export_checkpoint_adapter
from asyncrl.learner.checkpoint.gathering import gather_all
from asyncrl.learner.checkpoint.progress import Progress
from asyncrl.learner.checkpoint.rounded_adapters import kept_share
from asyncrl.learner.model.critic import load_critic
from asyncrl.learner.model.lora import add_adapters, check_installed, gather_adapters, save_adapters
from asyncrl.learner.model.optimizer import Trainable
from asyncrl.learner.model.policy import BaseOfPolicy, Policy, load_policy, load_reference, reference_of
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.modelling.adapters import adapter_parameters
from asyncrl.weights.delta import diff
from asyncrl.weights.manifest import take_snapshot
from tests.learner.support import (
    Run,
    assert_weights_equal,
    make_config,
    random_sequences,
    save_whole,
    with_critic,
    write_model,
)

pytestmark = pytest.mark.slow

DTYPES = (torch.float32, torch.bfloat16)
SMALL = LoraConfig(rank=4, alpha=8, targets=["q_proj", "down_proj"])


def with_values(policy: Policy, seed: int = 0) -> Policy:
    """The policy with adapters that change it."""
    set_adapters(policy.model, seed)
    return policy


def set_adapters(model: Any, seed: int = 0) -> None:
    """Give the adapters of a model values that change it."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in adapter_parameters(model).values():
        with torch.no_grad():
            local: Any = parameter.to_local()
            local.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


def peft_model(model: Path, lora: LoraConfig, adapters: dict[str, Tensor]) -> Any:
    """peft's own model with these adapters."""
    config = PeftLora(r=lora.rank, lora_alpha=lora.alpha, use_rslora=lora.rslora, target_modules=lora.targets)
    made = get_peft_model(AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager"), config)
    own = {f"base_model.model.{name}".replace(".weight", ".default.weight"): each for name, each in adapters.items()}
    assert not made.load_state_dict(own, strict=False).unexpected_keys
    return made


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def one_by_one(model: nn.Module, batch: list[Tensor]) -> Tensor:
    rows = []
    for ids in batch:
        logits = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        rows += [torch.zeros(1), logits.gather(1, ids[1:, None])[:, 0]]
    return torch.cat(rows)


def test_new_adapters_change_nothing_are_random_by_the_seed_alone_and_have_float32_masters_beside_a_base_in_the_dtype(
    model: Path, ranks: Ranks
):
    packed = PackedSequences.of(random_sequences(6, 9))
    plain = load_policy(ModelConfig(str(model)), 1.0, ranks, 64)
    config = ModelConfig(str(model), lora=LoraConfig(rank=4))
    first, again, other = (load_policy(config, 1.0, ranks, 64, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first(packed)[0], plain(packed)[0])
    left, same, right = (gather_adapters(each.model) for each in (first, again, other))
    assert_weights_equal(left, same)
    for name, tensor in left.items():
        if "lora_B" in name:
            assert not tensor.any()
        else:
            bound = tensor.shape[1] ** -0.5
            assert 0.8 * bound < tensor.abs().max() <= bound, "as kaiming_uniform_ with a = sqrt(5)"
            assert not torch.equal(tensor, right[name])
    stored = load_policy(replace(config, dtype="bfloat16"), 1.0, ranks, 64)
    dtypes = {name: each.dtype for name, each in stored.named_parameters()}
    assert all(each is (torch.float32 if "lora_" in name else torch.bfloat16) for name, each in dtypes.items())


@pytest.mark.parametrize("activations", [0, 0.5, 1])
@pytest.mark.parametrize("lora", [SMALL, LoraConfig(rank=3, rslora=True, targets=["all-linear"])])
def test_packed_log_probs_and_gradients_are_those_of_pefts_model_one_sequence_at_a_time(
    model: Path, ranks: Ranks, lora: LoraConfig, activations: float
):
    batch = random_sequences(5, 1, 19, 33)
    policy = with_values(load_policy(ModelConfig(str(model), lora=lora, activations=activations), 1.0, ranks, 64))
    targets: Any = "all-linear" if lora.targets == ["all-linear"] else lora.targets
    expected_model = peft_model(model, replace(lora, targets=targets), gather_adapters(policy.model))
    expected = one_by_one(expected_model, batch)
    weights = torch.linspace(-1, 1, len(expected))
    (weights * expected).sum().backward()
    found = policy(PackedSequences.of(batch))[0]
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    (weights * found).sum().backward()
    of_peft = {name.removeprefix("base_model.model."): each.grad for name, each in expected_model.named_parameters()}
    own = {name: each.grad for name, each in policy.model.named_parameters()}
    assert own.keys() == of_peft.keys()
    for name, gradient in own.items():
        if "lora_" not in name:
            assert gradient is None
            continue
        torch.testing.assert_close(gradient.full_tensor(), of_peft[name], atol=1e-4, rtol=1e-3)


def test_the_reference_is_the_policy_without_adapters_and_gives_what_a_second_model_gives(model: Path, ranks: Ranks):
    for dtype in ("float32", "bfloat16"):
        config = ModelConfig(str(model), lora=SMALL, dtype=dtype)
        policy = with_values(load_policy(config, 1.0, ranks, 64))
        second, packed = load_reference(config, 1.0, ranks, 64, False), PackedSequences.of(random_sequences(6, 9))
        with torch.no_grad():
            before = policy(packed)[0]
            assert torch.equal(BaseOfPolicy(policy)(packed)[0], second(packed)[0])
            assert torch.equal(policy(packed)[0], before), "the adapters work again"
        assert not torch.equal(before, second(packed)[0])
        policy(packed)[0].sum().backward()
        assert all(each.grad is not None for each in adapter_parameters(policy.model).values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_published_is_the_model_that_peft_merges(model: Path, ranks: Ranks, dtype: str):
    policy = with_values(load_policy(ModelConfig(str(model), lora=SMALL, dtype=dtype), 1.0, ranks, 64))
    published = gather_all(policy.model, policy.weight_format, getattr(torch, dtype), ranks)
    base = AutoModelForCausalLM.from_pretrained(model)
    rounded = {name: each.to(getattr(torch, dtype)).float() for name, each in base.state_dict().items()}
    made = peft_model(model, SMALL, gather_adapters(policy.model))
    made.get_base_model().load_state_dict(
        {
            name.replace("q_proj.", "q_proj.base_layer.").replace("down_proj.", "down_proj.base_layer."): each
            for name, each in rounded.items()
        },
        strict=False,
    )
    merged = made.merge_and_unload().state_dict()
    assert published.keys() == base.state_dict().keys() - {"lm_head.weight"}
    for name, tensor in published.items():
        torch.testing.assert_close(
            tensor, merged[name].to(tensor.dtype), atol=1e-6, rtol=1e-6 + torch.finfo(tensor.dtype).eps
        )
        is_target = "q_proj" in name or "down_proj" in name
        assert torch.equal(tensor, rounded[name].to(tensor.dtype)) != is_target


@pytest.mark.parametrize(("size", "low", "high"), [(1e-6, 0.0, 0.1), (1e-3, 0.2, 0.9), (0.1, 0.99, 1.01)])
def test_small_changes_by_adapters_are_lost_in_the_rounding_of_the_merged_weights_and_their_share_is_measured(
    model: Path, ranks: Ranks, size: float, low: float, high: float
):
    policy = load_policy(ModelConfig(str(model), lora=SMALL, dtype="bfloat16"), 1.0, ranks, 64)
    assert kept_share(policy.model, torch.bfloat16, ranks) is None, "new adapters change nothing"
    base = gather_all(policy.model, policy.weight_format, torch.float32, ranks)
    with torch.no_grad():
        for name, parameter in adapter_parameters(with_values(policy).model).items():
            parameter.mul_(size if "lora_B" in name else 1)
    wanted, published = (gather_all(policy.model, policy.weight_format, each, ranks) for each in DTYPES)
    changes = [(published[name].float() - base[name], wanted[name] - base[name]) for name in base]
    expected = sum((kept * whole).sum() for kept, whole in changes) / sum((whole * whole).sum() for _, whole in changes)
    share = kept_share(policy.model, torch.bfloat16, ranks)
    assert share == pytest.approx(float(expected), rel=1e-3, abs=1e-6)
    assert low <= share < high
    assert kept_share(policy.model, torch.float32, ranks) == pytest.approx(1, abs=0.05)


def test_a_run_with_adapters_measures_what_their_rounding_leaves_and_one_without_has_no_such_metric(
    model: Path, ranks: Ranks, tmp_path: Path
):
    config = make_config(model, tmp_path / "adapters", steps=2)
    without = Run(config).train(ranks)
    assert not without.metrics.of("weights/adapters_kept")
    config.run.dir, config.model.lora = str(tmp_path / "with"), SMALL
    found = Run(config).train(ranks).metrics.of("weights/adapters_kept")
    assert found == pytest.approx({0: 1, 1: 1}, abs=1e-2), "weights in float32"


@pytest.mark.heavy
def test_a_run_publishes_the_adapted_matrices_saves_adapters_alone_and_resumes_with_the_same_bits(
    model: Path, ranks: Ranks, tmp_path: Path
):
    config = with_critic(make_config(model, tmp_path / "whole"))
    config.model.lora, config.critic.lora = SMALL, LoraConfig(rank=2)
    whole = Run(config).train(ranks)
    snapshots = [take_snapshot(version, whole.weights[version], 64) for version in sorted(whole.weights)]
    for old, new in pairwise(snapshots):
        names = [spec.name for spec in new.manifest.tensors]
        sent = {names[patch.tensor] for patch in diff(old, new).header.patches}
        assert sent == {name for name in names if "q_proj" in name or "down_proj" in name}
    [state] = max((tmp_path / "whole/run/checkpoints").iterdir()).glob("rank-*.safetensors")
    others = {name for name in load_file(state) if "lora_" not in name}
    assert {name.rpartition("/")[2] for name in others} == {"head.weight", "head.bias"}, "the critic's head"
    config.run.dir = str(tmp_path / "stopped")
    Run(config, die_at=3).until_stopped(ranks)
    assert_weights_equal(Run(config).train(ranks).final, whole.final)
    run = tmp_path / "whole/run"
    export_checkpoint_adapter(config.model, max((run / "checkpoints").iterdir()), tmp_path / "adapter")
    assert contents(tmp_path / "adapter") == contents(run / "adapter")
    assert_weights_equal(load_file(run / "model/model.safetensors"), whole.final)


def test_a_run_whose_base_has_other_weights_now_is_refused(ranks: Ranks, tmp_path: Path):
    base = write_model(tmp_path / "base")
    config = make_config(base, tmp_path, steps=3)
    config.model.lora = SMALL
    Run(config, stop_at=2).until_stopped(ranks)
    write_model(base, seed=1)
    with pytest.raises(CheckpointError, match=r"has only adapters, and the weights of their base model have changed"):
        Run(config).train(ranks)
    write_model(base)
    assert min(Run(config).train(ranks).weights) == 2


def test_a_peft_folder_of_a_checkpoint_loads_in_peft_and_starts_another_run_and_the_merged_model_gives_equal_logits(
    model: Path, ranks: Ranks, tmp_path: Path
):
    config = ModelConfig(str(model), lora=SMALL)
    policy = with_values(load_policy(config, 1.0, ranks, 64))
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2, ranks)
    save_whole(checkpoints, Progress(step=1), {"policy": Trainable(policy, 0.1, LearnerConfig())})
    [saved] = checkpoints.complete()
    export_checkpoint_adapter(config, saved, tmp_path / "adapter")
    export_checkpoint(config, saved, tmp_path / "merged")
    batch = random_sequences(6, 9)
    expected = policy(PackedSequences.of(batch))[0]
    base = AutoModelForCausalLM.from_pretrained(model)
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(one_by_one(loaded, batch), expected, atol=2e-5, rtol=1e-4)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(one_by_one(merged, batch), expected, atol=5e-5, rtol=1e-3)
    assert AutoTokenizer.from_pretrained(tmp_path / "adapter").get_vocab()
    merge(tmp_path / "adapter", tmp_path / "merged again")
    assert contents(tmp_path / "merged again") == contents(tmp_path / "merged")
    started = load_policy(ModelConfig(str(model), lora=LoraConfig(path=str(tmp_path / "adapter"))), 1.0, ranks, 64)
    assert torch.equal(started(PackedSequences.of(batch))[0], expected)


def test_a_reference_that_is_not_the_model_with_which_a_run_starts_is_a_warning(
    model: Path, ranks: Ranks, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    # As happened in TRL: a policy that started with adapters was held to the model without them.
    policy = with_values(load_policy(ModelConfig(str(model), lora=SMALL), 1.0, ranks, 64))
    save_adapters(
        policy.model, gather_adapters(policy.model), ModelConfig(str(model), lora=SMALL), tmp_path / "adapter"
    )
    for lora, told in ((SMALL, False), (LoraConfig(path=str(tmp_path / "adapter")), True), (LoraConfig(), False)):
        caplog.clear()
        config = ModelConfig(str(model), lora=lora)
        started, packed = load_policy(config, 1.0, ranks, 64), PackedSequences.of(random_sequences(6, 9))
        reference = reference_of(started, config, 1.0, ranks, 64, False)
        assert ("asyncrl merge --from" in caplog.text) is told
        with torch.no_grad():
            assert torch.equal(reference(packed)[0], started(packed)[0]) is not told


def test_exported_adapters_name_a_folder_absolutely_and_a_hub_name_as_it_is(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(model.parent)
    base = AutoModelForCausalLM.from_pretrained(model)
    add_adapters(base, SMALL, "model.lora")
    for path, named in {model.name: str(model), "owner/name": "owner/name"}.items():
        save_adapters(base, gather_adapters(base), ModelConfig(path, revision="main"), tmp_path / path)
        written = json.loads((tmp_path / path / "adapter_config.json").read_text())
        assert (written["base_model_name_or_path"], written["revision"]) == (named, "main")


def test_a_checkpoint_is_merged_into_weights_of_the_dtype_as_the_run_merged_it(
    model: Path, ranks: Ranks, tmp_path: Path
):
    config = ModelConfig(str(model), lora=SMALL, dtype="bfloat16")
    policy = with_values(load_policy(config, 1.0, ranks, 64))
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2, ranks)
    save_whole(checkpoints, Progress(step=1), {"policy": Trainable(policy, 0.1, LearnerConfig())})
    export_checkpoint(config, checkpoints.complete()[0], tmp_path / "merged")
    published = gather_all(policy.model, policy.weight_format, torch.bfloat16, ranks)
    assert_weights_equal(load_file(tmp_path / "merged/model.safetensors"), published)


def test_a_critic_of_a_checkpoint_is_merged_into_weights_of_the_dtype_as_the_run_merged_it(
    model: Path, ranks: Ranks, tmp_path: Path
):
    config, settings = ModelConfig(str(model), dtype="bfloat16"), CriticConfig(lora=SMALL)
    critic = load_critic(settings, config, ranks, 64)
    set_adapters(critic.decoder)
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2, ranks)
    save_whole(checkpoints, Progress(step=1), {"critic": Trainable(critic, 0.1, LearnerConfig())})
    export_critic(critic, settings, config, tmp_path / "run", ranks, threading.Event())
    export_checkpoint_critic(settings, config, checkpoints.complete()[0], tmp_path / "merged")
    ended, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("run", "merged"))
    assert_weights_equal(merged, ended)


def test_a_critic_and_an_implicit_model_train_their_adapters_alone(model: Path, ranks: Ranks):
    packed, config = PackedSequences.of(random_sequences(6, 9)), ModelConfig(str(model))
    critic = Trainable(load_critic(CriticConfig(lora=SMALL), config, ranks, 64), 1e-2, LearnerConfig())
    critic.module(packed).sum().backward()
    critic.update(0)
    assert {name for name in critic.moments() if "lora_" not in name} == {"head.weight", "head.bias"}
    implicit = Trainable(load_policy(replace(config, lora=SMALL), 1.0, ranks, 64, "implicit"), 1e-2, LearnerConfig())
    before = {name: each.full_tensor().clone() for name, each in implicit.module.named_parameters()}
    for step in range(2):
        implicit.module(packed)[0].sum().backward()
        implicit.update(step)
    changed = {
        name for name, each in implicit.module.named_parameters() if not torch.equal(each.full_tensor(), before[name])
    }
    assert changed == implicit.moments().keys() == {name for name in before if "lora_" in name}


def test_a_mixture_has_adapters_in_its_attention_and_its_experts_stay(mixture: Path, ranks: Ranks):
    config = ModelConfig(str(mixture), lora=LoraConfig(rank=2))
    policy = with_values(load_policy(config, 1.0, ranks, 64))
    published = gather_all(policy.model, policy.weight_format, torch.float32, ranks)
    stored = load_file(mixture / "model.safetensors")
    assert published.keys() == stored.keys()
    changed = {name for name, each in published.items() if not torch.equal(each, stored[name].to(each.dtype))}
    assert changed == {f"{name.rpartition('.lora_')[0]}.weight" for name in adapter_parameters(policy.model)}
    assert any("self_attn" in name for name in changed)
    assert not any("mlp" in name for name in changed)
    with pytest.raises(ConfigError, match=r"mlp\..*gate_proj can have no adapter: .* in a mixture of experts"):
        load_policy(ModelConfig(str(mixture), lora=LoraConfig(rank=2, targets=["gate_proj"])), 1.0, ranks, 64)


@pytest.mark.parametrize(
    ("lora", "problem"),
    [
        (LoraConfig(rank=2, targets=["nothing"]), r"model\.lora\.targets=nothing: .* it has down_proj,"),
        (LoraConfig(rank=2, targets=["q_proj", "lm_head"]), "lm_head can have no adapter"),
        (LoraConfig(rank=2, targets=["embed_tokens"]), "embed_tokens can have no adapter"),
        (LoraConfig(path="/no/such/folder"), r"model\.lora\.path=/no/such/folder: it has no adapter_config\.json"),
    ],
)
def test_adapters_that_the_model_cannot_have_are_refused_by_the_option(
    model: Path, ranks: Ranks, lora: LoraConfig, problem: str
):
    with pytest.raises(ConfigError, match=problem):
        load_policy(ModelConfig(str(model), lora=lora), 1.0, ranks, 64)


def test_a_folder_of_adapters_of_another_kind_or_another_model_is_refused(model: Path, ranks: Ranks, tmp_path: Path):
    base = AutoModelForCausalLM.from_pretrained(model)
    kinds = {"dora": {"use_dora": True}, "biased": {"bias": "lora_only"}, "whole": {"modules_to_save": ["lm_head"]}}
    for name, options in kinds.items():
        made = PeftLora(r=2, target_modules=["q_proj"], **options)
        made.save_pretrained(tmp_path / name)
        with pytest.raises(ConfigError, match=f"only plain LoRA adapters .* {next(iter(options))}"):
            load_policy(ModelConfig(str(model), lora=LoraConfig(path=str(tmp_path / name))), 1.0, ranks, 64)
    get_peft_model(base, PeftLora(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "other")
    state = load_file(tmp_path / "other/adapter_model.safetensors")
    save_file(
        {name: each[:, :-1].contiguous() for name, each in state.items()}, tmp_path / "other/adapter_model.safetensors"
    )
    with pytest.raises(ConfigError, match="do not fit the model"):
        load_policy(ModelConfig(str(model), lora=LoraConfig(path=str(tmp_path / "other"))), 1.0, ranks, 64)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"r": "4"}, "do not fit the model"),
        ({"target_modules": "("}, "do not fit the model"),
        ({"rank_pattern": {"(": 2}}, "do not fit the model"),
        ({"lora_alpha": None}, "lora_alpha must be positive"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be positive"),
        ({"alpha_pattern": {"q_proj": float("inf")}}, "lora_alpha must be positive"),
        ([], "no adapter_config.json of peft"),
    ],
)
def test_a_folder_of_adapters_with_other_values_is_refused(model: Path, tmp_path: Path, change: Any, problem: str):
    base = AutoModelForCausalLM.from_pretrained(model)
    PeftLora(r=2, target_modules=["q_proj"]).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change} if change else change))
    with pytest.raises(ConfigError, match=problem):
        add_adapters(base, LoraConfig(path=str(tmp_path)), "model.lora")


@pytest.mark.parametrize("what", ["NaN", "int", "pickle"])
def test_adapters_that_are_no_finite_numbers_are_refused(model: Path, ranks: Ranks, tmp_path: Path, what: str):
    base = AutoModelForCausalLM.from_pretrained(model)
    get_peft_model(base, PeftLora(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    if what == "pickle":
        file.unlink()
        torch.save({"a": Path("a")}, tmp_path / "adapter_model.bin")
    else:
        state = load_file(file)
        save_file({name: each * torch.nan if what == "NaN" else each.int() for name, each in state.items()}, file)
    with pytest.raises(ConfigError, match=r"adapters cannot be read|has numbers that are not finite"):
        load_policy(ModelConfig(str(model), lora=LoraConfig(path=str(tmp_path))), 1.0, ranks, 64)


def test_a_quantised_model_is_refused_by_name(model: Path):
    base = AutoModelForCausalLM.from_pretrained(model)
    base.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    with pytest.raises(ConfigError, match=r"model\.lora: .*QLoRA"):
        add_adapters(base, SMALL, "model.lora")


def test_without_peft_an_error_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("asyncrl.learner.model.lora.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"critic\.lora needs the extra: pip install 'asyncrl\[lora\]'"):
        check_installed("critic.lora")
