"""Training: the learner, the models that it trains with the policy, and the algorithm."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from asyncrl.config.option import REQUIRED, option
from asyncrl.config.schema.lora import LoraConfig
from asyncrl.errors import ConfigError

DEFAULT_STEPS = 100


@dataclass
class LearnerConfig:
    """Training."""

    steps: int | None = option(
        None,
        "learner steps of the whole run; 0: no training; null: computed from learner.epochs, or 100 without epochs",
        "[0, inf)",
    )
    epochs: float | None = option(
        None, "passes through all training tasks; the command computes learner.steps from this number", "(0, inf)"
    )
    batch_size: int = option(
        64,
        "trajectories a step; a multiple of group_size",
        "[1, inf)",
        fixed="the age bound counts batches of this size",
    )
    group_size: int = option(
        8, "trajectories of one task that share a baseline", "[1, inf)", fixed="stored groups have this size"
    )
    minibatches: int = option(1, "optimiser updates a step; each takes an equal share of the batch", "[1, inf)")
    micro_tokens: int = option(
        16384, "most tokens of one forward and backward pass on a rank; lower it if memory is short", "[1, inf)"
    )
    shared_prefixes: bool | None = option(
        None,
        "compute a prefix that several sequences of a pass share, such as the prompt of a group, only once, and keep "
        "groups together where that is faster; null: only if the prefix has at least 32 tokens and an eighth of "
        "the sequence's tokens (half of them on GPUs)",
    )
    optimizer: str = option(
        "adamw",
        "how gradients become updates; adamw_8bit: AdamW with moments of 8 bits (needs the extra asyncrl[adamw-8bit]); "
        "muon: Muon for the matrices in the layers, and AdamW for everything else",
        choices=("adamw", "adamw_8bit", "muon"),
        fixed="the checkpoints hold its moments",
    )
    lr: float = option(1e-6, "learning rate, which the schedule scales", "(0, inf)")
    schedule: str = option(
        "constant",
        "how the learning rate falls from the end of the warm-up to the last step",
        choices=("constant", "linear", "cosine"),
    )
    lr_floor: float = option(0.0, "share of lr at which a linear or cosine schedule ends", "[0, 1]")
    warmup_steps: float = option(
        0, "steps over which the learning rate grows linearly to lr; below 1: this share of all steps", "[0, inf)"
    )
    betas: list[float] = option([0.9, 0.99], "AdamW's betas", "[0, 1)")
    momentum: float = option(0.95, "Muon's momentum", "[0, 1)")
    weight_decay: float = option(0.0, "decoupled weight decay; norms and biases have none", "[0, inf)")
    max_grad_norm: float = option(1.0, "gradients with a larger norm are scaled down to this norm", "(0, inf)")
    skip_grad_norm: float | None = option(
        None, "gradients with a larger norm are skipped and counted; null: no limit", "(0, inf)"
    )
    skip_grad_norm_factor: float | None = option(
        None,
        "gradients whose norm is more than this multiple of the median of the last 64 norms are skipped too, once "
        "there are 8 norms; null: no limit",
        "[1, inf)",
    )
    router_replay: bool = option(
        False,
        "for a mixture of experts: route each token to the experts that the engine recorded for it "
        "(engine.return_routed_experts; docs/training.md)",
    )
    min_grammar_mass: float = option(
        0.95,
        "a token sampled under a grammar is trained only if the tokens that the grammar allowed had at least this "
        "total probability under the policy (docs/engines.md)",
        "(0, 1]",
    )
    publish_every: int = option(
        1, "steps between two weight publishes", "[1, inf)", fixed="versions count these publishes"
    )
    checkpoint_every: int = option(20, "steps between two checkpoints", "[1, inf)")
    keep_checkpoints: int = option(2, "number of newest checkpoints that are kept", "[1, inf)")
    keep_best: int = option(
        0,
        "number of checkpoints with the best evaluations that are kept for export, in addition to the newest",
        "[0, inf)",
    )
    best_by: str = option(
        "accuracy",
        "evaluation result by which learner.keep_best ranks checkpoints",
        choices=("accuracy", "outcome", "reward"),
    )
    eval_every: int = option(
        0, "steps between two evaluations on data.eval; the first one is before step 1; 0: none", "[0, inf)"
    )
    eval_attempts: int = option(
        1,
        "attempts at each held-out task; 1: a greedy attempt; more: attempts sampled at actor.temperature",
        "[1, inf)",
    )
    memory: float | None = option(
        None,
        "share of a GPU's memory that a rank may use, which decides how many activations it keeps; null: the free "
        "memory, or on a shared GPU the share that the placement sets",
        "(0, 1]",
    )
    reference_on_host: bool = option(
        False,
        "keep the reference policy's weights in host memory: this frees GPU memory, and each pass copies the weights "
        "to the GPU",
    )
    optimizer_on_host: bool = option(
        False,
        "keep the optimizer's moments in host memory: this frees GPU memory, and each update copies the moments to "
        "the GPU and back",
    )
    exchange: str = option(
        "auto",
        "when ranks exchange weights and gradients; pass: in each pass; update: once per update, which is faster if "
        "an update has several passes, and needs memory on each rank for all weights (model.dtype) and all gradients "
        "(float32); auto: update on GPUs with enough memory for that and for all activations, else pass",
        choices=("auto", "pass", "update"),
    )
    reshard: float | None = option(
        None,
        "share of the layers that drop their gathered weights after the forward pass and gather them again in the "
        "backward pass; the first layers drop them first. null: on GPUs the smallest share for which all activations "
        "fit into memory, 1 on the CPU",
        "[0, 1]",
    )
    replicas: int = option(
        1,
        "copies of the model, each sharded over an equal part of the ranks; more copies need more memory, and gather "
        "weights from fewer ranks: use one copy per host if the network between hosts is slow",
        "[1, inf)",
    )
    context_ranks: int = option(
        1,
        "ranks that share the tokens of each pass (context parallelism), a divisor of the ranks of a copy: a pass, "
        "and thus a sequence, may have this many times the tokens; 1: each rank computes its own passes",
        "[1, inf)",
    )
    expert_ranks: int = option(
        1,
        "ranks that share the experts of each layer (expert parallelism), a divisor of the ranks of a copy: tokens "
        "are sent to the ranks of their experts; 1: each rank gathers all experts, like other weights",
        "[1, inf)",
    )
    tensor_ranks: int = option(
        1,
        "ranks that share the matrices of each layer (tensor parallelism), a divisor of the ranks of a copy: no rank "
        "ever holds a whole layer; the ranks also share the tokens of each pass, as with learner.context_ranks; 1: a "
        "rank gathers one layer after the other",
        "[1, inf)",
    )
    deterministic: bool = option(
        False, "use only kernels that repeat bit for bit on the same GPUs, which are slower; CPU kernels always repeat"
    )
    nodes: int = option(
        1, "hosts of the learner, with cluster.learner_ranks ranks each; all of them share run.dir", "[1, inf)"
    )
    node: int = option(0, "index of this host among the hosts of the learner; host 0 also runs the replay", "[0, inf)")
    rendezvous: str | None = option(
        None, "ADDRESS:PORT at which host 0 listens for the other hosts; null: there is only one host"
    )
    interface: str | None = option(
        None, "network interface of gloo and NCCL between hosts; null: the interface on the route to learner.rendezvous"
    )
    rank_timeout_s: float = option(
        1800.0,
        "seconds without progress of a rank's main thread after which all ranks start again; it must be longer than "
        "one pass and than the first compilation",
        "[1, inf)",
    )
    export: bool = option(True, "write the policy as a Hugging Face folder at the end")

    @property
    def pass_ranks(self) -> int:
        """The number of ranks that compute a pass together."""
        return self.context_ranks * self.tensor_ranks

    @property
    def total_steps(self) -> int:
        """Learner steps of the whole run. Raises ConfigError: `epochs` is set, and the command has not yet computed the
        steps from it."""
        if self.epochs is not None:
            raise ConfigError(
                f"learner.epochs={self.epochs}: only `asyncrl train` computes the steps from epochs; set "
                "learner.steps for a role that you start by hand"
            )
        return DEFAULT_STEPS if self.steps is None else self.steps


@dataclass
class CriticConfig:
    """The value model, which some advantages need (`asyncrl algorithms`). All other settings come from learner."""

    path: str | None = option(
        None,
        "Hugging Face folder or hub name of the critic's backbone; null: model.path",
        fixed="the critic in the checkpoints was initialised from it",
    )
    freeze: list[str] = option(
        [],
        "parameters of the critic's backbone that are not trained, as in model.freeze; its head is always trained",
        fixed="the checkpoints hold optimizer moments of the trained parameters only",
    )
    lr: float = option(1e-5, "learning rate of this model, which learner.schedule scales", "(0, inf)")
    shared: bool = option(
        False,
        "put the value head on the policy's backbone instead of a separate model: one pass computes both, and "
        "learner.lr applies to both",
        fixed="it changes the models in the checkpoints",
    )
    weight: float = option(0.5, "with critic.shared: weight of the critic's loss relative to the policy's", "[0, inf)")
    warmup_steps: int = option(
        0, "number of first learner steps that train only the critic, and not the policy", "[0, inf)"
    )
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class ImplicitConfig:
    """The implicit reward model of algorithm=prime, trained on outcomes. All other settings come from learner."""

    train: bool = option(
        False,
        "train the implicit reward model in the learner; false: algorithm=prime reads the scores of scoring.prm",
        fixed="it decides whether the checkpoints hold this model",
    )
    path: str | None = option(
        None,
        "Hugging Face folder or hub name of the initial weights; null: model.path",
        fixed="the model in the checkpoints was initialised from it",
    )
    freeze: list[str] = option(
        [],
        "parameters that are not trained, as in model.freeze",
        fixed="the checkpoints hold optimizer moments of the trained parameters only",
    )
    lr: float = option(1e-6, "learning rate of this model, which learner.schedule scales", "(0, inf)")
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class PartConfig:
    """A part of the algorithm: its name and the parameters that differ from its defaults."""

    name: str = option(REQUIRED, "name of the part, as `asyncrl algorithms` lists it")
    params: dict[str, Any] = option({}, "parameters that differ from the defaults")


@dataclass
class SftConfig:
    """Demonstrations that are trained together with the episodes; `asyncrl sft` trains them alone (docs/sft.md)."""

    path: list[str] | None = option(
        None,
        "demonstrations that each step trains in addition to its episodes, with their mean negative log-likelihood as "
        "the loss: files as in data.train; null: none. `asyncrl sft` reads data.train instead",
        fixed="a resumed run continues at a row number of these files",
    )
    weight: float = option(0.1, "weight of this loss relative to the policy's", "[0, inf)")
    schedule: str = option(
        "constant",
        "how the weight changes; linear, cosine: it falls from step 0 to zero at step algorithm.sft.steps, from which "
        "on no demonstrations are read",
        choices=("constant", "linear", "cosine"),
    )
    steps: int | None = option(
        None, "number of learner steps after which a falling weight is 0; null: all steps of the run", "[1, inf)"
    )
    share: float = option(
        0.25, "number of demonstrations per step, as a share of learner.batch_size, rounded up", "(0, inf)"
    )
    tokens: int | None = option(
        None,
        "each step takes whole demonstrations until they have this many tokens of assistant turns; null: "
        "algorithm.sft.share sets their number",
        "[1, inf)",
    )
    max_tokens: int | None = option(
        None,
        "most tokens of a demonstration, also for `asyncrl sft`; null: actor.max_tokens",
        "[2, inf)",
        fixed="a resumed run continues at a row number of the remaining demonstrations",
    )
    overlong: str = option(
        "refuse",
        "treatment of demonstrations that are longer than algorithm.sft.max_tokens, also for `asyncrl sft`; refuse: "
        "the command refuses them; leave_out: they are left out and counted; cut: their end is cut off, and they are "
        "counted",
        choices=("refuse", "leave_out", "cut"),
        fixed="a resumed run continues at a row number of the remaining demonstrations",
    )


@dataclass
class DemonstrationConfig:
    """The weights of tasks' demonstrations (data.demonstration), which are trained as members of their groups."""

    weight: str = option(
        "none",
        "importance weight of a demonstration's tokens; none: 1 for every token; shaped: p / (p + gamma), where p is "
        "the policy's probability of the token, which increases the gradient of tokens with a small p",
        choices=("none", "shaped"),
    )
    gamma: float = option(0.1, "gamma of the shaped weight", "(0, inf)")


@dataclass
class AlgorithmConfig:
    """The parts of the algorithm, which `asyncrl algorithms` lists."""

    reward: list[PartConfig] = option([], "changes of the reward before advantages, in this order")
    advantage: PartConfig = option(
        PartConfig("grpo"), "how rewards become advantages", fixed="another advantage may need other models and scores"
    )
    greedy_sibling: bool = option(
        False,
        "sample one member of every group greedily, as a baseline (advantage remax)",
        fixed="stored groups were sampled in this way",
    )
    loss: PartConfig = option(PartConfig("ppo"), "loss of the policy")
    correction: list[PartConfig] = option(
        [PartConfig("truncate", {"level": "token", "cap": 2.0})],
        "importance corrections from the behaviour to the proximal policy, in this order",
    )
    proximal: str = option(
        "auto",
        "source of the proximal policy's log-probs (docs/algorithms.md); auto: the training pass if its values are "
        "sufficient, else recompute, which is one more forward pass at the start of a step",
        choices=("auto", "recompute", "interpolate", "interpolate_linear", "behaviour"),
    )
    stream: list[PartConfig] = option([], "weight streams: further losses, each with a weight for every sequence")
    kl: PartConfig = option(PartConfig("none"), "KL to the reference policy")
    aggregation: PartConfig = option(PartConfig("token-mean"), "how the losses of tokens become one number")
    entropy_weight: float = option(0.0, "weight of the entropy bonus", "[0, inf)")
    balance_weight: float | None = option(
        0.0,
        "weight of the loss that balances the load of a mixture's experts, which costs one more forward pass "
        "(docs/models.md); null: router_aux_loss_coef of the model's configuration",
        "[0, inf)",
    )
    balance_bias_rate: float = option(
        0.0,
        "step by which an update moves the router's bias of each expert that got more or fewer tokens than the mean "
        "of its layer, in families with such biases; 0: biases are not changed",
        "[0, inf)",
    )
    value: PartConfig = option(PartConfig("clipped"), "loss of the critic")
    value_aggregation: PartConfig = option(PartConfig("token-mean"), "how the critic's losses become one number")
    sft: SftConfig = field(default_factory=SftConfig)
    demonstration: DemonstrationConfig = field(default_factory=DemonstrationConfig)
