"""A critic begins with the value head that its files have, and is written as a model that transformers loads."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedModel,
    Qwen3Config,
)

from asyncrl.commands.export import export_run
from asyncrl.config.schema import CriticConfig, ModelConfig, TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.batch.packing import PackedSequences
from asyncrl.learner.model.critic import load_critic
from asyncrl.learner.ranks.ranks import Ranks
from tests.learner.support import Run, make_config, random_sequences, with_critic

pytestmark = pytest.mark.slow

SEQUENCES = random_sequences(9, 5)


def classifier(folder: Path, kind: Any = AutoModelForTokenClassification, labels: int = 1) -> Any:
    torch.manual_seed(3)
    return kind.from_pretrained(folder, num_labels=labels)


def save_token_classifier(model: Path, folder: Path) -> None:
    classifier(model).save_pretrained(folder)


def save_sequence_classifier(model: Path, folder: Path) -> None:
    classifier(model, AutoModelForSequenceClassification).save_pretrained(folder)


def save_as_trl(model: Path, folder: Path) -> None:
    """Save the tensors of the language model and of a head, as trl's AutoModelForCausalLMWithValueHead does."""
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(3)
    head = torch.nn.Linear(32, 1)
    tensors |= {"v_head.summary.weight": head.weight.detach(), "v_head.summary.bias": head.bias.detach()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def save_pickled(model: Path, folder: Path) -> None:
    made = classifier(model)
    made.config.save_pretrained(folder)
    torch.save(made.state_dict(), folder / "pytorch_model.bin")


KINDS: dict[str, Callable[[Path, Path], None]] = {
    "tokens": save_token_classifier,
    "sequences": save_sequence_classifier,
    "trl": save_as_trl,
    "pickled": save_pickled,
}


def head_of(folder: Path) -> tuple[Tensor, Tensor]:
    """The weight and the bias of the head in a folder."""
    safe = folder / "model.safetensors"
    tensors = load_file(safe) if safe.exists() else torch.load(folder / "pytorch_model.bin", weights_only=True)
    names = [name.removesuffix(".weight") for name in tensors if name in ("score.weight", "v_head.summary.weight")]
    bias = tensors.get(f"{names[0]}.bias")
    return tensors[f"{names[0]}.weight"], torch.zeros(1) if bias is None else bias


def values_of(decoder: Any, head: tuple[Tensor, Tensor]) -> Tensor:
    """The value of the state before each token but the first of each sequence, by a plain forward pass."""
    with torch.no_grad():
        found = [decoder(each[None]).last_hidden_state[0, :-1] for each in SEQUENCES]
        return torch.nn.functional.linear(torch.cat(found), *head)[:, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_critic_begins_with_the_values_of_the_head_in_its_files(
    kind: str, model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    KINDS[kind](model, tmp_path)
    critic = load_critic(CriticConfig(path=str(tmp_path)), ModelConfig(str(model)), ranks, 64)
    packed = PackedSequences.of(SEQUENCES)
    with torch.no_grad():
        got = critic(packed)[packed.needed]
    head = head_of(tmp_path)
    assert float(head[0].abs().max()) > 0.01
    torch.testing.assert_close(
        got, values_of(AutoModelForCausalLM.from_pretrained(model).model, head), atol=1e-4, rtol=0
    )


def test_a_critic_of_a_classifier_whose_language_models_head_is_not_tied_is_read_shard_by_shard(
    ranks: Ranks, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 280}
    config = Qwen3Config(num_attention_heads=4, num_key_value_heads=2, num_labels=1, **shape)
    made = AutoModelForTokenClassification.from_config(config).eval()
    made.save_pretrained(tmp_path)
    critic = load_critic(CriticConfig(path=str(tmp_path)), ModelConfig("unused"), ranks, 64)
    assert "loads the whole" not in caplog.text
    packed = PackedSequences.of(SEQUENCES)
    with torch.no_grad():
        expected = torch.cat([made(each[None]).logits[0, :-1, 0] for each in SEQUENCES])
        torch.testing.assert_close(critic(packed)[packed.needed], expected, atol=1e-4, rtol=0)


def test_without_a_head_and_with_one_of_several_labels_values_begin_at_zero(
    model: Path, ranks: Ranks, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    classifier(model, labels=3).save_pretrained(tmp_path)
    for path, warnings in ((None, 0), (str(tmp_path), 1)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "asyncrl.learner.model.value_head"):
            critic = load_critic(CriticConfig(path=path), ModelConfig(str(model)), ranks, 64)
        assert not critic.head.weight.full_tensor().any()
        assert [each.name for each in caplog.records].count("asyncrl.learner.model.value_head") == warnings


@pytest.fixture(scope="module")
def trained(model: Path, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainConfig, Path, Any]:
    """A run with a critic, its folder, and the critic's tensors in its last checkpoint."""
    folder = tmp_path_factory.mktemp("runs")
    config = with_critic(make_config(model, folder, steps=2))
    Run(config).train(ranks)
    run = folder / "run"
    return config, run, load_file(run / "checkpoints" / "step-000002" / "rank-00000.safetensors")


def check_folder(folder: Path, stored: dict[str, Tensor]) -> None:
    """The folder gives the values that the critic in the checkpoint gives, and continues as one."""
    made, info = AutoModelForTokenClassification.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    head = stored["critic/weights/head.weight"], stored["critic/weights/head.bias"]
    assert head[0].any()
    with torch.no_grad():
        got = torch.cat([made(each[None]).logits[0, :-1, 0] for each in SEQUENCES])
    torch.testing.assert_close(got, values_of(made.model, head), atol=1e-5, rtol=0)
    for name, each in made.model.state_dict().items():
        assert torch.equal(each, stored[f"critic/weights/decoder.{name}"]), name
    assert AutoTokenizer.from_pretrained(folder).eos_token


def test_the_end_of_a_run_and_asyncrl_export_write_what_transformers_loads(
    trained: tuple[TrainConfig, Path, Any], model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    _, run, stored = trained
    check_folder(run / "critic", stored)
    exported = export_run(str(run), to=tmp_path / "critic", critic=True)
    check_folder(exported, stored)
    again = load_critic(CriticConfig(path=str(exported)), ModelConfig(str(model)), ranks, 64)
    assert torch.equal(again.head.weight.full_tensor(), stored["critic/weights/head.weight"])


def test_a_run_without_a_critic_exports_none(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    Run(make_config(model, tmp_path, steps=1)).train(ranks)
    assert not (tmp_path / "run" / "critic").exists()
    with pytest.raises(ConfigError, match="trains no critic"):
        export_run(str(tmp_path / "run"), critic=True)


@pytest.mark.parametrize("fault", ["saving", "no classes"])
def test_where_transformers_cannot_save_a_critic_plain_tensors_are_written_with_a_warning(
    fault: str,
    trained: tuple[TrainConfig, Path, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise ValueError("this family knows no value head")

    if fault == "saving":
        monkeypatch.setattr(PreTrainedModel, "save_pretrained", failing)
    else:
        monkeypatch.setattr(AutoModelForTokenClassification, "from_config", failing)
    _, run, stored = trained
    exported = export_run(str(run), to=tmp_path / "critic", critic=True)
    assert "knows no value head" in caplog.text
    monkeypatch.undo()
    check_folder(exported, stored)
