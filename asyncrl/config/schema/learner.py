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
        None, "learner steps of the whole run; 0: no training; null: 100, or as learner.epochs says", "[0, inf)"
    )
    epochs: float | None = option(
        None, "times that the run goes through all training tasks; a start computes learner.steps from it", "(0, inf)"
    )
    batch_size: int = option(
        64,
        "trajectories a step; a multiple of group_size",
        "[1, inf)",
        fixed="the age bound counts batches of this size",
    )
    group_size: int = option(
        8, "trajectories of one task that share a baseline", "[1, inf)", fixed="stored groups have so many members"
    )
    minibatches: int = option(1, "optimiser updates a step; each takes an equal share of the batch", "[1, inf)")
    micro_tokens: int = option(
        16384, "tokens that one forward and backward pass computes on a rank; lower it if memory is short", "[1, inf)"
    )
    shared_prefixes: bool | None = option(
        None,
        "compute tokens once that sequences of a pass begin with alike, such as the prompt of a group, and keep groups "
        "together where that is faster; null: prefixes of at least 32 tokens that are an eighth of the sequence, on "
        "GPUs half of it",
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
    warmup_steps: int = option(0, "steps over which the learning rate grows linearly to lr", "[0, inf)")
    betas: list[float] = option([0.9, 0.99], "AdamW's betas", "[0, 1)")
    momentum: float = option(0.95, "Muon's momentum", "[0, 1)")
    weight_decay: float = option(0.0, "decoupled weight decay; norms and biases have none", "[0, inf)")
    max_grad_norm: float = option(1.0, "gradients with a larger norm are scaled down to this norm", "(0, inf)")
    skip_grad_norm: float | None = option(
        None, "gradients with a larger norm change nothing, and are counted; null: no such limit", "(0, inf)"
    )
    skip_grad_norm_factor: float | None = option(
        None,
        "gradients whose norm is more than so many times the median of the last 64 change nothing either, once there "
        "are 8 norms; null: no such limit",
        "[1, inf)",
    )
    router_replay: bool = option(
        False,
        "send the tokens of a mixture's policy to the experts that the engine used, where it recorded them "
        "(engine.return_routed_experts; docs/training.md)",
    )
    min_grammar_mass: float = option(
        0.95,
        "a token that was sampled under a grammar is trained if the grammar left at least this share of the policy's "
        "probability there (docs/engines.md)",
        "(0, 1]",
    )
    publish_every: int = option(
        1, "steps between two weight publishes", "[1, inf)", fixed="versions count these publishes"
    )
    checkpoint_every: int = option(20, "steps between two checkpoints", "[1, inf)")
    keep_checkpoints: int = option(2, "newest checkpoints that are kept", "[1, inf)")
    keep_best: int = option(
        0, "checkpoints with the best evaluations that are kept in addition to the newest, for export", "[0, inf)"
    )
    best_by: str = option(
        "accuracy",
        "the result of evaluations that learner.keep_best goes by",
        choices=("accuracy", "outcome", "reward"),
    )
    eval_every: int = option(
        0, "steps between two evaluations on data.eval, the first before step 1; 0: none", "[0, inf)"
    )
    eval_attempts: int = option(
        1, "attempts at each held-out task: one is greedy, several are sampled at actor.temperature", "[1, inf)"
    )
    memory: float | None = option(
        None,
        "share of a GPU's memory that a rank fits its activations into; null: what is free, or what the placement "
        "leaves it on a GPU that it shares",
        "(0, 1]",
    )
    reference_on_host: bool = option(
        False,
        "keep the weights of the reference policy in the memory of the host: a GPU has room for more, and each pass "
        "copies these weights to it",
    )
    optimizer_on_host: bool = option(
        False,
        "keep the moments of the optimizer in the memory of the host: a GPU has room for more, and each update copies "
        "them to it and back",
    )
    exchange: str = option(
        "auto",
        "when ranks exchange weights and gradients: in each pass, or once an update: this saves time where one "
        "has several passes, and each rank then has room for all weights in model.dtype and all gradients in float32; "
        "auto: once an update on GPUs whose memory suffices for it and all activations, otherwise in each pass",
        choices=("auto", "pass", "update"),
    )
    reshard: float | None = option(
        None,
        "share of the layers whose gathered weights are dropped between the forward and the backward pass, which "
        "gathers them again; the last layers keep theirs first. null: as few as the memory of GPUs allows with all "
        "activations; 1 on the CPU",
        "[0, 1]",
    )
    replicas: int = option(
        1,
        "copies of the model, each sharded over an equal part of the ranks; several take more memory, and gather "
        "weights from fewer ranks: use one copy a host where hosts are slowly connected",
        "[1, inf)",
    )
    context_ranks: int = option(
        1,
        "ranks that divide the tokens of each pass among them (context parallelism), a divisor of the ranks of a copy: "
        "a pass, and so a sequence, may have so many times the tokens; 1: each rank has passes of its own",
        "[1, inf)",
    )
    expert_ranks: int = option(
        1,
        "ranks that have all experts of a layer among them, a divisor of the ranks of a copy: tokens travel to the "
        "ranks of their experts (expert parallelism); 1: ranks gather all experts, as they do other weights",
        "[1, inf)",
    )
    tensor_ranks: int = option(
        1,
        "ranks that divide the matrices of each layer among them (tensor parallelism), a divisor of the ranks of a "
        "copy: no rank ever has a whole layer; they divide the tokens of each pass, too, as learner.context_ranks "
        "does; 1: a rank gathers one layer after the other",
        "[1, inf)",
    )
    deterministic: bool = option(
        False, "only kernels that repeat bit for bit on the same GPUs, which are slower; on the CPU all do"
    )
    nodes: int = option(1, "hosts that have ranks, cluster.learner_ranks each; all share run.dir", "[1, inf)")
    node: int = option(0, "which of them this host is; host 0 also runs the replay", "[0, inf)")
    rendezvous: str | None = option(None, "ADDRESS:PORT at which host 0 listens for the other hosts; null: one host")
    interface: str | None = option(
        None, "network interface of gloo and NCCL between hosts; null: the one on the way to learner.rendezvous"
    )
    rank_timeout_s: float = option(
        1800.0,
        "seconds after which a rank whose main thread does not get on is hung, and all ranks start again; longer than "
        "one pass and the first compilation take",
        "[1, inf)",
    )
    export: bool = option(True, "write the policy as a Hugging Face folder at the end")

    @property
    def pass_ranks(self) -> int:
        """The number of ranks that compute a pass together."""
        return self.context_ranks * self.tensor_ranks

    @property
    def total_steps(self) -> int:
        """Learner steps of the whole run. Raises ConfigError: a start has not counted the steps of its epochs."""
        if self.epochs is not None:
            raise ConfigError(
                f"learner.epochs={self.epochs}: only `asyncrl train` counts the steps of epochs; set learner.steps for "
                "a role that you start by hand"
            )
        return DEFAULT_STEPS if self.steps is None else self.steps


@dataclass
class CriticConfig:
    """The value model, which some advantages need (`asyncrl algorithms`). All other settings are those of learner."""

    path: str | None = option(
        None,
        "Hugging Face folder or hub name of its backbone; null: model.path",
        fixed="the critic in the checkpoints began with it",
    )
    freeze: list[str] = option(
        [],
        "parameters of its backbone that are not trained, as in model.freeze; its head always is",
        fixed="the checkpoints hold moments of what it leaves to train",
    )
    lr: float = option(1e-5, "its learning rate, which learner.schedule scales", "(0, inf)")
    shared: bool = option(
        False,
        "a value head on the policy's own backbone instead of a model of its own: one pass gives both, and learner.lr "
        "holds for all",
        fixed="the checkpoints hold another model",
    )
    weight: float = option(0.5, "weight of its loss next to the policy's, for a shared backbone", "[0, inf)")
    warmup_steps: int = option(
        0, "first learner steps in which it is trained alone, and the policy stays as it is", "[0, inf)"
    )
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class ImplicitConfig:
    """The implicit reward model of algorithm=prime, trained on outcomes. All other settings are those of learner."""

    train: bool = option(
        False,
        "train it in the learner; otherwise algorithm=prime reads the scores of scoring.prm",
        fixed="the checkpoints hold this model, or do not",
    )
    path: str | None = option(
        None,
        "Hugging Face folder or hub name of its first weights; null: model.path",
        fixed="the model in the checkpoints began with it",
    )
    freeze: list[str] = option(
        [],
        "parameters of it that are not trained, as in model.freeze",
        fixed="the checkpoints hold moments of what it leaves to train",
    )
    lr: float = option(1e-6, "its learning rate, which learner.schedule scales", "(0, inf)")
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
        "demonstrations that each step trains with its episodes, by their mean negative log-likelihood: files as in "
        "data.train; null: none. `asyncrl sft` reads data.train instead",
        fixed="the place in the demonstrations counts the rows of these files",
    )
    weight: float = option(0.1, "weight of this loss next to the policy's", "[0, inf)")
    schedule: str = option(
        "constant",
        "how the weight falls from step 0 to 0 at step algorithm.sft.steps; at 0, demonstrations are no longer read",
        choices=("constant", "linear", "cosine"),
    )
    steps: int | None = option(
        None, "learner steps after which a falling weight is 0; null: all steps of the run", "[1, inf)"
    )
    share: float = option(
        0.25, "demonstrations that a step trains, as a share of learner.batch_size, rounded up", "(0, inf)"
    )
    tokens: int | None = option(
        None,
        "tokens of assistant turns that a step trains at least, in whole demonstrations; null: as share says",
        "[1, inf)",
    )
    max_tokens: int | None = option(
        None,
        "longest demonstration in tokens; null: actor.max_tokens. For `asyncrl sft` too",
        "[2, inf)",
        fixed="the place in the demonstrations counts those that are left",
    )
    overlong: str = option(
        "refuse",
        "what becomes of longer ones: the start refuses them, they are left out, or cut at their end; the last two are "
        "counted. For `asyncrl sft` too",
        choices=("refuse", "leave_out", "cut"),
        fixed="the place in the demonstrations counts those that are left",
    )


@dataclass
class DemonstrationConfig:
    """The training of the demonstrations of tasks (data.demonstration) as members of their groups."""

    weight: str = option(
        "none",
        "importance weight of a demonstration's tokens; none: all count alike; shaped: p / (p + gamma) of the "
        "probability p that the policy gives to the token, which teaches more where it is small",
        choices=("none", "shaped"),
    )
    gamma: float = option(0.1, "of the shaped weight", "(0, inf)")


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
        fixed="stored groups were sampled by it",
    )
    loss: PartConfig = option(PartConfig("ppo"), "loss of the policy")
    correction: list[PartConfig] = option(
        [PartConfig("truncate", {"level": "token", "cap": 2.0})],
        "importance corrections from the behaviour to the proximal policy, in this order",
    )
    proximal: str = option(
        "auto",
        "where the proximal log-probs come from; auto: recompute, unless the training pass gives the same "
        "ones in time or nothing reads them",
        choices=("auto", "recompute", "interpolate", "interpolate_linear", "behaviour"),
    )
    stream: list[PartConfig] = option([], "weight streams: further losses, and which sequences each of them trains")
    kl: PartConfig = option(PartConfig("none"), "KL to the reference policy")
    aggregation: PartConfig = option(PartConfig("token-mean"), "how the losses of tokens become one number")
    entropy_weight: float = option(0.0, "weight of the entropy bonus", "[0, inf)")
    balance_weight: float | None = option(
        0.0,
        "weight of the loss that balances the experts of a mixture, which takes a forward pass more (docs/models.md); "
        "null: router_aux_loss_coef of the model's configuration",
        "[0, inf)",
    )
    balance_bias_rate: float = option(
        0.0,
        "how far an update moves the bias of each expert that got more or fewer tokens than the mean of its layer, in "
        "families whose routers have such biases; 0: biases stay as they are",
        "[0, inf)",
    )
    value: PartConfig = option(PartConfig("clipped"), "loss of the critic")
    value_aggregation: PartConfig = option(PartConfig("token-mean"), "how the critic's losses become one number")
    sft: SftConfig = field(default_factory=SftConfig)
    demonstration: DemonstrationConfig = field(default_factory=DemonstrationConfig)
