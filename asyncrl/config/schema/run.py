"""The identity of the run, its model and data, and its metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from asyncrl.config.option import REQUIRED, option
from asyncrl.config.schema.lora import LoraConfig


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
        "Hugging Face folder or hub name of the policy, with its tokenizer; or a URL of such a folder, as s3://, gs:// "
        "or hdfs://, which each host copies once (docs/models.md)",
        fixed="checkpoints and stored log-probs are this model's",
    )
    revision: str | None = option(
        None,
        "branch, tag or commit of a model on the hub; null: its main branch",
        fixed="checkpoints and stored log-probs are this model's",
    )
    tokenizer: str | None = option(
        None,
        "folder, hub name or URL of the policy's tokenizer; null: model.path",
        fixed="stored tokens are its ids",
    )
    chat_template: str | None = option(
        None,
        "Jinja template of conversations, or the file of one on every host, in place of the tokenizer's own",
        fixed="stored prompts were rendered by it",
    )
    copies: str | None = option(
        None, "folder on each host for copies of models that are given by a URL; null: ~/.cache/asyncrl/models"
    )
    dtype: str = option(
        "float32",
        "compute dtype of learner and embedded engine; float16: with loss scaling (docs/training.md)",
        choices=("float32", "bfloat16", "float16"),
        fixed="recorded steps and stored log-probs were computed in it",
    )
    attention: str = option(
        "auto",
        "implementation of attention in the learner; auto: torch's kernels for packed sequences, and plain operations, "
        "which are slower, for scores with a cap; sdpa: the same, but models with caps or attention sinks are refused; "
        "the others, of transformers, need a GPU",
        choices=("auto", "sdpa", "flash_attention_2", "flex_attention"),
        fixed="recorded steps would be rounded differently",
    )
    activations: float | None = option(
        None,
        "share of the layers' activations that the learner keeps for the backward pass, which computes the rest again: "
        "0 takes least memory and a third more time; null: on GPUs as much as fits, else 1",
        "[0, 1]",
    )
    compile: bool | None = option(
        None, "compile the learner's layers before the first batch, which takes up to some minutes; null: on GPUs"
    )
    freeze: list[str] = option(
        [],
        "parameters of the policy that are not trained: verl_moe, moe_experts, moe_router, moe_all, vision, "
        "embeddings, a pattern of names such as *.layers.0.*, or a list of these (docs/models.md)",
        fixed="the checkpoints hold moments of what it leaves to train",
    )
    override_config: dict[str, Any] = option(
        {},
        "fields of its Hugging Face configuration that have other values than in its files, nested by dots, such as "
        "model.override_config.rope_parameters.rope_theta=1000000; those that change the shapes of weights are refused",
        fixed="recorded steps and stored log-probs were computed with them",
        secret="none",
    )
    trust_remote_code: bool = option(False, "run code that comes with the model")
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class ImagesConfig:
    """The images of a policy that reads them. Each is one file: PNG, JPEG or WebP."""

    folders: list[str] = option([], "folders of each actor's host whose files messages may name as images; empty: none")
    urls: bool = option(False, "fetch images that messages name by URL, from public addresses alone")
    max_mb: float = option(10.0, "largest file of an image, in MB", "(0, 32]")
    max_pixels: int = option(1 << 24, "most pixels of an image: larger ones are refused unread", "[1, inf)")


@dataclass
class DataConfig:
    """The tasks, as rows in verl's layout."""

    train: list[str] = option(
        REQUIRED,
        "training tasks: a file (Parquet or JSON lines), a folder or a pattern of files, a folder of Hugging Face "
        "datasets, hf://datasets/OWNER/NAME, hub:OWNER/NAME?split=train, reasoning-gym:NAME?size=1000, or a list of "
        "these; see docs/data.md",
        fixed="stored groups name rows of these files",
    )
    eval: list[str] | None = option(
        None, "held-out tasks, named in the same ways", fixed="stored evaluations name rows of these files"
    )
    columns: dict[str, str] = option(
        {},
        "which column of the files has prompt, ground_truth, data_source, tools, environment or, by any other name, a "
        "field of extra_info, such as {prompt: question, ground_truth: answer}; empty: those of verl's layout",
        fixed="stored groups name rows with these values",
        secret="none",
    )
    system_prompt: str | None = option(
        None, "system message of tasks that have none", fixed="all members of a group have the same prompt"
    )
    keep_in_memory: bool = option(
        True,
        "whether roles read all rows into memory; false: the start copies them into a file in the run's folder, from "
        "which single rows are read",
    )
    dataset: str | None = option(
        None,
        "dotted path of a dataset class, as verl takes it, that makes tasks of the files; null: their rows",
        fixed="stored groups name rows of this dataset",
    )
    dataset_params: dict[str, Any] = option(
        {},
        "further keys of the configuration that the dataset class gets",
        fixed="stored groups name rows of this dataset",
    )
    demonstration: str | None = option(
        None,
        "column of data.train with a task's demonstration, which becomes one more member of each of its groups; null: "
        "none; see docs/sft.md",
        fixed="stored groups have these members",
    )
    max_prompt_length: int | None = option(
        None,
        "most tokens of a task's prompt, tools included; null: only actor.max_tokens limits it",
        "[1, inf)",
        fixed="stored groups name the tasks that are left",
    )
    filter_overlong: bool = option(
        False,
        "leave out tasks whose prompt is longer, which the start measures",
        fixed="stored groups name the tasks that are left",
    )
    truncation: str = option(
        "error",
        "what becomes of a longer prompt that is not left out; error: the start refuses it; left, right: its first or "
        "last tokens go; middle: those between its first and its last half go",
        choices=("error", "left", "right", "middle"),
        fixed="all members of a group have the same prompt",
    )
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
    images: ImagesConfig = field(default_factory=ImagesConfig)


@dataclass
class ObserveConfig:
    """The sinks of metrics. Each role also writes JSON lines into the run's folder."""

    sinks: list[str] = option(
        ["console"],
        "where metrics go in addition to the JSON lines; console: one log line a step; the others need extras of their "
        "names, such as asyncrl[wandb]; wandb: offline without a key; docs/watching.md has each",
        choices=("console", "wandb", "tensorboard", "trackio", "prometheus"),
    )
    project: str = option("asyncrl", "project at Weights & Biases and trackio")
    upload: list[str] = option(
        [],
        "what else the sinks get that can keep it; episodes: the text of the kept episodes (observe.keep_episodes); "
        "model: the exported model, for whose upload the end of the learner waits up to an hour",
        choices=("episodes", "model"),
    )
    prometheus_host: str = option(
        "127.0.0.1",
        "address of this machine at which each role shows its metrics to Prometheus, on a free port, where "
        "observe.sinks has prometheus; others than loopback need network.insecure=true",
    )
    spans: bool = option(True, "each role records what it does when, for `asyncrl trace`")
    spans_mb: int = option(64, "most megabytes of spans that each role keeps; the oldest ones go first", "[1, inf)")
    keep_episodes: int = option(
        3,
        "groups of each learner step that are kept with their text for people to read, the one with the best episode "
        "first, then the one with the worst, then random ones; 0: none",
        "[0, 64]",
    )
    keep_evaluated: int = option(
        8,
        "held-out episodes of each evaluation that are kept with their text for people to read, of the same tasks each "
        "time; 0: none",
        "[0, 512]",
    )
    keep_episodes_mb: int = option(
        512,
        "megabytes of kept episodes, an eighth of it for those of evaluations; beyond it, steps are given up evenly "
        "over the run",
        "[1, inf)",
    )
    profile_steps: list[int] = option(
        [], "learner steps, from 0, of which each rank writes a trace for Perfetto into runs/NAME/profile", "[0, inf)"
    )
    memory_steps: list[int] = option(
        [],
        "learner steps, from 0, of which each rank on a GPU writes a snapshot of its memory into runs/NAME/profile",
        "[0, inf)",
    )
