"""Who the run is, what it trains on, and where its processes are."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config.option import REQUIRED, option


@dataclass
class RunConfig:
    """The run's name and folder."""

    name: str = option(
        "train", "name of the run; a second run with the same name resumes it", fixed="another name is another run"
    )
    dir: str = option("runs", "folder that has a folder for each run, by its name")
    seed: int = option(
        0, "seed of everything that is random", fixed="recorded steps and the order of tasks follow from it"
    )


@dataclass
class ModelConfig:
    """The policy."""

    path: str = option(
        REQUIRED,
        "Hugging Face folder or hub name of the policy, with its tokenizer",
        fixed="checkpoints and stored log-probs are this model's",
    )
    dtype: str = option(
        "float32",
        "compute dtype of learner and embedded engine",
        choices=("float32", "bfloat16"),
        fixed="recorded steps and stored log-probs were computed in it",
    )
    attention: str = option(
        "sdpa",
        "implementation of attention in the learner",
        choices=("sdpa", "flash_attention_2", "flex_attention"),
        fixed="recorded steps would be rounded differently",
    )
    activations: float | None = option(
        None,
        "share of the layers' activations that the learner keeps for the backward pass, which computes the rest again: "
        "0 takes least memory and a third more time; null: on GPUs as much as fits, else 1",
        "[0, 1]",
    )
    compile: bool | None = option(None, "compile the learner's layers, which takes a minute at first; null: on GPUs")
    trust_remote_code: bool = option(False, "run code that comes with the model")


@dataclass
class DataConfig:
    """The tasks, as Parquet in verl's layout."""

    train: str = option(REQUIRED, "Parquet file of training tasks", fixed="stored groups name rows of this file")
    eval: str | None = option(None, "Parquet file of held-out tasks", fixed="stored evaluations name rows of this file")
    shuffle: bool = option(
        True, "shuffle every epoch by the run's seed", fixed="the place in the epoch is a place in this order"
    )
    weights: dict[str, float] = option(
        {},
        "relative chance of each data source; empty: all rows are drawn alike",
        "(0, inf)",
        fixed="the place in the epoch is kept for each of these sources",
    )
    band: list[float] = option([], "draw only tasks with a success rate in [low, high]; empty: draw all", "[0, 1]")
    band_revisit: int = option(4, "epochs after which a task outside the band is tried again", "[1, inf)")


@dataclass
class ClusterConfig:
    """How many processes of each role, and their threads."""

    actors: int = option(1, "actor processes", "[1, inf)")
    scorers: int = option(1, "scoring processes", "[1, inf)")
    learner_ranks: int = option(1, "ranks of the learner on each of its hosts", "[1, inf)")
    actor_threads: int = option(1, "torch threads of one actor", "[1, inf)")
    scorer_threads: int = option(1, "torch threads of one scorer", "[1, inf)")
    learner_threads: int = option(1, "torch threads of one learner rank", "[1, inf)")
    max_restarts: int = option(
        20, "failures of a role that do not end the run; 5 minutes without one reset the count", "[0, inf)"
    )
    restart_pause_s: float = option(
        60.0, "longest pause in seconds before a restart; the first is 0.25 s, and each doubles", "[0, inf)"
    )


@dataclass
class NetworkConfig:
    """Where the roles reach each other."""

    host: str = option("127.0.0.1", "address at which replay and learner listen, and to which the others connect")
    replay_port: int = option(5755, "port of the replay's first shard; 0: `asyncrl train` chooses", "[0, 65535]")
    weights_port: int = option(5756, "the learner's port for weights; 0: `asyncrl train` chooses", "[0, 65535]")
    keys: str | None = option(None, "folder of CURVE keys, made by `asyncrl keys`; see docs/security.md")
    insecure: bool = option(False, "allow addresses that other machines can reach, without keys")
    max_message_mb: int = option(
        256, "megabytes of the largest message part; a larger one closes its connection", "[1, 4095]"
    )


@dataclass
class ObserveConfig:
    """Where metrics go. Each role also writes JSON lines into the run's folder."""

    console: bool = option(True, "the learner logs one line a step")
    wandb: bool = option(False, "log to Weights & Biases (needs the extra asyncrl[wandb]; offline without a key)")
    wandb_project: str = option("asyncrl", "project at Weights & Biases")
    profile_steps: list[int] = option(
        [], "learner steps, from 0, of which each rank writes a trace for Perfetto into runs/NAME/profile", "[0, inf)"
    )
