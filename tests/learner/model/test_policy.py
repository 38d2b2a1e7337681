from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

from asyncrl.algorithms.algorithm import Algorithm
from asyncrl.config.schema import LearnerConfig, ModelConfig, TrainConfig
from asyncrl.errors import ConfigError, StoppedError
from asyncrl.learner.batch.packing import PackedSequences
from asyncrl.learner.batch.prefixes import EVERY
from asyncrl.learner.checkpoint.gathering import gather_all
from asyncrl.learner.compiling import compile_passes
from asyncrl.learner.model.optimizer import Trainable
from asyncrl.learner.model.policy import Policy, load_policy, load_reference
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.learner.trainer import Trainer
from tests.learner.support import VOCABULARY, random_sequences

pytestmark = pytest.mark.slow

TEMPERATURE = 0.7


def one_by_one(model: Path, batch: list[Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Log-probs and entropies [N] of plain forwards, and the gradient of their weighted sum."""
    bare = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    logprobs, entropies = [], []
    for ids in batch:
        rows = (bare(input_ids=ids[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        logprobs += [torch.zeros(1), rows.gather(1, ids[1:, None])[:, 0]]
        entropies += [torch.zeros(1), -(rows.exp() * rows).sum(-1)]
    packed, spread = torch.cat(logprobs), torch.cat(entropies)
    (weights_for(packed) * (packed + 0.3 * spread)).sum().backward()
    return packed.detach(), spread.detach(), {name: p.grad for name, p in bare.named_parameters()}


def weights_for(logprobs: Tensor) -> Tensor:
    return torch.linspace(-1, 1, len(logprobs))


def gradients(policy: Policy) -> dict[str, Tensor]:
    return {name: parameter.grad.full_tensor() for name, parameter in policy.model.named_parameters()}


# At 0.7, layers are compiled that keep their input, their attention, and everything.
@pytest.mark.parametrize(
    ("activations", "compiled"),
    [(0, False), (0.3, False), (0.7, False), pytest.param(0.7, True, marks=pytest.mark.heavy), (1, False)],
)
def test_packed_log_probs_entropies_and_gradients_are_those_of_one_sequence_at_a_time(
    model: Path, ranks: Ranks, activations: float, compiled: bool
):
    batch = random_sequences(5, 1, 19, 2, 33)
    expected, entropies, expected_gradients = one_by_one(model, batch)
    policy = load_policy(ModelConfig(str(model), activations=activations, compile=compiled), TEMPERATURE, ranks, 64)
    # The first pass measures how large the activations are.
    for _ in range(2):
        policy.zero_grad()
        ours, entropy = policy(PackedSequences.of(batch), with_entropy=True)
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(entropy, entropies, atol=1e-5, rtol=0)
        (weights_for(ours) * (ours + 0.3 * entropy)).sum().backward()
        for name, gradient in gradients(policy).items():
            torch.testing.assert_close(
                gradient, expected_gradients[name], atol=1e-5, rtol=1e-4, msg=lambda m, n=name: n + m
            )


# Compilation takes a minute or two of each, since the operators of plain attention are many.
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_models_with_capped_scores_or_attention_sinks_train_as_with_eager_attention(
    family: str, tmp_path: Path, ranks: Ranks, compiled: bool
):
    sizes = {"hidden_size": 32, "intermediate_size": 24, "head_dim": 16, "num_hidden_layers": 2, "sliding_window": 12}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY, "initializer_range": 0.25}
    extras = {
        "gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0},
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **sizes, **heads, **extras[family])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    prefix, *rest = random_sequences(20, 1, 19, 33)
    batch = [torch.cat([prefix, each]) for each in rest]
    expected, entropies, expected_gradients = one_by_one(tmp_path, batch)
    policy = load_policy(ModelConfig(str(tmp_path), activations=0.3, compile=compiled), TEMPERATURE, ranks, 64)
    for sharing in (EVERY,) if compiled else (None, EVERY):
        policy.zero_grad()
        packed = PackedSequences.of(batch, sharing)
        ours, entropy = policy(packed, with_entropy=True)
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(entropy, entropies, atol=1e-5, rtol=0)
        (weights_for(ours) * (ours + 0.3 * entropy)).sum().backward()
        for name, gradient in gradients(policy).items():
            plain = expected_gradients[name]
            size = max(1.0, float(plain.abs().max()))
            torch.testing.assert_close(gradient, plain, atol=1e-5 * size, rtol=1e-4, msg=lambda m, n=name: n + m)
    with pytest.raises(ConfigError, match="takes softcap" if family == "gemma2" else "takes s_aux"):
        load_policy(ModelConfig(str(tmp_path), attention="sdpa"), TEMPERATURE, ranks, 64)


def test_only_needed_tokens_are_worked_out(model: Path, ranks: Ranks):
    policy = load_policy(ModelConfig(str(model)), 1.0, ranks, 64)
    everything = PackedSequences.of(random_sequences(9, 7))
    needed = everything.needed[everything.needed % 3 == 0]
    with torch.no_grad():
        some = policy(replace(everything, needed=needed, before=needed - 1))[0]
        torch.testing.assert_close(some, torch.where(torch.isin(torch.arange(16), needed), policy(everything)[0], 0.0))


def test_bfloat16_computes_in_half_precision_over_float32_master_weights(model: Path, ranks: Ranks):
    batch = random_sequences(20, 30)
    expected, _, _ = one_by_one(model, batch)
    policy = load_policy(ModelConfig(str(model), dtype="bfloat16"), TEMPERATURE, ranks, 64)
    ours, _ = policy(PackedSequences.of(batch))
    assert ours.dtype == torch.float32
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
    assert 1e-5 < (ours - expected).abs().max() < 0.3


def test_published_tensors_are_copies_of_the_bare_models_in_the_compute_dtype(model: Path, ranks: Ranks):
    policy = load_policy(ModelConfig(str(model)), 1.0, ranks, 64)
    bare = AutoModelForCausalLM.from_pretrained(model)
    half = gather_all(policy.model, policy.weight_format, torch.bfloat16, ranks)
    assert {tensor.dtype for tensor in half.values()} == {torch.bfloat16}
    tensors = gather_all(policy.model, policy.weight_format, torch.float32, ranks)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(1.0)
    assert list(tensors) == [name for name, _ in bare.named_parameters()]
    for name, parameter in bare.named_parameters():
        assert torch.equal(tensors[name], parameter)


def test_a_model_that_cannot_be_loaded_or_needs_a_gpu_is_refused_with_its_key(
    model: Path, tmp_path: Path, ranks: Ranks
):
    with pytest.raises(ConfigError, match=r"nowhere.*cannot read its configuration"):
        load_policy(ModelConfig(str(tmp_path / "nowhere")), 1.0, ranks, 64)
    if ranks.device.type == "cpu":
        with pytest.raises(ConfigError, match="use auto"):
            load_policy(ModelConfig(str(model), attention="flex_attention"), 1.0, ranks, 64)


class Operators(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    ("activations", "layers", "attentions"),
    [(0, [2, 2], 4), (0.05, [2, 2], 3), (0.3, [2, 2], 2), (0.7, [2, 1], 2), (1, [1, 1], 2)],
)
def test_a_budget_goes_to_attention_first_and_then_to_whole_layers(
    model: Path, ranks: Ranks, activations: float, layers: list[int], attentions: int
):
    policy = load_policy(ModelConfig(str(model), activations=activations), 1.0, ranks, 64)
    ran = [0, 0]

    def count(layer: int) -> None:
        ran[layer] += 1

    batch = PackedSequences.of(random_sequences(6))
    policy(batch)[0].sum().backward()
    for index, layer in enumerate(policy.model.get_decoder().layers):
        layer.mlp.register_forward_pre_hook(lambda *_, index=index: count(index))
    with Operators() as operators:
        policy(batch)[0].sum().backward()
    assert ran == layers
    forward = [name for name in operators.names if "attention" in name and "backward" not in name]
    assert len(forward) == attentions


@pytest.mark.parametrize(("share", "gathered"), [(1.0, [False, False]), (0.5, [False, True]), (0.0, [True, True])])
def test_the_last_layers_keep_their_gathered_weights_until_the_backward_pass(
    model: Path, ranks: Ranks, share: float, gathered: list[bool]
):
    policy = load_policy(ModelConfig(str(model)), 1.0, ranks, 64)
    trained, batch = Trainable(policy, 1e-3, LearnerConfig(reshard=share)), PackedSequences.of(random_sequences(6))

    def whole() -> list[bool]:
        layers = policy.model.get_decoder().layers
        return [not any(isinstance(each, DTensor) for each in layer.parameters()) for layer in layers]

    for _ in range(2):
        trained.begin_pass(is_last=True)
        logprobs, _ = policy(batch)
        assert whole() == gathered
        logprobs.sum().backward()
        assert not any(whole())


@pytest.mark.heavy
def test_a_compiled_layer_is_one_graph_whatever_the_packing(model: Path, ranks: Ranks):
    torch.compiler.reset()
    counters.clear()
    policy = load_policy(ModelConfig(str(model), compile=True), TEMPERATURE, ranks, 64)
    generator = torch.Generator().manual_seed(2)
    for attempt in range(50):
        lengths = torch.randint(2, 60, (int(torch.randint(1, 9, (), generator=generator)),), generator=generator)
        sequences = random_sequences(*lengths.tolist())
        shares = attempt % 2
        if shares:
            sequences = [torch.cat([sequences[0], each]) for each in [sequences[0], *sequences]]
        with torch.compiler.set_stance("fail_on_recompile" if attempt > 1 else "default"):
            policy(PackedSequences.of(sequences, EVERY if shares else None))[0].sum().backward()
    assert not counters["graph_break"]
    # The layers share one; two follow the logits, forward and backward.
    assert counters["stats"]["unique_graphs"] == 3
    trained = []
    for sharing in (None, EVERY):
        policy.zero_grad()
        logprobs, _ = policy(PackedSequences.of(sequences, sharing))
        logprobs.mean().backward()
        trained.append([logprobs.detach(), *gradients(policy).values()])
    for ours, theirs in zip(*trained, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


# On a CPU the compiler writes other kernels for more than 1,024 tokens.
@pytest.mark.heavy
@pytest.mark.parametrize("members", [3, pytest.param(14, marks=pytest.mark.long)])
def test_no_pass_of_a_step_compiles_what_was_compiled_before_the_first_one(model: Path, ranks: Ranks, members: int):
    torch.compiler.reset()
    config = TrainConfig()
    policy = load_policy(ModelConfig(str(model), compile=True, activations=0.4), TEMPERATURE, ranks, 96)
    algorithm, trained = Algorithm.from_config(config.algorithm, 2), Trainable(policy, 1e-3, LearnerConfig())
    assert algorithm.needs_proximal
    trainer = Trainer(ranks, algorithm, trained, None, None, threading.Event())
    compile_passes(trainer, share_prefixes=True, longest=96, largest=96 * members)
    assert all(parameter.grad is None for parameter in policy.parameters())
    assert policy.activations.share == 0.4
    with torch.compiler.set_stance("fail_on_recompile"):
        for lengths in ([3, 40], [7, 7, 21], [2], [50, 50], [60] * (members - 1)):
            sequences = random_sequences(33, *lengths)
            sequences = [torch.cat([sequences[0], each]) for each in sequences]
            for sharing in (None, EVERY):
                packed = PackedSequences.of(sequences, sharing).padded()
                policy(packed)[0].sum().backward()
                with torch.no_grad():
                    policy(packed)


@pytest.mark.heavy
@pytest.mark.skipif(not hasattr(torch.compiler, "set_default_backend"), reason="torch 2.12 or older")
@pytest.mark.parametrize(("longest", "largest"), [(1, 1), (2, 64), (96, 7), (96, 200)])
def test_passes_of_any_size_are_compiled_with_the_reference_and_change_nothing(
    model: Path, ranks: Ranks, longest: int, largest: int
):
    torch.compiler.reset()
    config, backend = ModelConfig(str(model), compile=True), torch.compiler.get_default_backend()
    torch.compiler.set_default_backend("eager")
    try:
        policy, reference = load_policy(config, 1.0, ranks, 96), load_reference(config, 1.0, ranks, 96, False)
        algorithm, trained = Algorithm.from_config(TrainConfig().algorithm, 1), Trainable(policy, 1e-3, LearnerConfig())
        trainer = Trainer(ranks, algorithm, trained, None, reference, threading.Event())
        random, weights = torch.get_rng_state(), [each.detach().clone() for each in policy.parameters()]
        compile_passes(trainer, True, longest, largest, has_scores=True)
        assert torch.equal(torch.get_rng_state(), random)
        assert all(map(torch.equal, policy.parameters(), weights))
        # A compiler takes a size of 1 for one that is always 1.
        with torch.compiler.set_stance("fail_on_recompile" if longest > 1 else "default"), torch.no_grad():
            for sharing in (None, EVERY):
                packed = PackedSequences.of([torch.arange(9), torch.arange(5)], sharing).padded()
                policy(packed)
                reference(packed.unrouted())
        trainer.stop.set()
        with pytest.raises(StoppedError):
            compile_passes(trainer, True, longest, largest)
    finally:
        torch.compiler.set_default_backend(backend)


@pytest.mark.heavy
@pytest.mark.skipif(not hasattr(torch.compiler, "set_default_backend"), reason="torch 2.12 or older")
def test_all_kinds_of_layers_of_all_models_are_compiled(ranks: Ranks, tmp_path: Path):
    shape = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY, "sliding_window": 6}
    kinds = ["sliding_attention", "full_attention"]
    Gemma3ForCausalLM(Gemma3TextConfig(**shape, **heads, layer_types=kinds)).save_pretrained(tmp_path)
    torch.compiler.reset()
    counters.clear()
    config, backend = ModelConfig(str(tmp_path), compile=True), torch.compiler.get_default_backend()
    torch.compiler.set_default_backend("eager")
    try:
        policy, reference = load_policy(config, 1.0, ranks, 64), load_reference(config, 1.0, ranks, 64, False)
        for sharing in (None, EVERY):
            packed = PackedSequences.of([each for each in random_sequences(9, 12) for _ in range(2)], sharing)
            policy(packed)[0].sum().backward()
            with torch.no_grad():
                policy(packed)
                reference(packed)
    finally:
        torch.compiler.set_default_backend(backend)
    # Two kinds of layers, each with and without gradients and in the reference, and two functions after the logits.
    assert counters["frames"]["total"] == counters["frames"]["ok"] == 8
