"""The combinations of options of `data` that cannot work."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.schema import ActorConfig, DataConfig, ScoringConfig


def data_conflicts(data: DataConfig, actor: ActorConfig) -> Iterator[str]:
    for key, sources in (("data.train", data.train), ("data.eval", data.eval)):
        if sources == []:
            none = "; null means that there are none" if key == "data.eval" else ""
            yield f"{key}: name one or more files of tasks{none}"
    if data.eval_limit is not None and data.eval is None:
        yield "data.eval_limit data.eval: there are no held-out tasks; name some in data.eval, or set the limit to null"
    if data.dataset_params and data.dataset is None:
        yield "data.dataset_params data.dataset: the parameters need a class; name it in data.dataset"
    if data.dataset is not None and data.columns:
        yield "data.columns data.dataset: the class reads the files, so no columns are used; leave out one of the keys"
    if data.dataset is not None and not data.keep_in_memory:
        yield "data.keep_in_memory data.dataset: the class makes its tasks in memory; set the first to true"
    if wrong := sorted(set(data.columns) & {"reward_model", "extra_info"}):
        yield f"data.columns: instead of {', '.join(wrong)}, name ground_truth, or the fields of extra_info"
    yield from _prompts(data, actor)
    if len(data.band) not in (0, 2) or sorted(data.band) != list(data.band):
        yield "data.band: give the lowest and the highest success rate, such as [0.1,0.9]"


def group_demonstration_conflicts(
    data: DataConfig, actor: ActorConfig, scoring: ScoringConfig, trains_implicit: bool
) -> Iterator[str]:
    """The reasons why the training tasks cannot have demonstrations (data.demonstration)."""
    manager, key = scoring.manager, "data.demonstration"
    if data.demonstration is None:
        return
    if data.dataset is not None:
        yield f"{key} data.dataset: the class makes tasks without demonstrations; set one of the two to null"
    if agent := actor.played_by:
        yield (
            f"{key} {agent}: an agent makes its own prompts, and a demonstration has the task's prompt; set the first "
            "to null"
        )
    if actor.has_environments:
        yield (
            f"{key} actor.environment: an environment begins the episode, and a demonstration has no environment; set "
            "the first to null"
        )
    if actor.interactions:
        yield f"{key} actor.interactions: no user scores the turns of a demonstration; set the first to null"
    if scoring.shaping.environment_weight:
        yield (
            f"{key} scoring.shaping.environment_weight: tools do not run for a demonstration, so it gets no "
            "environment reward; set the first to null or the second to 0"
        )
    if any(map(manager.of, ("", *manager.sources))):
        theirs = "name" if manager.name is not None else "sources"
        yield f"{key} scoring.manager.{theirs}: a manager judges only episodes of the policy; set the first to null"
    if trains_implicit:
        yield f"{key} implicit.train: no test has trained this model on demonstrations; set the first to null"


def _prompts(data: DataConfig, actor: ActorConfig) -> Iterator[str]:
    if data.max_prompt_length is None:
        if data.filter_overlong or data.truncation != "error":
            key = "filter_overlong" if data.filter_overlong else "truncation"
            yield f"data.{key} data.max_prompt_length: there is no limit; set the second key, or leave out the first"
        return
    if (agent := actor.played_by) and not actor.has_verl_loops:
        yield f"data.max_prompt_length {agent}: an agent makes its own prompts; set the first to null"
    if data.max_prompt_length >= actor.max_tokens:
        yield "data.max_prompt_length actor.max_tokens: an answer needs room after the prompt; lower the first key"
    if data.truncation != "error" and actor.history == "template":
        yield "data.truncation actor.history: the template would render the whole prompt again; use sampled history"
