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
    dir: str = option("runs", "folder that contains the folders of all runs; each of these has the name of its run")
    seed: int = option(
        0,
        "seed of all random choices",
        # The learner's seed of a step has 64 bits: these 32, and the number of the step.
        "[0, 4294967295]",
        fixed="recorded steps and the order of tasks follow from it",
    )


@dataclass
class ModelConfig:
    """The policy."""

    path: str = option(
        REQUIRED,
        "the policy and its tokenizer: a Hugging Face folder, a hub name, or the URL of a folder (s3://, gs://, "
        "hdfs://), which each host copies once (docs/models.md)",
        fixed="checkpoints and stored log-probs belong to this model",
    )
    revision: str | None = option(
        None,
        "branch, tag or commit of a model on the hub; null: the main branch",
        fixed="checkpoints and stored log-probs belong to this model",
    )
    tokenizer: str | None = option(
        None,
        "folder, hub name or URL of the policy's tokenizer; null: model.path",
        fixed="stored tokens are ids of this tokenizer",
    )
    chat_template: str | None = option(
        None,
        "chat template to use instead of the tokenizer's: Jinja text, or the path of a file on every host",
        fixed="stored prompts were rendered by it",
    )
    copies: str | None = option(None, "folder on each host for models copied from URLs; null: ~/.cache/asyncrl/models")
    dtype: str = option(
        "float32",
        "compute dtype of the learner and of the embedded engine; with float16, the learner scales the loss "
        "(docs/training.md)",
        choices=("float32", "bfloat16", "float16"),
        fixed="recorded steps and stored log-probs were computed in it",
    )
    attention: str = option(
        "auto",
        "attention implementation of the learner; auto: torch's kernels for packed sequences, or slower plain "
        "operations for models with soft-capped attention scores; sdpa: like auto, but refuses models with "
        "soft-capped scores or attention sinks; flash_attention_2, flex_attention: from transformers, only on GPUs",
        choices=("auto", "sdpa", "flash_attention_2", "flex_attention"),
        fixed="another implementation would round recorded steps differently",
    )
    activations: float | None = option(
        None,
        "share of the layers' activations that is kept for the backward pass; the rest is computed again. 0 needs the "
        "least memory, but takes a third more time than 1; null: on GPUs as much as fits into memory, on the CPU 1",
        "[0, 1]",
    )
    compile: bool | None = option(
        None,
        "compile the learner's layers at its start, which takes up to two minutes; null: only on GPUs, for models of "
        "300M parameters or more",
    )
    freeze: list[str] = option(
        [],
        "parameters of the policy that are not trained: verl_moe, moe_experts, moe_router, moe_all, vision, "
        "embeddings, or patterns of parameter names such as *.layers.0.* (docs/models.md)",
        fixed="the checkpoints hold optimizer moments of the trained parameters only",
    )
    override_config: dict[str, Any] = option(
        {},
        "overrides of fields of the model's Hugging Face configuration, such as "
        "model.override_config.rope_parameters.rope_theta=1000000; fields that change the shapes of weights are "
        "refused",
        fixed="recorded steps and stored log-probs were computed with them",
        secret="none",
    )
    trust_remote_code: bool = option(False, "run code that comes with the model")
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class ImagesConfig:
    """Images in messages, for policies that read images: PNG, JPEG or WebP files."""

    folders: list[str] = option(
        [],
        "messages may name image files only in these folders on each actor's host; empty: messages may name no files",
    )
    urls: bool = option(False, "fetch images that messages name by URL; only public addresses are allowed")
    max_mb: float = option(10.0, "largest image file, in MB", "(0, 32]")
    max_pixels: int = option(
        1 << 24, "maximum number of pixels in an image; a larger image is refused before it is decoded", "[1, inf)"
    )


@dataclass
class DataConfig:
    """The tasks, as rows in verl's layout."""

    train: list[str] = option(
        REQUIRED,
        "training tasks: a file (Parquet or JSON lines), a folder or a pattern of files, a folder of Hugging Face "
        "datasets, hf://datasets/OWNER/NAME, hub:OWNER/NAME?split=train, reasoning-gym:NAME?size=1000, or a list of "
        "these; see docs/data.md",
        fixed="stored groups refer to rows of these files",
    )
    eval: list[str] | None = option(
        None,
        "held-out tasks, given in the same forms as data.train",
        fixed="stored evaluations refer to rows of these files",
    )
    limit: int | None = option(
        None,
        "maximum number of training tasks; if data.train has more rows, evenly spaced rows of it are used; null: all "
        "rows",
        "[1, inf)",
        fixed="stored groups refer to tasks by their numbers, which depend on this limit",
    )
    eval_limit: int | None = option(
        None,
        "maximum number of held-out tasks, chosen from data.eval in the same way; null: all rows",
        "[1, inf)",
        fixed="stored evaluations refer to tasks by their numbers, which depend on this limit",
    )
    columns: dict[str, str] = option(
        {},
        "maps fields of a task to columns of the files, such as {prompt: question, ground_truth: answer}; the fields "
        "are prompt, ground_truth, data_source, tools, environment and images, and any other name is a field of "
        "extra_info; empty: the columns of verl's layout",
        fixed="stored groups belong to tasks that were read from these columns",
        secret="none",
    )
    system_prompt: str | None = option(
        None, "system message for tasks without one", fixed="all members of a group have the same prompt"
    )
    keep_in_memory: bool = option(
        True,
        "true: each role reads all rows into memory; false: before the roles start, all rows are copied into a file "
        "in the run's folder, from which roles read single rows",
    )
    dataset: str | None = option(
        None,
        "dotted path of a dataset class written for verl, which makes tasks from the files; null: each row is a task",
        fixed="stored groups refer to rows of this dataset",
    )
    dataset_params: dict[str, Any] = option(
        {},
        "keys that are added to the configuration of the dataset class",
        fixed="stored groups refer to rows of this dataset",
    )
    demonstration: str | None = option(
        None,
        "column of data.train that has a demonstration for each task; the demonstration is added to each group of its "
        "task as one more member (docs/sft.md); null: no demonstrations",
        fixed="stored groups contain the demonstrations",
    )
    max_prompt_length: int | None = option(
        None,
        "maximum number of tokens in a task's prompt, tools included; null: only actor.max_tokens limits the prompt",
        "[1, inf)",
        fixed="stored groups refer to tasks by their numbers, which depend on this length",
    )
    filter_overlong: bool = option(
        False,
        "leave out tasks whose prompt is longer than data.max_prompt_length; all prompts are measured before the roles "
        "start",
        fixed="stored groups refer to tasks by their numbers, which depend on the tasks left out",
    )
    truncation: str = option(
        "error",
        "what happens to a prompt that is longer than data.max_prompt_length, if data.filter_overlong is false; "
        "error: the run does not start; left: its first tokens are cut off; right: its last tokens are cut off; "
        "middle: only the first and the last max_prompt_length / 2 tokens are kept",
        choices=("error", "left", "right", "middle"),
        fixed="all members of a group have the same prompt",
    )
    shuffle: bool = option(
        True,
        "shuffle the tasks of every epoch, by run.seed",
        fixed="a resumed run continues at a position in this order",
    )
    weights: dict[str, float] = option(
        {},
        "data sources whose tasks are drawn, each with its relative probability, such as {gsm8k: 2, math: 1}; tasks "
        "of other sources are not drawn; empty: all rows are equally likely",
        "(0, inf)",
        fixed="a resumed run continues at a position in each of these sources",
    )
    band: list[float] = option(
        [],
        "[low, high]: skip tasks whose success rate (their mean outcome so far) is outside this range; empty: draw "
        "all tasks",
        "[0, 1]",
    )
    band_revisit: int = option(4, "number of epochs after which a task outside data.band is tried again", "[1, inf)")
    images: ImagesConfig = field(default_factory=ImagesConfig)

    @property
    def evaluates_training_tasks(self) -> bool:
        """True if the held-out tasks are exactly the training tasks."""
        return self.eval == self.train and self.eval_limit == self.limit


@dataclass
class ObserveConfig:
    """The sinks of metrics. Each role also writes JSON lines into the run's folder."""

    sinks: list[str] = option(
        ["console"],
        "destinations of metrics in addition to the JSON lines; console: one log line per step; every other sink "
        "needs the extra of its name, such as asyncrl[wandb]; wandb works offline without a key (docs/watching.md)",
        choices=("console", "wandb", "tensorboard", "trackio", "prometheus"),
    )
    project: str = option("asyncrl", "project at Weights & Biases and trackio")
    upload: list[str] = option(
        [],
        "files to send to sinks that can store files; episodes: the text of the kept episodes (observe.keep_episodes, "
        "observe.keep_evaluated); model: the exported model; the learner waits up to an hour for its upload",
        choices=("episodes", "model"),
    )
    prometheus_host: str = option(
        "127.0.0.1",
        "sink prometheus: address at which each role serves its metrics, on a free port; an address other than "
        "loopback needs network.insecure=true",
    )
    spans: bool = option(True, "record the start and the duration of each role's operations, for `asyncrl trace`")
    spans_mb: int = option(
        64, "megabytes of spans (recorded operations) that each role keeps; the oldest are deleted first", "[1, inf)"
    )
    keep_episodes: int = option(
        3,
        "number of groups of a learner step that are kept as text for reading: the group with the best episode, then "
        "the group with the worst, then random groups; 0: none",
        "[0, 64]",
    )
    keep_evaluated: int = option(
        8,
        "number of held-out episodes of an evaluation that are kept as text for reading; every evaluation keeps the "
        "same tasks; 0: none",
        "[0, 512]",
    )
    keep_episodes_mb: int = option(
        512,
        "megabytes that all kept episodes may take; an eighth of them is for held-out episodes. If there is no more "
        "room, the episodes of some steps are deleted, evenly over the run",
        "[1, inf)",
    )
    profile_steps: list[int] = option(
        [],
        "learner steps, counted from 0, of which each rank writes a Perfetto trace into runs/NAME/profile",
        "[0, inf)",
    )
    memory_steps: list[int] = option(
        [],
        "learner steps, counted from 0, of which each rank on a GPU writes a memory snapshot into runs/NAME/profile",
        "[0, inf)",
    )
