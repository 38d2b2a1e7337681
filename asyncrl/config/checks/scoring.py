"""The combinations of options of `scoring` that cannot work."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from asyncrl.config.option import options
from asyncrl.config.schema import AlgorithmConfig, FilterConfig, GuardConfig, ScoringConfig, ShapingConfig
from asyncrl.config.schema.scoring import GROUP_KIND, MANAGER_KEYS, ManagerConfig, configured, may_give, needs
from asyncrl.config.secrets import shown

OF_MODELS = (
    "prm_apply_sigmoid",
    "use_logit_tanh",
    "use_raw_logit",
    "stop_at_answer",
    "answer_pattern",
    "max_step_tokens",
    "max_resp_len",
)
"""Keys of `scoring.shaping` that scale or limit only the scores of a process reward model."""
REWARD, OUTCOME = "reward", "outcome"
"""The scores that every episode has."""
DEVICE = re.compile(r"cpu|auto|cuda(:\d+)?")


def scoring_conflicts(scoring: ScoringConfig, algorithm: AlgorithmConfig, group_filter: FilterConfig) -> Iterator[str]:
    """The options of `scoring` that cannot work together, or with the algorithm or the replay's filter of groups."""
    kinds = configured(scoring)
    yield from _without_rules(scoring)
    if scoring.timeout_s >= scoring.stall_s:
        yield (
            "scoring.timeout_s scoring.stall_s: the scorer would count as hung; make the first smaller than the second"
        )
    for source, needed in scoring.needs.items():
        if not needed or not set(needed) <= set(kinds):
            yield f"scoring.needs: {source} must name one or more kinds, all of them configured: {', '.join(kinds)}"
        if scoring.shadow and not {"rules", GROUP_KIND} & set(needed):
            yield (
                f"scoring.shadow scoring.needs: {source} would have no reward to train on; add rules (with a rule) or "
                "a manager to its kinds"
            )
        if GROUP_KIND in needed and scoring.manager.of(source) is None:
            yield f"scoring.needs: {source} has no manager; name one in scoring.manager.name or scoring.manager.sources"
    yield from _manager(scoring.manager, scoring.stall_s)
    if not set(scoring.serve) <= set(kinds):
        yield f"scoring.serve: use only the configured kinds: {', '.join(kinds)}"
    for key, model in (("scoring.prm", scoring.prm), ("scoring.outcome_model", scoring.outcome_model)):
        if not DEVICE.fullmatch(model.device):
            yield f"{key}.device: use cpu, cuda, cuda:N (a GPU's number), or auto"
        if model.gpus > 1 and model.device not in ("cuda", "auto"):
            yield f"{key}.gpus {key}.device: layers are spread over the first GPUs; set the device to cuda or auto"
    yield from _shaping(scoring, algorithm, group_filter)


def _manager(manager: ManagerConfig, stall_s: float) -> Iterator[str]:
    if manager.timeout_s >= stall_s:
        yield (
            "scoring.manager.timeout_s scoring.stall_s: the scorer would count as hung; make the first smaller than "
            "the second"
        )
    elif manager.batch_groups > 1 and 2 * manager.timeout_s >= stall_s:
        # If a call for several groups times out, each group gets its own call. So the first result may take two
        # timeouts.
        yield (
            "scoring.manager.timeout_s scoring.stall_s: a call of several groups (batch_groups) that hangs is tried "
            "again for each group, and the scorer would count as hung; the first must be less than half the second"
        )
    given = manager.compute_score or manager.params or manager.compute_score_params
    if given and not any(map(manager.of, ("", *manager.sources))):
        yield "scoring.manager.name: compute_score, compute_score_params and params need a manager; name one"
    for source, changes in manager.sources.items():
        if changes is not None and not (isinstance(changes, Mapping) and set(changes) <= set(MANAGER_KEYS)):
            keys = ", ".join(MANAGER_KEYS)
            yield (
                f"scoring.manager.sources: {source} has {changes!r:.100}; give null, or a mapping with some of the "
                f"keys {keys}"
            )
            continue
        if changes and "name" not in changes and manager.name is None:
            yield f"scoring.manager.sources: {source} has no manager; give it a name, or set scoring.manager.name"
        for option in options(ManagerConfig):
            if option.name in (changes or {}) and not option.allows((changes or {})[option.name]):
                yield f"scoring.manager.sources: {option.name} of {source} must be {option.allowed}"


def _shaping(scoring: ScoringConfig, algorithm: AlgorithmConfig, group_filter: FilterConfig) -> Iterator[str]:
    shaping = scoring.shaping
    for key, model in (("scoring.prm", scoring.prm), ("scoring.outcome_model", scoring.outcome_model)):
        if model.params and not model.is_configured:
            yield f"{key}.params {key}.path: the parameters need a model; give its folder, hub name or URL"
    if shaping.process_weight and scoring.step_scorer is None:
        yield (
            "scoring.shaping.process_weight scoring.prm.path: nothing gives step scores; name a process reward model, "
            "or set scoring.prm.family to a class of yours (my_module.MyScorer), or scoring.steps to a function of "
            "yours (my_module.my_function)"
        )
    yield from _step_function(scoring)
    if scoring.shadow and not (shaping.outcome_weight or shaping.environment_weight or shaping.prm_acc_bonus_weight):
        yield (
            "scoring.shadow scoring.shaping.outcome_weight: no score would be left to train on; give the outcome a "
            "weight"
        )
    elif (
        scoring.shadow
        and not {"rules", GROUP_KIND} & (kinds := set(configured(scoring)))
        and not (
            # An episode without an outcome has the environment's reward only if its steps were scored.
            shaping.environment_weight and {"steps", "prm"} & kinds
        )
    ):
        yield "scoring.shadow scoring.rule: no score would be left to train on; name a rule"
    yield from _weightless(scoring)
    yield from _compared_score(scoring, group_filter)
    yield from _compared_outcomes(shaping, algorithm, group_filter)
    for key in ("use_logit_tanh", "use_raw_logit"):
        if getattr(shaping, key) and shaping.prm_aggregation == "product":
            yield f"scoring.shaping.prm_aggregation scoring.shaping.{key}: a product needs scores above 0; use min"
    if shaping.use_raw_logit and (shaping.use_logit_tanh or shaping.prm_apply_sigmoid):
        yield "scoring.shaping.use_raw_logit: use_logit_tanh and prm_apply_sigmoid change the logit; leave them out"
    if shaping.prm_aggregation == "best_of_n" and all(part.name != "best_of_n" for part in algorithm.reward):
        yield "scoring.shaping.prm_aggregation: add {name: best_of_n} to algorithm.reward, which compares the members"
    if shaping.overlong_penalty and shaping.overlong_buffer > shaping.overlong_max_length:
        yield (
            "scoring.shaping.overlong_max_length scoring.shaping.overlong_buffer: the first must be at least as large "
            "as the second"
        )
    try:
        re.compile(shaping.answer_pattern)
    except (re.error, OverflowError, RecursionError) as error:
        yield f"scoring.shaping.answer_pattern: Python cannot read this regular expression: {error}"


def _without_rules(scoring: ScoringConfig) -> Iterator[str]:
    """An error line for each data source whose episodes need a rule although it is null, or that nothing scores. If no
    rule and no manager says which answers are right, also one for each bonus and penalty that depends on this."""
    for source in dict.fromkeys(("", *scoring.rules, *scoring.needs)):
        key = "scoring.rules" if source in scoring.rules else "scoring.rule"
        of_source = f" of the data source {source}" if source else ""
        if scoring.rules.get(source, scoring.rule) is not None:
            continue
        if "rules" in scoring.needs.get(source, ()):
            yield f"scoring.needs {key}: the episodes{of_source} need rules, but the rule is null; name a rule"
        elif not needs(scoring, source):
            yield f"{key}: nothing scores the episodes{of_source}; name a rule, a manager or a model"
    if may_give(scoring, "accuracy"):
        return
    for name in ("prm_acc_bonus_weight", "incorrect_answer_penalty", "length_bonus_weight"):
        if getattr(scoring.shaping, name):
            yield (
                f"scoring.rule scoring.shaping.{name}: only a rule or a manager says if an answer is right; name one, "
                "or set the second to 0"
            )


def _step_function(scoring: ScoringConfig) -> Iterator[str]:
    """An error line for each option that contradicts `scoring.steps`, or that would have no effect on the numbers of
    this function."""
    if scoring.steps is None:
        return
    if scoring.prm.is_configured:
        model = "scoring.prm.family" if scoring.prm.path is None else "scoring.prm.path"
        yield f"scoring.steps {model}: both give step scores; keep one of them"
    defaults = ShapingConfig()
    for name in OF_MODELS:
        key, default = f"scoring.shaping.{name}", getattr(defaults, name)
        if getattr(scoring.shaping, name) != default:
            yield (
                f"scoring.steps {key}: {name} changes only the scores of a process reward model, and the numbers of "
                f"scoring.steps are used as they are; set {shown(key, default)}"
            )
    for option in options(GuardConfig):
        key = f"scoring.guards.{option.name}"
        if getattr(scoring.guards, option.name) != option.default:
            yield (
                f"scoring.steps {key}: the alarm compares a process reward model with the rules, and the numbers of "
                "scoring.steps have no middle above which a step counts as right, so there is no alarm; set "
                f"{shown(key, option.default)}"
            )


def _weightless(scoring: ScoringConfig) -> Iterator[str]:
    """An error line for each data source whose reward would always be zero."""
    shaping = scoring.shaping
    counts = {
        "rules": shaping.outcome_weight or shaping.prm_acc_bonus_weight,
        "outcome_model": shaping.outcome_model_weight,
        **dict.fromkeys(("steps", "prm"), shaping.process_weight or shaping.prm_aggregation == "per_step"),
        GROUP_KIND: shaping.outcome_weight or shaping.prm_acc_bonus_weight,
    }
    named = {source: needs(scoring, source) for source in (*scoring.rules, *scoring.manager.sources, *scoring.needs)}
    for source, kinds in {"any source": configured(scoring), **named}.items():
        if kinds and not shaping.environment_weight and not any(counts[kind] for kind in kinds):
            yield (
                f"scoring.shaping.outcome_weight: no kind of score of {source} ({', '.join(kinds)}) has a weight in "
                "the reward; set a weight, or use prm_aggregation=per_step and an algorithm that reads the steps"
            )


def _compared_score(scoring: ScoringConfig, group_filter: FilterConfig) -> Iterator[str]:
    """An error line if the filter compares a score that no label has."""
    score = group_filter.score
    if score not in (REWARD, OUTCOME) and not may_give(scoring, score):
        yield (
            "replay.filter.score: nothing in scoring gives this score; use reward, outcome, rule/NAME, or "
            "rule/NAME/NUMBER (docs/scoring.md lists all names)"
        )


def _compared_outcomes(shaping: ShapingConfig, algorithm: AlgorithmConfig, group_filter: FilterConfig) -> Iterator[str]:
    """An error line for each filter that compares outcomes, although the outcome is not part of the reward."""
    if shaping.outcome_weight or shaping.prm_acc_bonus_weight:
        return
    corrections = [each for each in algorithm.correction if each.name == "zero_variance"]
    if any(each.params.get("score", "outcome") == "outcome" for each in corrections):
        yield (
            "scoring.shaping.outcome_weight: zero_variance in algorithm.correction compares outcomes, which are not "
            "part of the reward; give it params={score: reward}"
        )
    if group_filter.zero_variance and group_filter.score == OUTCOME:
        yield (
            "replay.filter.score scoring.shaping.outcome_weight: outcomes are not part of the reward; compare the "
            "reward instead"
        )
