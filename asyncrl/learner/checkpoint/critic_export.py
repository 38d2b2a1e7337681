"""Exports the trained critic as a Hugging Face folder, which AutoModelForTokenClassification loads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForTokenClassification

from asyncrl.config.schema import CriticConfig, ModelConfig
from asyncrl.learner.checkpoint.checkpoint import read_model_of
from asyncrl.learner.checkpoint.export import folder_writer, write_anew, write_model
from asyncrl.learner.checkpoint.gathering import gather_all
from asyncrl.learner.model.critic import Critic
from asyncrl.learner.model.loading import read_model
from asyncrl.learner.model.lora import add_adapters
from asyncrl.learner.model.policy import Policy
from asyncrl.learner.model.sharding import convert
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.machine.files import save_tensors, when_there_is_room
from asyncrl.modelling.opening import beside
from asyncrl.modelling.weight_format import WeightFormat
from asyncrl.weights.manifest import DTYPES

logger = logging.getLogger(__name__)


def export_critic(
    critic: Critic, config: CriticConfig, model: ModelConfig, folder: Path, ranks: Ranks, stop: threading.Event
) -> None:
    """Write the critic into a new `folder`, with parameters in the compute dtype, as soon as the disk has room. The
    folder appears whole, or not at all. Raises StoppedError on every rank: `stop` was set while rank 0 waited for
    room."""
    named = beside(model, config.path)
    classifier = _classifier(critic)
    tensors = gather_all(classifier, WeightFormat(classifier), DTYPES[model.dtype], ranks)

    def write() -> None:
        if ranks.rank == 0:
            when_there_is_room(lambda: _write(classifier, tensors, named, folder), stop, str(folder))

    ranks.together(write)


def shared_critic(policy: Policy) -> Critic:
    """Return the critic that consists of the policy's decoder and value head, and shares their parameters."""
    return Critic(policy.model.get_decoder(), policy.value_head)


def export_checkpoint_critic(config: CriticConfig, model: ModelConfig, checkpoint: Path, folder: Path) -> None:
    """Write the critic of a checkpoint into `folder`, as `export_critic` does, in this process on the CPU. Raises
    ConfigError: the critic's model cannot be loaded; CheckpointError: the checkpoint cannot be read; OSError: `folder`
    cannot be written."""
    named = beside(model, config.path)
    whole = read_model(named)
    if config.lora.is_used:
        add_adapters(whole, config.lora, "critic.lora")
        # The run merged its adapters into weights of this dtype.
        convert(whole, DTYPES[model.dtype])
    if config.shared:
        policy = Policy(whole, 1.0, value_head=torch.nn.Linear(whole.config.get_text_config().hidden_size, 1))
        read_model_of("policy", checkpoint, policy)
        critic = shared_critic(policy)
    else:
        critic = Critic(whole.get_decoder())
        read_model_of("critic", checkpoint, critic)
    classifier = _classifier(critic)
    folder.parent.mkdir(parents=True, exist_ok=True)
    tensors = gather_all(classifier, WeightFormat(classifier), DTYPES[model.dtype], Ranks.alone())
    _write(classifier, tensors, named, folder)


class _Plain(torch.nn.Module):
    """A decoder and a head with the parameter names of transformers' classifiers, for families without a classifier."""

    def __init__(self, critic: Critic) -> None:
        super().__init__()
        self.model, self.score = critic.decoder, critic.head
        self.config = critic.decoder.config
        self.base_model_prefix = "model"


def _classifier(critic: Critic) -> Any:
    """Return transformers' token classifier with the decoder and the head of the critic."""
    config = type(critic.decoder.config).from_dict(critic.decoder.config.to_dict())
    config.num_labels = 1
    try:
        with torch.device("meta"):
            classifier: Any = AutoModelForTokenClassification.from_config(config)
        base = classifier.base_model_prefix
        if type(getattr(classifier, base)).__name__ != type(critic.decoder).__name__ or not hasattr(
            classifier, "score"
        ):
            raise ValueError(f"a {type(classifier).__name__} has another decoder or another head")
    except (ValueError, LookupError, ImportError, AttributeError) as error:
        logger.warning("transformers has no token classifier for this critic: %s", error)
        return _Plain(critic)
    setattr(classifier, base, critic.decoder)
    classifier.score = critic.head
    return classifier


def _write(classifier: Any, tensors: Mapping[str, Tensor], named: ModelConfig, folder: Path) -> None:
    write_beside = _writer(classifier, named)
    try:
        write_model(classifier, tensors, write_beside, folder)
    except OSError:
        raise
    # A family's own saving code might not support a value head, and may raise errors of any type.
    except Exception as error:  # noqa: BLE001 - the log has the reason
        logger.warning("the critic is saved as plain tensors, since the saving code of its family fails: %r", error)

        def write(partial: Path) -> None:
            partial.mkdir(parents=True)
            save_tensors({name: each.contiguous() for name, each in tensors.items()}, partial / "model.safetensors")
            write_beside(partial)

        write_anew(folder, write)


def _writer(classifier: Any, named: ModelConfig) -> Callable[[Path], None]:
    """Return a function that writes the configuration of a model with one label, and the tokenizer."""
    architecture = type(classifier).__name__ if not isinstance(classifier, _Plain) else None

    def change(config: Any) -> None:
        config.num_labels = 1
        if architecture is not None:
            config.architectures = [architecture]

    return folder_writer(named, change)
