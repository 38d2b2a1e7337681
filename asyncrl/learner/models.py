"""Loads the models of a run: the policy, the reference, the critic, and the implicit process model. That model learns
from the outcomes of episodes how much reward each token deserves."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

from asyncrl.algorithms.algorithm import Algorithm
from asyncrl.errors import ConfigError
from asyncrl.learner.compiling import compile_passes
from asyncrl.learner.memory import fit_memory, tell_exchange, usable_bytes
from asyncrl.learner.model.critic import load_critic
from asyncrl.learner.model.optimizer import Trainable
from asyncrl.learner.model.policy import Policy, load_policy, reference_of
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.learner.settings import ModelSettings, RunSettings, SettingsHistory
from asyncrl.learner.trainer import Trainer
from asyncrl.modelling.opening import beside

logger = logging.getLogger(__name__)


def load_trainer(settings: RunSettings, history: SettingsHistory, ranks: Ranks, stop: threading.Event) -> Trainer:
    """Load all models that some step of the run needs. Raises ConfigError: a model cannot be used."""
    models, learner = settings.models, settings.learner
    algorithm = Algorithm.from_config(settings.algorithm, learner.minibatches)
    shares_backbone = algorithm.needs_critic and models.critic.shared
    policy = load_policy(
        models.policy,
        models.temperature,
        ranks,
        models.longest,
        replays_routing=any(each.learner.router_replay for each in history.every()),
        seed=models.seed,
        with_values=shares_backbone,
    )
    implicit = _load_implicit(models, ranks)
    algorithms = (Algorithm.from_config(each.algorithm, each.learner.minibatches) for each in history.every())
    reference = None
    if implicit is not None or any(each.needs_reference for each in algorithms):
        on_host = learner.reference_on_host
        reference = reference_of(policy, models.policy, models.temperature, ranks, models.longest_episode, on_host)
    has_critic = algorithm.needs_critic and not shares_backbone
    _check_images(policy, implicit, has_critic)
    critic = load_critic(models.critic, models.policy, ranks, models.longest, models.seed) if has_critic else None
    dtype = models.policy.dtype
    return Trainer(
        ranks,
        algorithm,
        Trainable(policy, learner.lr, learner, dtype),
        None if critic is None else Trainable(critic, models.critic.lr, learner, dtype),
        reference,
        stop,
        None if implicit is None else Trainable(implicit, models.implicit.lr, learner, dtype),
    )


def _load_implicit(models: ModelSettings, ranks: Ranks) -> Policy | None:
    """Load the implicit process model, if the algorithm uses one. It starts with the policy's weights, unless
    `implicit.path` names other weights."""
    own = models.implicit
    if not own.train:
        return None
    model = replace(beside(models.policy, own.path, own.freeze), lora=own.lora)
    return load_policy(model, models.temperature, ranks, models.longest_episode, "implicit", seed=models.seed)


def _check_images(policy: Policy, implicit: Policy | None, has_critic: bool) -> None:
    """Raises ConfigError: the policy reads images, and another model would see no images, or different ones."""
    if policy.vision is None:
        return
    if has_critic:
        raise ConfigError(
            "model.path reads images, and a critic of its own would see none: use critic.shared, or an advantage "
            "without a critic"
        )
    if implicit is not None and implicit.vision != policy.vision:
        raise ConfigError(
            "model.path reads images, and the model of implicit.path reads none, or splits them differently: leave "
            "implicit.path out, or name a model of the same family"
        )


def fit_passes(trainer: Trainer, settings: RunSettings, history: SettingsHistory) -> None:
    """Prepare the models for training. Compile the layers, and then fit the training into memory: choose which
    activations layers keep, and how often ranks exchange weights. Raises StoppedError: `trainer.stop` was set."""
    ranks, model = trainer.ranks, settings.models.policy
    largest = _largest_pass(settings, history)
    if trainer.policy.module.is_compiled:
        shares_prefixes = any(each.learner.shared_prefixes is not False for each in history.every())
        # The balance loss, which keeps the experts of a mixture equally busy, also needs passes without gradients.
        balances = any(each.algorithm.balance_weight != 0 for each in history.every())
        compile_passes(trainer, shares_prefixes, settings.models.longest, sum(largest), balances)
    if ranks.device.type == "cuda":
        usable = usable_bytes(ranks.device, settings.learner.memory)
        fit_memory(trainer, largest, usable, model.activations)
    else:
        tell_exchange(trainer)


def _largest_pass(settings: RunSettings, history: SettingsHistory) -> list[int]:
    """Return the lengths of the sequences of the largest pass."""
    longest = settings.models.longest
    together = history.at(0).learner.pass_ranks
    tokens = max(longest, *(each.learner.micro_tokens * together for each in history.every()))
    tokens = max(tokens, settings.largest_episode)
    return [longest] * (tokens // longest) + ([tokens % longest] if tokens % longest else [])
