"""Training: the learner, the models beside the policy, and the algorithm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from asyncrl.config.option import REQUIRED, option


@dataclass
class LearnerConfig:
    """Training."""

    steps: int = option(100, "learner steps of the whole run", "[1, inf)")
    batch_size: int = option(64, "trajectories a step; a multiple of group_size", "[1, inf)")
    group_size: int = option(8, "trajectories of one task that are baselined together", "[1, inf)")
    minibatches: int = option(1, "optimiser updates a step; each takes an equal share of the batch", "[1, inf)")
    micro_tokens: int = option(16384, "packed tokens of one forward and backward pass on one rank", "[1, inf)")
    lr: float = option(1e-6, "learning rate of AdamW", "(0, inf)")
    betas: list[float] = option([0.9, 0.99], "AdamW's betas", "[0, 1)")
    weight_decay: float = option(0.0, "AdamW's weight decay", "[0, inf)")
    warmup_steps: int = option(0, "steps of linear warm-up", "[0, inf)")
    max_grad_norm: float = option(1.0, "gradient norm above which gradients are scaled down", "(0, inf)")
    publish_every: int = option(1, "steps between two weight publishes", "[1, inf)")
    checkpoint_every: int = option(20, "steps between two checkpoints", "[1, inf)")
    keep_checkpoints: int = option(2, "checkpoints that are kept", "[1, inf)")
    eval_every: int = option(
        0, "steps between two evaluations on data.eval, the first at step 0; 0 is never", "[0, inf)"
    )
    export: bool = option(True, "write a Hugging Face folder at the end")


@dataclass
class CriticConfig:
    """The value model, which some advantages need (see `asyncrl algorithms`). It shares learner.* but for this."""

    path: str | None = option(None, "Hugging Face folder or hub name of its backbone; none is model.path")
    lr: float = option(1e-5, "learning rate of its AdamW", "(0, inf)")


@dataclass
class ImplicitConfig:
    """The implicit process model of algorithm=prime, trained on outcomes beside the policy. It shares learner.*."""

    train: bool = option(False, "train it in the learner; else algorithm=prime reads the step scores of scoring.prm")
    path: str | None = option(None, "Hugging Face folder or hub name of its first weights; none is model.path")
    lr: float = option(1e-6, "learning rate of its AdamW", "(0, inf)")


@dataclass
class Choice:
    """An algorithm's part: its name and the parameters that differ from its defaults."""

    name: str = option(REQUIRED, "name in `asyncrl algorithms`")
    params: dict[str, Any] = option({}, "parameters that differ from the defaults")


@dataclass
class AlgorithmConfig:
    """The composition of the algorithm: see `asyncrl algorithms`."""

    reward: list[Choice] = option([], "changes of the reward before advantages, applied in order")
    advantage: Choice = option(Choice("grpo"), "how rewards become advantages")
    greedy_sibling: bool = option(False, "sample one member of every group greedily, as a baseline (advantage remax)")
    loss: Choice = option(Choice("ppo"), "the policy's loss")
    correction: list[Choice] = option(
        [Choice("truncate", {"level": "token", "cap": 2.0})],
        "importance corrections of behaviour to proximal, applied in order; empty is none",
    )
    proximal: str = option(
        "recompute",
        "proximal log-probs (docs/algorithms.md)",
        choices=("recompute", "interpolate", "behaviour"),
    )
    kl: Choice = option(Choice("none"), "the KL to the reference policy")
    aggregation: Choice = option(Choice("token-mean"), "how the losses of tokens become one number")
    entropy_weight: float = option(0.0, "weight of the entropy bonus")
    value: Choice = option(Choice("clipped"), "the critic's loss")
