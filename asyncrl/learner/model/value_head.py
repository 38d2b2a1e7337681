"""Makes the linear head of a critic, from a head in the model's files, or else with zeros.

Two kinds of files have a head: transformers' models for classification with one label (`score` or `classifier`), and
trl's models with a value head (`v_head.summary`).
"""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.utils.hub import cached_file

from asyncrl.config.schema import ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.model.loading import NoSafetensorsError, stored_tensors
from asyncrl.modelling.source import source_of

logger = logging.getLogger(__name__)

HEADS = ("score", "v_head.summary", "classifier")
"""The names of value heads in files."""


def values_of(head: nn.Linear, states: Tensor) -> Tensor:
    """Compute the values float32[M] of states [M, D]."""
    return F.linear(states.float(), head.weight.float(), head.bias.float())[:, 0]


def new_value_head(model: ModelConfig, hidden: int) -> nn.Linear:
    """Make the head of a critic that starts from `model`, whose states have `hidden` elements. Raises ConfigError: the
    files cannot be read."""
    head = nn.Linear(hidden, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    try:
        stored = _stored_heads(model)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"{model.path!r} cannot be read: {error!r}") from error
    for name in HEADS:
        if (weight := stored.get(f"{name}.weight")) is None:
            continue
        if weight.shape != (1, hidden):
            logger.warning(
                "%s.weight of %s has the shape %s, but a value needs [1, %d]: the critic's head begins at zero",
                *(name, model.path, list(weight.shape), hidden),
            )
            continue
        with torch.no_grad():
            head.weight.copy_(weight)
            if (bias := stored.get(f"{name}.bias")) is not None:
                head.bias.copy_(bias)
        logger.info("the critic's head is %s of %s", name, model.path)
        break
    return head


def _stored_heads(model: ModelConfig) -> dict[str, torch.Tensor]:
    """Read the tensors of value heads in the model's files, by their names."""
    source = source_of(model)
    wanted = {f"{head}.{part}" for head in HEADS for part in ("weight", "bias")}
    try:
        files, _ = stored_tensors(source)
    except NoSafetensorsError:
        pickled = cached_file(
            source.path, "pytorch_model.bin", revision=source.revision, _raise_exceptions_for_missing_entries=False
        )
        stored = {} if pickled is None else torch.load(pickled, map_location="cpu", weights_only=True, mmap=True)
        return {name: stored[name].clone() for name in wanted & stored.keys()}
    found = {}
    for name in wanted & files.keys():
        with safe_open(files[name], "pt") as opened:
            found[name] = opened.get_tensor(name)
    return found
