"""The schema of the whole configuration, read by every role: one frozen-by-habit dataclass a section.

Every field carries its meaning, from which docs/configuration.md is generated. Values are checked in `checks.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


def option(default: Any, meaning: str) -> Any:
    """A field with its meaning; mutable defaults are copied for each instance."""
    metadata = {"meaning": meaning}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class RunConfig:
    """Who this run is."""

    name: str = option("train", "the run's name; a second run with the same name resumes it")
    dir: str = option("runs", "folder under which every run has a folder of its name")
    seed: int = option(0, "seed of everything that is random")


@dataclass
class ModelConfig:
    """The policy."""

    path: str = option(MISSING, "Hugging Face folder or hub name of the policy, with its tokenizer")
    dtype: str = option("float32", "compute dtype of learner and embedded engine: float32 | bfloat16")
    attention: str = option("sdpa", "attention kernel of the learner: sdpa | flash_attention_2 | flex_attention")
    recompute: bool = option(False, "recompute activations in the backward pass, to save memory")
    trust_remote_code: bool = option(False, "run code that comes with the model")


@dataclass
class DataConfig:
    """The tasks, as Parquet in verl's layout."""

    train: str = option(MISSING, "Parquet file of training tasks")
    eval: str | None = option(None, "Parquet file of held-out tasks")
    shuffle: bool = option(True, "shuffle every epoch by the run's seed")
    weights: dict[str, float] = option({}, "chance of each data source in a draw; empty draws from all rows alike")
    band: list[float] = option([], "running success rates [low, high] of the tasks that are drawn; empty is any")
    band_revisit: int = option(4, "epochs after which a task outside the band is tried again")


@dataclass
class ActorConfig:
    """Episodes: how many at once, and their limits."""

    concurrency: int = option(64, "episodes that one actor runs at once")
    temperature: float = option(1.0, "sampling temperature of training episodes")
    episode_timeout_s: float = option(3600.0, "seconds after which an episode is given up and tried anew")
    max_turns: int = option(8, "assistant turns an episode may have")
    max_turn_tokens: int = option(512, "tokens that one assistant turn may have")
    max_tokens: int = option(4096, "tokens that a whole episode may have, prompt and tool results included")
    tools: list[str] = option(["calculator"], "tools on offer: built-in names or dotted paths of Tool classes")
    tool_timeout_s: float = option(10.0, "seconds that one tool call may take")
    tool_retries: int = option(2, "times that a failing tool is tried again before the episode fails")
    max_tool_chars: int = option(4096, "characters of a tool's result that the policy sees; the middle of more is cut")
    template_kwargs: dict[str, Any] = option({}, "what the chat template takes, such as {enable_thinking: false}")
    agent: str | None = option(None, "dotted path of an agent that plays the episodes instead (docs/sglang.md)")
    door_host: str = option("127.0.0.1", "address at which agents reach the policy")
    door_port: int = option(0, "port there; 0 takes a free one")
    step_split: str = option(
        "turn", "what a process-reward step is: turn | paragraph | line | the dotted path of a function"
    )


@dataclass
class ServerConfig:
    """The SGLang servers that an actor starts on its own machine where engine.launch is set."""

    count: int = option(1, "servers that an actor starts and supervises")
    port: int = option(0, "port of the first server, the others follow; 0 takes free ones")
    tp_size: int = option(1, "GPUs that one server is spread over")
    first_gpu: int = option(0, "GPU of the first server; the others follow")
    memory: float | None = option(None, "share of a GPU's memory for weights and cache; none lets SGLang choose")
    arguments: list[str] = option([], "further arguments of the server")
    environment: dict[str, str] = option({}, "environment variables of the server")
    start_s: float = option(900.0, "seconds that a server may take to start")
    max_failures: int = option(3, "starts in a row that may fail, once it has run, before the actor gives up")


@dataclass
class EngineConfig:
    """What samples tokens."""

    kind: str = option("embedded", "engine: embedded (in-process torch) | sglang | vllm (servers, see docs/sglang.md)")
    slots: int = option(64, "requests that the embedded engine decodes at once")
    max_length: int = option(4096, "tokens that one slot of the embedded engine holds")
    urls: list[str] = option([], "urls of servers; each belongs to one actor")
    urls_file: str | None = option(None, "file with one url a line, read again and again: servers may come and go")
    router: str | None = option(None, "url of an SGLang router that names the servers")
    prefix_cache: str = option("flush", "prefixes of older versions: flush | salt (kept apart by version)")
    sampling: dict[str, Any] = option({}, "sampling options besides temperature; those that bend log-probs are refused")
    attempts: int = option(4, "server faults in a row after which a turn fails")
    wait_s: float = option(600.0, "seconds that a turn waits for a server")
    check_s: float = option(5.0, "seconds between two looks at a server, and for servers")
    silence_s: float = option(60.0, "seconds without an answer after which a server counts as lost")
    launch: bool = option(False, "start SGLang servers on this machine, as engine.server says, and supervise them")
    python: str = option("python3", "Python that has sglang, whose pins differ from ours; for engine.launch")
    server: ServerConfig = field(default_factory=ServerConfig)


@dataclass
class WeightsConfig:
    """How new weights travel from the learner to the engines (docs/weights.md), and how they get into servers."""

    channel: str = option("zmq", "how they travel: zmq (pull) | disk (shared folder) | distributed (gloo or NCCL)")
    fallback: str = option("none", "channel of engines that the first does not reach: none | zmq | disk")
    history: int = option(4, "deltas kept for engines that are behind, zmq only; 0 sends whole versions only")
    timeout_s: float = option(30.0, "seconds that learner and engine wait for a silent other side")
    dir: str | None = option(None, "folder of the disk channel; none is pushed/ in the run's folder")
    bucket_mb: int = option(64, "megabytes of weights that are gathered, broadcast, or put into a server at a time")
    mode: str = option("retract", "requests under way at an update of servers: in_place | retract | abort | drain")
    drain_s: float = option(60.0, "seconds after which a drain becomes an abort")
    transports: list[str] = option(["tensor"], "ways into a server, the first that it takes: tensor | disk")
    load_s: float = option(300.0, "seconds that one call of an update may take before the server counts as lost")


@dataclass
class FilterConfig:
    """Complete groups that are not worth training; each is counted by its reason and replaced."""

    zero_variance: bool = option(False, "refuse groups whose rewards are all the same")
    min_reward: float | None = option(None, "refuse groups with a lower mean reward")
    max_reward: float | None = option(None, "refuse groups with a higher mean reward")
    max_tokens: int | None = option(None, "refuse groups with a longer member")


@dataclass
class SamplerConfig:
    """Which of the complete groups make the next batch."""

    kind: str = option("fifo", "order: fifo | freshest | prioritised")
    alpha: float = option(0.6, "prioritised: P(group) is proportional to (spread of its rewards)^alpha")
    beta: float = option(0.4, "prioritised: exponent of the importance weights; 1 corrects in full")
    max_times_sampled: int = option(1, "batches that one group may be in")


@dataclass
class ReplayConfig:
    """The queue between generation and training."""

    max_lag: int = option(2, "versions that a trained token may be older than the learner; 0 is synchronous")
    durability: str = option("fsync", "what an acknowledgement survives: fsync (power loss) | os (a killed process)")
    lease_s: float = option(30.0, "seconds after which a silent actor's or scorer's work is given to another")
    max_attempts: int = option(3, "times that an episode or its scoring is tried before its group is dropped")
    max_store_gb: float = option(64.0, "largest size of one shard's store on disk; above 0.8 of it tickets stop")
    retention: str = option("none", "trajectories kept after a checkpoint covers them: none | window | all")
    retention_steps: int = option(100, "learner steps that retention=window keeps")
    reissue_evicted: bool = option(False, "run the task of an evicted group again")
    oversample: float = option(1.0, "episodes started for one that is trained, so that filtered batches fill at once")
    filter: FilterConfig = field(default_factory=FilterConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    shards: int = option(1, "replay processes; each has its own part of tasks, groups and batches")
    shard: int = option(0, "which of them `asyncrl replay` serves; `asyncrl train` sets it")
    source: str | None = option(None, "store of a finished run: the learner trains its plans again, without actors")


@dataclass
class ShapingConfig:
    """How scores become the reward that baselines compare, and the step scores that algorithms read.

    docs/scoring.md says in which order; `scoring=NAME` chooses a preset.
    """

    outcome_weight: float = option(1.0, "weight of the rules' weighted sum in the reward")
    outcome_model_weight: float = option(1.0, "weight of the outcome model's score in the reward")
    process_weight: float = option(0.0, "weight of the aggregated step scores in the reward")
    environment_weight: float = option(0.0, "weight of the sum of the tools' own rewards in the reward")
    prm_apply_sigmoid: bool = option(False, "a step's score is the sigmoid of its logit, not the model's probability")
    use_logit_tanh: bool = option(False, "a step's score is tanh_rmax * tanh(logit / tanh_tau); before the sigmoid")
    tanh_tau: float = option(2.0, "logit at which tanh bends; with 2 and tanh_rmax 1 it is 2 * sigmoid - 1")
    tanh_rmax: float = option(1.0, "largest score that tanh gives")
    prm_aggregation: str = option(
        "mean_response",
        "step scores to one number: mean_response | pooled_last | min | product | per_step (none: the algorithm reads "
        "the steps) | best_of_n (mean_response; needs the part best_of_n in algorithm.reward)",
    )
    step_transforms: list[str] = option([], "what algorithms read of a step score r_k, in order: clip | delta")
    clip_eta: float = option(0.5, "clip makes it min(r_k - clip_eta, 0); delta makes it r_k - r_{k+1}")
    enable_anti_hack: bool = option(True, "turns on the five keys below, and leaves out repeated steps")
    stop_at_answer: bool = option(True, "steps behind the first final answer are not scored")
    answer_pattern: str = option(
        r"####|\\boxed|(?i:\banswer\s*(?:is|:|=))", "regular expression that a step with a final answer matches"
    )
    incorrect_answer_penalty: float = option(0.0, "added to the reward of a wrong answer; a negative number")
    max_step_tokens: int = option(512, "policy tokens over which a step earns nothing")
    max_resp_len: int = option(1024, "policy tokens over which an episode earns no process score")
    prm_acc_bonus_weight: float = option(0.0, "added to the reward of a right answer")
    length_bonus_weight: float = option(0.0, "the most that a right answer of the right length gets on top")
    target_response_length: int = option(400, "policy tokens of the right length; 0 or twice as many get no bonus")
    overlong_penalty: float = option(0.0, "taken from the reward at overlong_max_length policy tokens or more")
    overlong_max_length: int = option(0, "policy tokens at which the whole penalty is due")
    overlong_buffer: int = option(512, "policy tokens before that at which it begins, growing linearly")


@dataclass
class ScoringModelConfig:
    """A process reward model: docs/scoring.md says what each family expects."""

    family: str = option("value_head", "how it reads and scores: a built-in family, or the dotted path of a class")
    path: str | None = option(None, "local folder or hub name of the model, the URL of a remote one, or none")
    dtype: str = option("float32", "compute dtype: float32 | bfloat16 | float16")
    device: str = option("cpu", "where it runs: cpu | cuda | cuda:N | auto (a GPU where there is one)")
    micro_tokens: int = option(16384, "tokens of one forward pass, padding included")
    long_inputs: str = option("refuse", "inputs that are too long: refuse | drop_oldest (tool results, never steps)")
    trust_remote_code: bool = option(False, "run code that comes with the model")
    params: dict[str, Any] = option({}, "what this family alone takes, where it differs from its defaults")


@dataclass
class OutcomeModelConfig(ScoringModelConfig):
    """A model that scores whole episodes: docs/scoring.md says what each family expects."""

    family: str = option("sequence_classifier", "how it reads and scores: a built-in family, or a class's dotted path")


@dataclass
class GuardConfig:
    """When a scorer warns that rewards rise while its process model and the outcomes disagree more and more."""

    window_s: float = option(900.0, "seconds over which both trends are taken")
    reward_rise: float = option(0.05, "rise of the mean reward over the window")
    agreement_fall: float = option(0.05, "fall of the agreement over the window")


@dataclass
class ScoringConfig:
    """The pool of scorers."""

    rule: str = option("exact_number", "verifier: a built-in name, or the dotted path of a function or verl manager")
    rules: dict[str, Any] = option(
        {}, "verifier by data source, where it differs from `rule`: a name, or a list of {name, weight, params}"
    )
    rule_processes: int = option(1, "processes in which the rules of one scorer run at once")
    rule_memory_mb: int = option(4096, "memory that a verification may take")
    timeout_s: float = option(10.0, "seconds that one verification may take")
    needs: dict[str, list[str]] = option({}, "kinds (rules, outcome_model, prm) by data source; else all configured")
    serve: list[str] = option([], "kinds that a scoring process does; empty is all configured")
    batch_trajectories: int = option(32, "trajectories that one lease holds at most")
    batch_tokens: int = option(65536, "tokens that one lease holds at most")
    stall_s: float = option(600.0, "seconds without any result after which a scorer counts as hung and ends")
    shadow: bool = option(False, "record what the models say, and train without it")
    prm: ScoringModelConfig = field(default_factory=ScoringModelConfig)
    outcome_model: OutcomeModelConfig = field(default_factory=OutcomeModelConfig)
    shaping: ShapingConfig = field(default_factory=ShapingConfig)
    guards: GuardConfig = field(default_factory=GuardConfig)


@dataclass
class LearnerConfig:
    """Training."""

    steps: int = option(100, "learner steps of the whole run")
    batch_size: int = option(64, "trajectories a step; a multiple of group_size")
    group_size: int = option(8, "trajectories of one task that are baselined together")
    minibatches: int = option(1, "optimiser updates a step; each takes an equal share of the batch")
    micro_tokens: int = option(16384, "packed tokens of one forward and backward pass on one rank")
    lr: float = option(1e-6, "learning rate of AdamW")
    betas: list[float] = option([0.9, 0.99], "AdamW's betas")
    weight_decay: float = option(0.0, "AdamW's weight decay")
    warmup_steps: int = option(0, "steps of linear warm-up")
    max_grad_norm: float = option(1.0, "gradient norm above which gradients are scaled down")
    publish_every: int = option(1, "steps between two weight publishes")
    checkpoint_every: int = option(20, "steps between two checkpoints")
    keep_checkpoints: int = option(2, "checkpoints that are kept")
    eval_every: int = option(0, "steps between two evaluations on data.eval, the first at step 0; 0 is never")
    export: bool = option(True, "write a Hugging Face folder at the end")


@dataclass
class CriticConfig:
    """The value model, which some advantages need (see `asyncrl algorithms`). It shares learner.* but for this."""

    path: str | None = option(None, "Hugging Face folder or hub name of its backbone; none is model.path")
    lr: float = option(1e-5, "learning rate of its AdamW")


@dataclass
class ImplicitConfig:
    """The implicit process model of algorithm=prime, trained on outcomes beside the policy. It shares learner.*."""

    train: bool = option(False, "train it in the learner; else algorithm=prime reads the step scores of scoring.prm")
    path: str | None = option(None, "Hugging Face folder or hub name of its first weights; none is model.path")
    lr: float = option(1e-6, "learning rate of its AdamW")


@dataclass
class Choice:
    """An algorithm's part: its name and the parameters that differ from its defaults."""

    name: str = option(MISSING, "name in `asyncrl algorithms`")
    params: dict[str, Any] = option({}, "parameters that differ from the defaults")


@dataclass
class AlgorithmConfig:
    """The composition of the algorithm: see `asyncrl algorithms`."""

    reward: list[Choice] = option([], "changes of the reward before advantages, applied in order")
    advantage: Choice = field(default_factory=lambda: Choice("grpo"))
    greedy_sibling: bool = option(False, "sample one member of every group greedily, as a baseline (advantage remax)")
    loss: Choice = field(default_factory=lambda: Choice("ppo"))
    correction: list[Choice] = field(
        default_factory=lambda: [Choice("truncate", {"level": "token", "cap": 2.0})],
        metadata={"meaning": "importance corrections of behaviour to proximal, applied in order; empty is none"},
    )
    proximal: str = option("recompute", "proximal log-probs: recompute | interpolate | behaviour")
    kl: Choice = field(default_factory=lambda: Choice("none"))
    aggregation: Choice = field(default_factory=lambda: Choice("token-mean"))
    entropy_weight: float = option(0.0, "weight of the entropy bonus")
    value: Choice = field(default_factory=lambda: Choice("clipped"))


@dataclass
class ClusterConfig:
    """How many processes of each role, and their threads."""

    actors: int = option(1, "actor processes")
    scorers: int = option(1, "scoring processes")
    learner_ranks: int = option(1, "ranks of the learner")
    actor_threads: int = option(1, "torch threads of one actor")
    scorer_threads: int = option(1, "torch threads of one scorer")
    learner_threads: int = option(1, "torch threads of one learner rank")
    max_restarts: int = option(20, "times that the supervisor restarts one role before it gives up")


@dataclass
class NetworkConfig:
    """Where the roles meet."""

    host: str = option("127.0.0.1", "address that replay and publisher bind, and that others connect to")
    replay_port: int = option(5755, "port of the replay, its shards on those that follow; 0 chooses free ones")
    weights_port: int = option(5756, "port of the weight publisher; 0 lets `asyncrl train` choose one")
    keys: str | None = option(None, "folder of CURVE keys, made by `asyncrl keys`; see docs/security.md")
    insecure: bool = option(False, "allow an address that others can reach without keys, open to everyone there")
    max_message_mb: int = option(256, "largest frame of a message that is taken; more ends its sender's connection")


@dataclass
class ObserveConfig:
    """Where metrics go; each role always writes JSON lines under the run's folder."""

    console: bool = option(True, "log one line a step")
    wandb: bool = option(False, "log to Weights & Biases (needs the extra asyncrl[wandb]; offline without a key)")
    wandb_project: str = option("asyncrl", "project name there")


@dataclass
class TrainConfig:
    """Everything."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    implicit: ImplicitConfig = field(default_factory=ImplicitConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
