"""Checks before anything starts that the policy's layers support the options of the learner, and that learning rates
are not far too large.

The learner's ranks would refuse the same options, but only after all roles have started.
"""

from __future__ import annotations

import logging

from asyncrl.config.schema import AlgorithmConfig, CriticConfig, ImplicitConfig, LearnerConfig, ModelConfig

log = logging.getLogger("asyncrl.train")

LARGE_LR, LARGE_LR_OF_ADAPTERS = 1e-3, 1e-2
"""Learning rates above these are warned of. All optimizers have updates of AdamW's size: each moves a weight by about
the learning rate, and the weights of a pretrained model are about 0.02."""


def warn_of_large_rates(
    model: ModelConfig, critic: CriticConfig, implicit: ImplicitConfig, learner: LearnerConfig
) -> None:
    """Log a warning for each learning rate that is larger than any usual one."""
    rates = [("learner.lr", learner.lr, model.lora), ("critic.lr", critic.lr, critic.lora)]
    if implicit.train:
        rates.append(("implicit.lr", implicit.lr, implicit.lora))
    for key, rate, lora in rates:
        limit, usual = LARGE_LR, "1e-6 to 1e-5 for reinforcement learning, and up to 1e-4 for fine-tuning"
        if lora.is_used:
            limit, usual = LARGE_LR_OF_ADAPTERS, "1e-5 to 1e-3 for adapters"
        if rate > limit:
            log.warning(
                "%s=%g is so large that the first updates may destroy the model: with learner.optimizer=%s, each "
                "update moves a weight by about this much. Usual values are %s",
                *(key, rate, learner.optimizer, usual),
            )


def check_learning(
    model: ModelConfig, critic: CriticConfig, learner: LearnerConfig, algorithm: AlgorithmConfig
) -> None:
    """Raises ConfigError: the policy's layers cannot be divided among ranks; its experts cannot be spread over ranks or
    balanced; the choices of its router cannot be replayed; or it reads images, and an option excludes images."""
    from asyncrl.algorithms.algorithm import Algorithm
    from asyncrl.learner.model.policy import check_vision
    from asyncrl.modelling.opening import open_config
    from asyncrl.modelling.vision import sees_images

    if sees_images(open_config(model)):
        own_critic = Algorithm.from_config(algorithm, learner.minibatches).needs_critic and not critic.shared
        check_vision(model.path, learner.context_ranks > 1 or learner.tensor_ranks > 1, own_critic)
    balances = algorithm.balance_weight != 0 or algorithm.balance_bias_rate
    if not (learner.tensor_ranks > 1 or learner.expert_ranks > 1 or learner.router_replay or balances):
        return
    from asyncrl.learner.model.expert_ranks import spreadable_experts
    from asyncrl.learner.model.router_balance import Balance
    from asyncrl.learner.model.routing_replay import RoutingReplay
    from asyncrl.learner.model.tensor_ranks import check_division
    from asyncrl.modelling.shapes import empty_model

    policy = empty_model(model)
    if learner.tensor_ranks > 1:
        check_division(policy, learner.tensor_ranks)
    if learner.expert_ranks > 1:
        spreadable_experts(policy, learner.expert_ranks)
    Balance.from_config(algorithm, policy)
    if learner.router_replay:
        RoutingReplay(policy)
