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
    """Training. The processes of the learner are called ranks, and a pass is one forward and backward pass."""

    steps: int | None = option(
        None,
        "number of learner steps of the whole run; 0: no training; null: as many as learner.epochs needs, or 100 "
        "without epochs",
        "[0, inf)",
    )
    epochs: float | None = option(
        None, "number of passes through all training tasks; `asyncrl train` computes learner.steps from it", "(0, inf)"
    )
    batch_size: int = option(
        64,
        "number of trajectories that a step trains; a multiple of learner.group_size",
        "[1, inf)",
        fixed="the age bound counts batches of this size",
    )
    group_size: int = option(
        8,
        "number of trajectories of one task, which share a baseline",
        "[1, inf)",
        fixed="stored groups have this size",
    )
    minibatches: int = option(
        1, "number of optimizer updates in a step; each takes an equal share of the batch", "[1, inf)"
    )
    micro_tokens: int = option(
        16384,
        "maximum number of tokens in one forward and backward pass of a rank; lower it if memory is short",
        "[1, inf)",
    )
    shared_prefixes: bool | None = option(
        None,
        "true: if several sequences of a pass share a prefix, such as the prompt of a group, compute it only once, and "
        "put the sequences of a group into the same pass where that is faster; null: do this only for prefixes of at "
        "least 32 tokens that are at least an eighth of the sequence (on GPUs: a half)",
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
    lr_floor: float = option(
        0.0, "learning rate after the last step of a linear or cosine schedule, as a share of learner.lr", "[0, 1]"
    )
    warmup_steps: float = option(
        0,
        "number of first steps in which the learning rate grows linearly to learner.lr; a value below 1 is a share of "
        "all steps",
        "[0, inf)",
    )
    betas: list[float] = option([0.9, 0.99], "AdamW's betas", "[0, 1)")
    momentum: float = option(0.95, "Muon's momentum", "[0, 1)")
    weight_decay: float = option(0.0, "decoupled weight decay; norms and biases have none", "[0, inf)")
    max_grad_norm: float = option(
        1.0, "a gradient with a larger norm than this is scaled down to this norm", "(0, inf)"
    )
    skip_grad_norm: float | None = option(
        None, "an update whose gradient has a larger norm than this is skipped and counted; null: no limit", "(0, inf)"
    )
    skip_grad_norm_factor: float | None = option(
        None,
        "an update is also skipped if the norm of its gradient is more than this number times the median of the last "
        "64 norms; this begins once there are 8 norms. null: no limit",
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
        1, "number of steps between two publishes of weights", "[1, inf)", fixed="versions count these publishes"
    )
    checkpoint_every: int = option(20, "number of steps between two checkpoints", "[1, inf)")
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
        0,
        "number of steps between two evaluations on data.eval; the first evaluation is before the first step, and the "
        "last one after the last step; 0: no evaluations",
        "[0, inf)",
    )
    eval_attempts: int = option(
        1,
        "number of attempts at each held-out task; 1: the attempt is greedy; more: the attempts are sampled at "
        "actor.temperature",
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
        "when ranks exchange weights and gradients; pass: in each pass; update: once per update, which is faster if an "
        "update has several passes, but each rank then needs memory for all weights (model.dtype) and all gradients "
        "(float32); auto: update on GPUs that have this memory and room for all activations, else pass",
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
        "number of copies of the model, each sharded over an equal part of the ranks. With more copies, a rank needs "
        "more memory, and gathers weights from fewer ranks: use one copy per host if the network between hosts is "
        "slow",
        "[1, inf)",
    )
    context_ranks: int = option(
        1,
        "number of ranks that divide the tokens of each pass among them (context parallelism); it must divide the "
        "number of ranks of a copy of the model. A pass, and so a sequence, may then have this many times as many "
        "tokens. 1: each rank computes its own passes",
        "[1, inf)",
    )
    expert_ranks: int = option(
        1,
        "number of ranks that divide the experts of each layer among them (expert parallelism); it must divide the "
        "number of ranks of a copy of the model. Tokens are sent to the ranks of their experts. 1: each rank gathers "
        "all experts, like other weights",
        "[1, inf)",
    )
    tensor_ranks: int = option(
        1,
        "number of ranks that divide the matrices of each layer among them (tensor parallelism); it must divide the "
        "number of ranks of a copy of the model. No rank ever holds a whole layer. The ranks also divide the tokens "
        "of each pass, as with learner.context_ranks. 1: a rank gathers one layer after the other",
        "[1, inf)",
    )
    deterministic: bool = option(
        False,
        "use only kernels whose results are the same, bit for bit, each time on the same GPUs; they are slower. "
        "Kernels on the CPU are always like this",
    )
    nodes: int = option(
        1, "number of hosts of the learner, with cluster.learner_ranks ranks each; all hosts share run.dir", "[1, inf)"
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
        "if the main thread of a rank makes no progress for this many seconds, all ranks start again. Set it to more "
        "than one pass takes, and more than the first compilation takes",
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
    """The value model, which some advantages need (`asyncrl algorithms`). All its other settings are those of the
    section learner."""

    path: str | None = option(
        None,
        "Hugging Face folder or hub name of the critic's backbone; null: model.path",
        fixed="the critic in the checkpoints was initialised from it",
    )
    freeze: list[str] = option(
        [],
        "parameters of the critic's backbone that are not trained, in the form of model.freeze; the critic's head is "
        "always trained",
        fixed="the checkpoints hold optimizer moments of the trained parameters only",
    )
    lr: float = option(1e-5, "learning rate of this model, which learner.schedule scales", "(0, inf)")
    shared: bool = option(
        False,
        "put the value head on the policy's backbone instead of a separate model: one pass computes both, and "
        "learner.lr applies to both",
        fixed="it decides which models the checkpoints hold",
    )
    weight: float = option(
        0.5, "with critic.shared: weight of the critic's loss; the weight of the policy's loss is 1", "[0, inf)"
    )
    warmup_steps: int = option(
        0, "number of first learner steps, which train the critic but not the policy", "[0, inf)"
    )
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class ImplicitConfig:
    """The implicit process model of algorithm=prime: it is trained on outcomes, and gives each token a reward. All
    its other settings are those of the section learner."""

    train: bool = option(
        False,
        "train the implicit process model in the learner; false: algorithm=prime reads the scores of scoring.prm",
        fixed="it decides whether the checkpoints hold this model",
    )
    path: str | None = option(
        None,
        "Hugging Face folder or hub name of this model's initial weights; null: model.path",
        fixed="the model in the checkpoints was initialised from it",
    )
    freeze: list[str] = option(
        [],
        "parameters of this model that are not trained, in the form of model.freeze",
        fixed="the checkpoints hold optimizer moments of the trained parameters only",
    )
    lr: float = option(1e-6, "learning rate of this model, which learner.schedule scales", "(0, inf)")
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class PartConfig:
    """A part of the algorithm: its name and the parameters that differ from its defaults."""

    name: str = option(REQUIRED, "name of the part, as `asyncrl algorithms` lists it")
    params: dict[str, Any] = option({}, "parameters of the part, in place of its defaults")


@dataclass
class SftConfig:
    """Demonstrations that are trained together with the episodes; `asyncrl sft` trains them alone (docs/sft.md)."""

    path: list[str] | None = option(
        None,
        "files of demonstrations, in the forms of data.train; each step trains some of them in addition to its "
        "episodes, and their loss is their mean negative log-likelihood; null: none. `asyncrl sft` reads data.train "
        "instead",
        fixed="a resumed run continues at a row number of these files",
    )
    weight: float = option(
        0.1, "weight of the loss of demonstrations; the weight of the policy's loss is 1", "[0, inf)"
    )
    schedule: str = option(
        "constant",
        "how the weight changes; linear, cosine: it falls from step 0 on, and is 0 from step algorithm.sft.steps on. "
        "From then on no demonstrations are read",
        choices=("constant", "linear", "cosine"),
    )
    steps: int | None = option(
        None, "number of learner steps after which a falling weight is 0; null: all steps of the run", "[1, inf)"
    )
    share: float = option(
        0.25, "number of demonstrations in each step, as a share of learner.batch_size; rounded up", "(0, inf)"
    )
    tokens: int | None = option(
        None,
        "each step takes demonstrations until their assistant turns have this many tokens; null: algorithm.sft.share "
        "sets the number of demonstrations",
        "[1, inf)",
    )
    max_tokens: int | None = option(
        None,
        "maximum number of tokens of a demonstration, also for `asyncrl sft`; null: actor.max_tokens",
        "[2, inf)",
        fixed="a resumed run continues at a row number of the remaining demonstrations",
    )
    overlong: str = option(
        "refuse",
        "what happens to demonstrations that are longer than algorithm.sft.max_tokens, also for `asyncrl sft`; refuse: "
        "the run does not start; leave_out: they are left out and counted; cut: their end is cut off, and they are "
        "counted",
        choices=("refuse", "leave_out", "cut"),
        fixed="a resumed run continues at a row number of the remaining demonstrations",
    )


@dataclass
class DemonstrationConfig:
    """The weights of the demonstrations of tasks (data.demonstration). Such a demonstration is trained as a member of
    its task's groups."""

    weight: str = option(
        "none",
        "importance weight of a demonstration's tokens; none: 1 for every token; shaped: p / (p + gamma), where p is "
        "the policy's probability of the token; its gradient is largest at p = gamma",
        choices=("none", "shaped"),
    )
    gamma: float = option(0.1, "gamma of the shaped weight", "(0, inf)")


@dataclass
class AlgorithmConfig:
    """The parts of the algorithm, which `asyncrl algorithms` lists."""

    reward: list[PartConfig] = option([], "changes of the reward before advantages are computed, in this order")
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
        "corrections for the age of the data, in this order; they reweight or drop tokens by the ratio of the "
        "proximal to the behaviour policy",
    )
    proximal: str = option(
        "auto",
        "where the proximal policy's log-probs come from (docs/algorithms.md); auto: from the training pass if its "
        "values are sufficient, else recompute; recompute: from one more forward pass at the start of a step",
        choices=("auto", "recompute", "interpolate", "interpolate_linear", "behaviour"),
    )
    stream: list[PartConfig] = option([], "weight streams: further losses, each with a weight for every sequence")
    kl: PartConfig = option(PartConfig("none"), "KL to the reference policy")
    aggregation: PartConfig = option(PartConfig("token-mean"), "how the losses of tokens become one number")
    entropy_weight: float = option(0.0, "weight of the entropy bonus", "[0, inf)")
    balance_weight: float | None = option(
        0.0,
        "weight of the loss that balances the load of a mixture's experts; it costs one more forward pass "
        "(docs/models.md); null: router_aux_loss_coef of the model's configuration",
        "[0, inf)",
    )
    balance_bias_rate: float = option(
        0.0,
        "in model families whose routers have a bias for each expert: how far an update moves the bias of an expert "
        "that got more or fewer tokens than the mean expert of its layer; 0: biases are not changed",
        "[0, inf)",
    )
    value: PartConfig = option(PartConfig("clipped"), "loss of the critic")
    value_aggregation: PartConfig = option(PartConfig("token-mean"), "how the critic's losses become one number")
    lr_scale: PartConfig = option(
        PartConfig("none"),
        "factor of the policy's learning rate in each update, which depends on the age of the update's data",
    )
    sft: SftConfig = field(default_factory=SftConfig)
    demonstration: DemonstrationConfig = field(default_factory=DemonstrationConfig)
