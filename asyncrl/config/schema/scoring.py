"""The pool of scorers, its models, and how their scores become rewards.

The replay and the scorers both use `needs` to find the kinds of scoring of a trajectory, so that they agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.config.option import option

GROUP_KIND = "manager"
"""The kind of scoring that scores whole groups. It comes last, so that no member can fail after its group was
scored."""
KINDS = ("rules", "steps", "outcome_model", "prm", GROUP_KIND)
"""The kinds of scoring, in the order in which a trajectory passes through them."""


@dataclass
class ShapingConfig:
    """The shaping of scores: it makes the reward, which baselines compare, and the step scores, which algorithms read.

    docs/scoring.md has the order in which the settings apply; `scoring=NAME` chooses a preset.
    """

    outcome_weight: float = option(1.0, "weight of the rules' weighted sum in the reward", "[0, inf)")
    outcome_model_weight: float = option(1.0, "weight of the outcome model's score in the reward", "[0, inf)")
    process_weight: float = option(0.0, "weight of the aggregated step scores in the reward", "[0, inf)")
    environment_weight: float = option(
        0.0, "weight in the reward of the environment score, the sum of the rewards of tools and of turns"
    )
    turn_scores: str = option(
        "sum",
        "how the rewards of turns, which a simulated user, an environment or an agent gives, become one number",
        choices=("sum", "last", "mean", "max"),
    )
    prm_apply_sigmoid: bool = option(False, "a step's score is the sigmoid of its logit, not the model's probability")
    use_logit_tanh: bool = option(False, "a step's score is tanh_rmax * tanh(logit / tanh_tau), without a sigmoid")
    use_raw_logit: bool = option(False, "a step's score is its logit, which has no bounds")
    tanh_tau: float = option(2.0, "scale of the logit in tanh", "(0, inf)")
    tanh_rmax: float = option(1.0, "largest score that tanh gives", "(0, inf)")
    prm_aggregation: str = option(
        "mean_response",
        "how step scores become one number (docs/scoring.md); per_step: the algorithm reads the steps instead",
        choices=("mean_response", "pooled_last", "min", "product", "per_step", "best_of_n"),
    )
    step_transforms: list[str] = option(
        [],
        "transformations of the step scores r_k, in this order; clip: min(r_k - clip_eta, 0); delta: r_k - r_{k+1}",
        choices=("clip", "delta"),
    )
    clip_eta: float = option(0.5, "number that clip subtracts from a score")
    enable_anti_hack: bool = option(
        True, "turn on the next five options, from stop_at_answer to max_resp_len, and leave out repeated steps"
    )
    stop_at_answer: bool = option(True, "steps after the first final answer count only if their score is negative")
    answer_pattern: str = option(r"####|\\boxed|(?i:\banswer\s*(?:is|:|=))", "regular expression of a final answer")
    incorrect_answer_penalty: float = option(0.0, "number that is added to the reward of a wrong answer", "(-inf, 0]")
    max_step_tokens: int = option(
        512, "a step with more policy tokens keeps its score only if the score is negative", "[1, inf)"
    )
    max_resp_len: int = option(
        1024, "in an episode with more policy tokens, steps keep only negative scores", "[1, inf)"
    )
    prm_acc_bonus_weight: float = option(0.0, "number that is added to the reward of a right answer", "[0, inf)")
    length_bonus_weight: float = option(0.0, "largest bonus of a right answer for its length", "[0, inf)")
    target_response_length: int = option(
        400, "policy tokens at which the bonus is largest; from twice this length on it is 0", "[1, inf)"
    )
    overlong_penalty: float = option(
        0.0, "penalty on an answer of overlong_max_length or more policy tokens", "[0, inf)"
    )
    overlong_max_length: int = option(0, "policy tokens from which the full penalty applies", "[0, inf)")
    overlong_buffer: int = option(
        512, "policy tokens below overlong_max_length over which the penalty grows linearly", "[1, inf)"
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
        1, "GPUs of one scorer over which the model's layers are spread (needs the extra asyncrl[spread])", "[1, inf)"
    )
    micro_tokens: int = option(16384, "most tokens of one forward pass, padding included", "[1, inf)")
    micro_inputs: int | None = option(None, "most inputs of one forward pass; null: no limit", "[1, inf)")
    long_inputs: str = option(
        "refuse",
        "treatment of inputs that are too long for the model; refuse: refuse them; drop_oldest: drop their oldest "
        "tool results",
        choices=("refuse", "drop_oldest"),
    )
    trust_remote_code: bool = option(False, "run code that comes with the model")
    params: dict[str, Any] = option({}, "parameters of the family that differ from its defaults")

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


@dataclass
class ManagerConfig:
    """A reward manager written for verl, which judges whole groups (docs/scoring.md)."""

    name: str | None = option(
        None,
        "naive, batch, dapo or another name in docs/verl.md, or the path of a class (module.Class or FILE.py:Class); "
        "null: no manager",
        fixed="stored episodes wait for these kinds of scores",
    )
    compute_score: str | None = option(
        None,
        "path of the function by which the manager scores an answer (module.function or FILE.py:function); null: the "
        "manager's default",
    )
    compute_score_params: dict[str, Any] = option({}, "further parameters of the function")
    num_examine: int = option(0, "samples of each data source that the manager prints in training", "[0, inf)")
    val_num_examine: int = option(1, "samples of each data source that the manager prints in an evaluation", "[0, inf)")
    params: dict[str, Any] = option({}, "further parameters of the manager's constructor")
    sources: dict[str, Any] = option(
        {},
        "settings that differ for a data source, as {SOURCE: {name, compute_score, compute_score_params, "
        "num_examine, val_num_examine, params}}; {SOURCE: null}: the source has no manager",
        fixed="stored episodes wait for these kinds of scores",
    )
    batch_groups: int = option(1, "most groups that one call of the manager gets", "[1, inf)")
    timeout_s: float = option(300.0, "seconds that one call of the manager may take", "(0, inf)")

    def of(self, source: str) -> Mapping[str, Any] | None:
        """The settings of a data source's manager, by the keys of `sources`. The result is None if the source has no
        manager."""
        own = {name: getattr(self, name) for name in MANAGER_KEYS}
        changes = self.sources.get(source, {})
        settings = own | dict(changes) if isinstance(changes, Mapping) else {}
        return settings if settings.get("name") else None


MANAGER_KEYS = ("name", "compute_score", "compute_score_params", "num_examine", "val_num_examine", "params")
"""The settings of the manager that a data source can override."""


@dataclass
class GuardConfig:
    """A warning of reward hacking: rewards rise, outcomes do not, and the process reward model agrees less and less
    with the outcomes."""

    window_s: float = option(900.0, "seconds over which the trends are measured", "(0, inf)")
    reward_rise: float = option(
        0.05,
        "smallest rise of the mean reward over the window for an alarm; there is no alarm if outcomes rise as much",
        "(0, inf)",
    )
    agreement_fall: float = option(
        0.05, "smallest fall, over the window, of the agreement of step scores with outcomes for an alarm", "(0, inf)"
    )


@dataclass
class ScoringConfig:
    """The pool of scorers."""

    rule: Any = option(
        "exact_number",
        "verifier: a built-in name, the path of a function or verl manager (module.function or FILE.py:function), or a "
        "list of {name, weight, params}",
    )
    rules: dict[str, Any] = option({}, "verifiers by data source, in the same forms as scoring.rule")
    strip_thoughts: bool = option(
        True,
        "rules read only the text after the last closed thought; if a thought is not closed, they read an empty text",
    )
    steps: str | None = option(
        None,
        "dotted path of a function that gives each step of an episode a number, its step score (docs/scoring.md); "
        "null: no function",
    )
    rule_processes: int = option(
        1, "processes in which one scorer runs rules, and as many for the function scoring.steps", "[1, inf)"
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
        fixed="stored episodes wait for these kinds of scores",
    )
    serve: list[str] = option(
        [], "kinds of scoring that a scoring process performs; empty: all configured kinds", choices=KINDS
    )
    batch_trajectories: int = option(32, "most trajectories in one lease", "[1, inf)")
    batch_tokens: int = option(65536, "most tokens in one lease", "[1, inf)")
    stall_s: float = option(600.0, "seconds without a result after which a scorer counts as hung and exits", "(0, inf)")
    eval_samples: int = option(
        1, "episodes of each evaluation and data source that a scorer logs with their scores", "[0, inf)"
    )
    shadow: bool = option(False, "record the scores of the models and of scoring.steps, but train without them")
    prm: ScoringModelConfig = field(default_factory=ScoringModelConfig)
    outcome_model: OutcomeModelConfig = field(default_factory=OutcomeModelConfig)
    manager: ManagerConfig = field(default_factory=ManagerConfig)
    shaping: ShapingConfig = field(default_factory=ShapingConfig)
    guards: GuardConfig = field(default_factory=GuardConfig)

    @property
    def step_scorer(self) -> str | None:
        """The option that names the model or the function that gives step scores, in the form that messages show. None
        if neither is configured."""
        if self.steps is not None:
            return f"scoring.steps={self.steps}"
        if not self.prm.is_configured:
            return None
        return "scoring.prm.path" if self.prm.path is not None else f"scoring.prm.family={self.prm.family}"


def configured(config: ScoringConfig) -> tuple[str, ...]:
    """The configured kinds of scoring: rules always, and the step function, models and managers that the configuration
    names."""
    named = {
        "rules": True,
        "steps": config.steps is not None,
        "outcome_model": config.outcome_model.is_configured,
        "prm": config.prm.is_configured,
        GROUP_KIND: any(map(config.manager.of, ("", *config.manager.sources))),
    }
    return tuple(kind for kind in KINDS if named[kind])


def needs(config: ScoringConfig, data_source: str) -> tuple[str, ...]:
    """The kinds of scoring that a trajectory of `data_source` needs, in order. A manager replaces the rules."""
    replaced = GROUP_KIND if config.manager.of(data_source) is None else "rules"
    return _in_order(config.needs.get(data_source, [kind for kind in KINDS if kind != replaced]), config)


def may_give(config: ScoringConfig, score: str) -> bool:
    """True if episodes of some data source may get this score. Any further number of a configured rule or manager
    counts as a score too."""
    kind, _, name = score.partition("/")
    shaping, has_manager = config.shaping, any(map(config.manager.of, ("", *config.manager.sources)))
    if name:
        rule, shadowed = name.partition("/")[0], name in ("process", "outcome_model")
        givers = {"rule": rule in _rules(config), "manager": has_manager, "shadow": config.shadow and shadowed}
    else:
        givers = {
            **dict.fromkeys(("rules", "accuracy", "environment"), True),
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
    lists = [value if isinstance(value, list) else [value] for value in (config.rule, *config.rules.values())]
    entries = [each if isinstance(each, Mapping) else {"name": each} for listed in lists for each in listed]
    return {str(each.get("as") or short_name(str(each.get("name")))) for each in entries}


def short_name(rule: str) -> str:
    """The name under which a rule reports its score: the last part of its path."""
    return rule.replace(":", ".").rpartition(".")[2]


def serves(config: ScoringConfig) -> tuple[str, ...]:
    """The kinds that a scoring process with this configuration performs, in order."""
    return _in_order(config.serve or KINDS, config)


def _in_order(wanted: list[str] | tuple[str, ...], config: ScoringConfig) -> tuple[str, ...]:
    return tuple(kind for kind in configured(config) if kind in wanted)
