"""The pool of scorers, its models, and how their scores become rewards.

The replay and the scorers both use `needs` to find the kinds of scoring of a trajectory, so that they agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.config.option import option

GROUP_KIND = "manager"
"""The kind of scoring that scores whole groups. This kind comes last: otherwise a member could fail after its group was
scored."""
KINDS = ("rules", "steps", "outcome_model", "prm", GROUP_KIND)
"""The kinds of scoring, in the order in which a trajectory passes through them."""


@dataclass
class ShapingConfig:
    """The shaping of scores: how the scores of an episode become its reward and the step scores that algorithms read.

    docs/scoring.md has the order in which the settings apply; `scoring=NAME` chooses a preset.
    """

    outcome_weight: float = option(
        1.0, "weight of the rules' weighted sum, or of a manager's reward, in the reward of an episode", "[0, inf)"
    )
    outcome_model_weight: float = option(1.0, "weight of the outcome model's score in the reward", "[0, inf)")
    process_weight: float = option(0.0, "weight of the aggregated step scores in the reward", "[0, inf)")
    environment_weight: float = option(
        0.0,
        "weight of the environment score in the reward; this score is the sum of the tools' rewards, plus one number "
        "for the rewards of turns (turn_scores)",
    )
    turn_scores: str = option(
        "sum",
        "how the rewards of an episode's turns become one number; a simulated user, an environment or an agent gives "
        "these rewards",
        choices=("sum", "last", "mean", "max"),
    )
    prm_apply_sigmoid: bool = option(
        False,
        "use the sigmoid of the model's logit as a step's score, instead of the model's probability; for the built-in "
        "families both are the same",
    )
    use_logit_tanh: bool = option(
        False, "use tanh_rmax * tanh(logit / tanh_tau) as a step's score, instead of the model's probability"
    )
    use_raw_logit: bool = option(
        False, "use the model's logit, which has no bounds, as a step's score, instead of the model's probability"
    )
    tanh_tau: float = option(2.0, "with use_logit_tanh: number by which the logit is divided", "(0, inf)")
    tanh_rmax: float = option(1.0, "with use_logit_tanh: largest score of a step", "(0, inf)")
    prm_aggregation: str = option(
        "mean_response",
        "how step scores become one number (docs/scoring.md); per_step: no number is made, and the algorithm reads "
        "the score of each step",
        choices=("mean_response", "pooled_last", "min", "product", "per_step", "best_of_n"),
    )
    step_transforms: list[str] = option(
        [],
        "transformations of the step scores r_k, in this order; clip: min(r_k - clip_eta, 0); delta: r_k - r_{k+1}",
        choices=("clip", "delta"),
    )
    clip_eta: float = option(0.5, "number that the transformation clip subtracts from a step score")
    enable_anti_hack: bool = option(
        True,
        "leave out repeated steps, and apply the next five options (stop_at_answer to max_resp_len); false: do neither",
    )
    stop_at_answer: bool = option(
        True,
        "a step after the first final answer counts only if it lowers the aggregated score, or if its own score is a "
        "penalty. A score is a penalty if it is below 0, or below clip_eta if step_transforms has clip",
    )
    answer_pattern: str = option(r"####|\\boxed|(?i:\banswer\s*(?:is|:|=))", "regular expression of a final answer")
    incorrect_answer_penalty: float = option(0.0, "number that is added to the reward of a wrong answer", "(-inf, 0]")
    max_step_tokens: int = option(
        512, "in a step with more policy tokens than this, a score above 0 becomes 0", "[1, inf)"
    )
    max_resp_len: int = option(
        1024, "in an episode with more policy tokens than this, step scores above 0 become 0", "[1, inf)"
    )
    prm_acc_bonus_weight: float = option(0.0, "number that is added to the reward of a right answer", "[0, inf)")
    length_bonus_weight: float = option(0.0, "largest bonus that a right answer gets for its length", "[0, inf)")
    target_response_length: int = option(
        400,
        "number of policy tokens at which the bonus is largest; the bonus is 0 at twice this number or more",
        "[1, inf)",
    )
    overlong_penalty: float = option(
        0.0,
        "full penalty: the number that is subtracted from the reward of an episode with overlong_max_length or more "
        "policy tokens",
        "[0, inf)",
    )
    overlong_max_length: int = option(0, "number of policy tokens from which on the full penalty applies", "[0, inf)")
    overlong_buffer: int = option(
        512,
        "over this many policy tokens before overlong_max_length, the penalty grows linearly from 0",
        "[1, inf)",
    )


@dataclass
class ScoringModelConfig:
    """A process reward model; docs/scoring.md lists the families."""

    family: str = option(
        "value_head",
        "kind of model, which decides the format of its input and scores: a built-in family, or the dotted path of a "
        "class",
    )
    path: str | None = option(
        None,
        "folder or hub name of the model, or the URL of a server that runs it; null: no model, unless family is a "
        "class",
    )
    tokenizer: str | None = option(
        None, "folder or hub name of the model's own tokenizer; null: the one in the model's folder"
    )
    dtype: str = option("float32", "compute dtype", choices=("float32", "bfloat16", "float16"))
    device: str = option("cpu", "device of the model: cpu, cuda, cuda:N, or auto (a GPU if there is one)")
    gpus: int = option(
        1,
        "number of GPUs over which one scorer spreads the model's layers (needs the extra asyncrl[spread])",
        "[1, inf)",
    )
    micro_tokens: int = option(16384, "maximum number of tokens in one forward pass, padding included", "[1, inf)")
    micro_inputs: int | None = option(None, "maximum number of inputs in one forward pass; null: no limit", "[1, inf)")
    long_inputs: str = option(
        "refuse",
        "what happens to inputs that are too long for the model; refuse: they are refused; drop_oldest: their oldest "
        "tool results are left out",
        choices=("refuse", "drop_oldest"),
    )
    trust_remote_code: bool = option(False, "run code that comes with the model")
    params: dict[str, Any] = option({}, "parameters of the family, in place of its defaults")

    @property
    def is_configured(self) -> bool:
        """True if a model is configured. A user's own class needs no `path`."""
        return self.path is not None or "." in self.family


@dataclass
class OutcomeModelConfig(ScoringModelConfig):
    """A model that scores whole episodes; docs/scoring.md lists the families."""

    family: str = option(
        "sequence_classifier",
        "kind of model, which decides the format of its input and scores: a built-in family, or the dotted path of a "
        "class",
    )


_WAITS = "it decided whether stored episodes wait for a manager or for rules"


@dataclass
class ManagerConfig:
    """A reward manager written for verl, which judges whole groups (docs/scoring.md)."""

    name: str | None = option(
        None,
        "naive, batch, dapo or another name in docs/verl.md, or the path of a class (module.Class or FILE.py:Class); "
        "null: no manager",
        fixed=_WAITS,
    )
    compute_score: str | None = option(
        None,
        "path of the function by which the manager scores an answer (module.function or FILE.py:function); null: the "
        "manager's default",
    )
    compute_score_params: dict[str, Any] = option({}, "further parameters of the function")
    num_examine: int = option(
        0, "number of samples of each data source that the manager prints in training", "[0, inf)"
    )
    val_num_examine: int = option(
        1, "number of samples of each data source that the manager prints in an evaluation", "[0, inf)"
    )
    params: dict[str, Any] = option({}, "further parameters of the manager's constructor")
    sources: dict[str, Any] = option(
        {},
        "settings of single data sources, in place of the keys above, as {SOURCE: {name, compute_score, "
        "compute_score_params, num_examine, val_num_examine, params}}; {SOURCE: null}: the source has no manager",
        fixed=_WAITS,
    )
    batch_groups: int = option(1, "maximum number of groups in one call of the manager", "[1, inf)")
    timeout_s: float = option(300.0, "seconds that one call of the manager may take", "(0, inf)")

    def of(self, source: str) -> Mapping[str, Any] | None:
        """Return the settings of the manager of the data source `source`, by the names in MANAGER_KEYS. Return None if
        the source has no manager."""
        own = {name: getattr(self, name) for name in MANAGER_KEYS}
        changes = self.sources.get(source, {})
        settings = own | dict(changes) if isinstance(changes, Mapping) else {}
        return settings if settings.get("name") else None


MANAGER_KEYS = ("name", "compute_score", "compute_score_params", "num_examine", "val_num_examine", "params")
"""The settings of the manager that a data source can override."""


@dataclass
class GuardConfig:
    """The alarm on reward hacking. It is raised if rewards rise, outcomes do not, and the process reward model agrees
    less and less with the outcomes. It does not watch the step scores of the function scoring.steps."""

    window_s: float = option(900.0, "length of the window over which changes are measured, in seconds", "(0, inf)")
    reward_rise: float = option(
        0.05,
        "the alarm is raised only if, within the window, the mean reward rises by at least this number, and the mean "
        "outcome by less than this number",
        "(0, inf)",
    )
    agreement_fall: float = option(
        0.05,
        "the alarm is raised only if, within the window, the share of episodes in which step scores and outcomes "
        "agree falls by at least this number",
        "(0, inf)",
    )


@dataclass
class ScoringConfig:
    """The pool of scorers."""

    rule: Any = option(
        "exact_number",
        "verifier: a built-in name, the path of a function or verl manager (module.function or FILE.py:function), or a "
        "list of {name, weight, params}; null: no verifier, so that models, a manager or scoring.steps give all scores",
    )
    rules: dict[str, Any] = option({}, "verifiers by data source, in the same forms as scoring.rule")
    strip_thoughts: bool = option(
        True,
        "give rules only the text after the last closed thought, such as <think>...</think>, or an empty text if a "
        "thought is not closed",
    )
    steps: str | None = option(
        None,
        "dotted path of a function that gives each step of an episode a number, its step score (docs/scoring.md); "
        "null: no function",
    )
    rule_processes: int = option(
        1,
        "number of processes in which one scorer runs rules; as many further processes run the function "
        "scoring.steps, if it is set",
        "[1, inf)",
    )
    rule_memory_mb: int = option(
        4096, "megabytes that one verification, or one call of scoring.steps, may take", "[1, inf)"
    )
    timeout_s: float = option(10.0, "seconds that one verification or call of scoring.steps may take", "(0, inf)")
    needs: dict[str, list[str]] = option(
        {},
        "kinds of scoring by data source; a source that is not listed gets all configured kinds, except that a "
        "manager replaces the rules",
        choices=KINDS,
        fixed="stored episodes wait for the kinds of scores that this key named",
    )
    serve: list[str] = option(
        [], "kinds of scoring that a scoring process performs; empty: all configured kinds", choices=KINDS
    )
    batch_trajectories: int = option(32, "maximum number of trajectories that a scorer gets at once", "[1, inf)")
    batch_tokens: int = option(
        65536, "maximum number of tokens in the trajectories that a scorer gets at once", "[1, inf)"
    )
    stall_s: float = option(
        600.0,
        "a scorer that has got no result and no answer of a model for this many seconds counts as hung, and exits",
        "(0, inf)",
    )
    eval_samples: int = option(
        1,
        "number of episodes of each data source that a scorer logs, with their scores, in each evaluation",
        "[0, inf)",
    )
    shadow: bool = option(False, "record the scores of the models and of scoring.steps, but train without them")
    prm: ScoringModelConfig = field(default_factory=ScoringModelConfig)
    outcome_model: OutcomeModelConfig = field(default_factory=OutcomeModelConfig)
    manager: ManagerConfig = field(default_factory=ManagerConfig)
    shaping: ShapingConfig = field(default_factory=ShapingConfig)
    guards: GuardConfig = field(default_factory=GuardConfig)

    @property
    def step_scorer(self) -> str | None:
        """The option that configures the source of step scores, as messages show it. The source is the function
        `steps`, or else the model `prm`. None if neither is configured."""
        if self.steps is not None:
            return f"scoring.steps={self.steps}"
        if not self.prm.is_configured:
            return None
        return "scoring.prm.path" if self.prm.path is not None else f"scoring.prm.family={self.prm.family}"


def configured(config: ScoringConfig) -> tuple[str, ...]:
    """The configured kinds of scoring: the rules, step function, models and managers that the configuration names."""
    named = {
        "rules": any(value is not None for value in (config.rule, *config.rules.values())),
        "steps": config.steps is not None,
        "outcome_model": config.outcome_model.is_configured,
        "prm": config.prm.is_configured,
        GROUP_KIND: any(map(config.manager.of, ("", *config.manager.sources))),
    }
    return tuple(kind for kind in KINDS if named[kind])


def needs(config: ScoringConfig, data_source: str) -> tuple[str, ...]:
    """Return the kinds of scoring that a trajectory of `data_source` needs, in the order of KINDS. Without an entry in
    `config.needs`, a manager replaces the rules, and a source whose rule is null needs none."""
    left_out = {GROUP_KIND if config.manager.of(data_source) is None else "rules"}
    if config.rules.get(data_source, config.rule) is None:
        left_out.add("rules")
    return _in_order(config.needs.get(data_source, [kind for kind in KINDS if kind not in left_out]), config)


def may_give(config: ScoringConfig, score: str) -> bool:
    """Return true if episodes of some data source may get this score. A rule or a manager may return further numbers
    with any names. So the result is true for every name that begins with `manager/`, or with `rule/` and the name of a
    configured rule."""
    kind, _, name = score.partition("/")
    shaping, has_manager = config.shaping, any(map(config.manager.of, ("", *config.manager.sources)))
    if name:
        rule, shadowed = name.partition("/")[0], name in ("process", "outcome_model")
        givers = {"rule": rule in _rules(config), "manager": has_manager, "shadow": config.shadow and shadowed}
    else:
        givers = {
            "environment": True,
            "rules": "rules" in configured(config),
            "accuracy": has_manager or "rules" in configured(config),
            "manager": has_manager,
            "outcome_model": config.outcome_model.is_configured and not config.shadow,
            "process": config.step_scorer is not None and not config.shadow and shaping.prm_aggregation != "per_step",
            "overlong": shaping.overlong_penalty > 0,
            "length_bonus": shaping.length_bonus_weight > 0,
            "incorrect_answer": shaping.enable_anti_hack and shaping.incorrect_answer_penalty < 0,
        }
    return givers.get(kind, False)


def _rules(config: ScoringConfig) -> set[str]:
    """The names under which rules report their scores."""
    values = [value for value in (config.rule, *config.rules.values()) if value is not None]
    lists = [value if isinstance(value, list) else [value] for value in values]
    entries = [each if isinstance(each, Mapping) else {"name": each} for listed in lists for each in listed]
    return {str(each.get("as") or short_name(str(each.get("name")))) for each in entries}


def short_name(rule: str) -> str:
    """The name under which a rule reports its score: the last part of its path."""
    return rule.replace(":", ".").rpartition(".")[2]


def serves(config: ScoringConfig) -> tuple[str, ...]:
    """Return the kinds of scoring that a process with this configuration performs, in the order of KINDS."""
    return _in_order(config.serve or KINDS, config)


def _in_order(wanted: list[str] | tuple[str, ...], config: ScoringConfig) -> tuple[str, ...]:
    return tuple(kind for kind in configured(config) if kind in wanted)
