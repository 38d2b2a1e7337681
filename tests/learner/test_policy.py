from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from asyncrl.config.schema import ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.backbone import Packed, full_tensors
from asyncrl.learner.policy import Policy, load_policy
from asyncrl.learner.ranks import Ranks
from asyncrl.modelling import logprobs
from tests.learner.support import VOCABULARY

TEMPERATURE = 0.7


def sequences(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in lengths]


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


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("chunk", [1 << 26, 7 * VOCABULARY])
def test_packed_log_probs_entropies_and_gradients_are_those_of_one_sequence_at_a_time(
    model: Path, ranks: Ranks, recompute: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", chunk)
    batch = sequences(5, 1, 19, 2, 33)
    expected, entropies, expected_gradients = one_by_one(model, batch)
    policy = load_policy(ModelConfig(str(model), recompute=recompute), TEMPERATURE, ranks, 64)
    ours, entropy = policy(Packed.of(batch), with_entropy=True)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, entropies, atol=1e-5, rtol=0)
    (weights_for(ours) * (ours + 0.3 * entropy)).sum().backward()
    for name, gradient in gradients(policy).items():
        torch.testing.assert_close(
            gradient, expected_gradients[name], atol=1e-5, rtol=1e-4, msg=lambda m, n=name: n + m
        )


def test_a_sequence_does_not_see_its_neighbours(model: Path, ranks: Ranks):
    policy = load_policy(ModelConfig(str(model)), 1.0, ranks, 64)
    first, second, third = sequences(8, 12, 6)
    with torch.no_grad():
        packed = policy(Packed.of([first, second, third]))[0]
        alone = policy(Packed.of([second]))[0]
    torch.testing.assert_close(packed[8:20], alone, atol=1e-6, rtol=0)


def test_only_wanted_tokens_are_worked_out(model: Path, ranks: Ranks):
    policy = load_policy(ModelConfig(str(model)), 1.0, ranks, 64)
    everything = Packed.of(sequences(9, 7))
    wanted = everything.wanted & (torch.arange(16) % 3 == 0)
    with torch.no_grad():
        some = policy(Packed(everything.ids, everything.positions, wanted, everything.lengths))[0]
        torch.testing.assert_close(some, torch.where(wanted, policy(everything)[0], 0.0))


def test_bfloat16_computes_in_half_precision_over_float32_master_weights(model: Path, ranks: Ranks):
    batch = sequences(20, 30)
    expected, _, _ = one_by_one(model, batch)
    policy = load_policy(ModelConfig(str(model), dtype="bfloat16"), TEMPERATURE, ranks, 64)
    ours, _ = policy(Packed.of(batch))
    assert ours.dtype == torch.float32
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
    assert 1e-5 < (ours - expected).abs().max() < 0.3


def test_published_tensors_are_those_of_the_bare_model_in_the_compute_dtype(model: Path, ranks: Ranks):
    policy = load_policy(ModelConfig(str(model)), 1.0, ranks, 64)
    bare = AutoModelForCausalLM.from_pretrained(model)
    tensors = full_tensors(policy.model, policy.weight_format, torch.float32, ranks)
    assert list(tensors) == [name for name, _ in bare.named_parameters()]
    for name, parameter in bare.named_parameters():
        assert torch.equal(tensors[name], parameter)
    half = full_tensors(policy.model, policy.weight_format, torch.bfloat16, ranks)
    assert {tensor.dtype for tensor in half.values()} == {torch.bfloat16}


def test_published_tensors_do_not_change_with_the_policy(model: Path, ranks: Ranks):
    policy = load_policy(ModelConfig(str(model)), 1.0, ranks, 64)
    tensors = full_tensors(policy.model, policy.weight_format, torch.float32, ranks)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(tensors[name], before[name]) for name in before)


def test_a_sliding_window_is_kept_when_packed(tmp_path: Path, ranks: Ranks):
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    config = Qwen3Config(vocab_size=VOCABULARY, num_attention_heads=4, num_key_value_heads=2, **shape, **window)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    batch = sequences(12, 3)
    expected, _, _ = one_by_one(tmp_path, batch)
    with torch.no_grad():
        ours, _ = load_policy(ModelConfig(str(tmp_path)), TEMPERATURE, ranks, 64)(Packed.of(batch))
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


def test_a_model_that_cannot_be_loaded_is_refused_with_its_key(tmp_path: Path, ranks: Ranks):
    with pytest.raises(ConfigError, match=r"nowhere.*cannot be loaded"):
        load_policy(ModelConfig(str(tmp_path / "nowhere")), 1.0, ranks, 64)


def test_an_attention_that_needs_a_gpu_is_refused_on_the_cpu(model: Path, ranks: Ranks):
    if ranks.device.type == "cpu":
        with pytest.raises(ConfigError, match="use sdpa"):
            load_policy(ModelConfig(str(model), attention="flex_attention"), 1.0, ranks, 64)


def test_a_model_that_changes_its_logits_afterwards_is_refused(tmp_path: Path, ranks: Ranks):
    from transformers import GraniteConfig, GraniteForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = GraniteConfig(vocab_size=VOCABULARY, logits_scaling=8.0, initializer_range=0.5, **shape)
    GraniteForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="cannot be trained packed"):
        load_policy(ModelConfig(str(tmp_path)), 1.0, ranks, 64)


def test_recompute_runs_the_layers_again_in_the_backward_pass(model: Path, ranks: Ranks):
    calls = {}
    for recompute in (False, True):
        policy = load_policy(ModelConfig(str(model), recompute=recompute), 1.0, ranks, 64)
        seen: list[int] = []
        policy.model.get_decoder().layers[0].mlp.register_forward_pre_hook(lambda *_, seen=seen: seen.append(1))
        policy(Packed.of(sequences(6)))[0].sum().backward()
        calls[recompute] = len(seen)
    assert calls == {False: 1, True: 2}
