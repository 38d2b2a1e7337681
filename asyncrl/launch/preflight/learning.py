"""Checks before anything starts that the policy's layers support the options of the learner.

The learner's ranks would refuse the same options, but only after all roles have started.
"""

from __future__ import annotations

from asyncrl.config.schema import AlgorithmConfig, CriticConfig, LearnerConfig, ModelConfig


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
