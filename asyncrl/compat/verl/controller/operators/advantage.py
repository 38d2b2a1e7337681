"""The operator `compute_advantage`: advantages, and all other values that an algorithm computes before the updates."""

from __future__ import annotations

from asyncrl.algorithms.algorithm import Algorithm
from asyncrl.compat.verl.batches.fields import require
from asyncrl.compat.verl.batches.packed import add_tokens, to_tokens
from asyncrl.compat.verl.batches.protocol import DataProto
from asyncrl.compat.verl.controller.operators.plans import episodes_of
from asyncrl.config.schema import LearnerConfig

STATE = "algorithm_state"
"""The key of `meta_info` with the algorithm's state, which the loss needs."""


def compute_advantage(
    data: DataProto,
    algorithm: Algorithm,
    greedy_sibling: bool = False,
    min_grammar_mass: float = LearnerConfig.min_grammar_mass,
) -> DataProto:
    """Add `advantages` to a whole batch of groups with rewards, in place, and return it.

    It also adds `returns`, importance weights and rejections if the algorithm computes them. `greedy_sibling` is true
    if the first row of each group was sampled greedily. `min_grammar_mass` is the value of `learner.min_grammar_mass`.

    Raises DataProtoError: the batch lacks a field that the algorithm needs. The message names the operator that adds
    the field.
    """
    needed = {
        "old_log_probs": (algorithm.needs_proximal or algorithm.needs_collisions, "compute_log_prob"),
        "ref_log_prob": (algorithm.needs_reference, "compute_ref_log_prob"),
        "values": (algorithm.needs_critic, "compute_values"),
    }
    for name, (is_needed, operator) in needed.items():
        found = data.batch is not None and name in data.batch
        require(found or not is_needed, f"the algorithm needs {name}, which the batch lacks: call {operator}")
    episodes = episodes_of(data, greedy_sibling, algorithm.parts.label_needs)
    tokens = algorithm.prepare(episodes, to_tokens(data, min_grammar_mass), lambda each: each)
    add_tokens(data, tokens)
    data.meta_info[STATE] = algorithm.state()
    return data
