"""What the settings of the scoring pool must satisfy together."""

from __future__ import annotations

import re

from asyncrl.config.needs import configured
from asyncrl.config.schema import TrainConfig
from asyncrl.config.values import require


def check_scoring(config: TrainConfig) -> None:
    """Raises ConfigError."""
    _check_kinds(config)
    _check_shaping(config)


def _check_kinds(config: TrainConfig) -> None:
    scoring, known = config.scoring, configured(config.scoring)
    named = ", ".join(known)
    for source, kinds in scoring.needs.items():
        fix = f"{source} must name some of the kinds that are configured: {named}"
        require(bool(kinds) and set(kinds) <= set(known), config, "scoring.needs", fix)
        fix = f"nothing would be left to train {source} on: let it need rules"
        require(not scoring.shadow or "rules" in kinds, config, "scoring.shadow", fix)
    fix = f"name some of the kinds that are configured: {named}"
    require(set(scoring.serve) <= set(known), config, "scoring.serve", fix)
    split = config.actor.step_split
    fix = "use turn, paragraph or line, or the dotted path of a function"
    require(split in ("turn", "paragraph", "line") or "." in split, config, "actor.step_split", fix)


def _check_shaping(config: TrainConfig) -> None:
    shaping, key = config.scoring.shaping, "scoring.shaping."
    fix = "step scores need scoring.prm.path, the folder or hub name of a process reward model"
    require(shaping.process_weight == 0 or config.scoring.prm.path is not None, config, key + "process_weight", fix)
    fix = "nothing else would be left to train on: give a weight to the outcome"
    rewarded = bool(shaping.outcome_weight or shaping.environment_weight or shaping.prm_acc_bonus_weight)
    require(not config.scoring.shadow or rewarded, config, "scoring.shadow", fix)
    _check_something_counts(config)
    fix = "a product of negative scores means nothing; use min, or the model's probabilities"
    signed = shaping.use_logit_tanh and shaping.prm_aggregation == "product"
    require(not signed, config, key + "prm_aggregation", fix)
    fix = "the members of a group are compared by the learner: add {name: best_of_n} to algorithm.reward"
    compared = any(choice.name == "best_of_n" for choice in config.algorithm.reward)
    require(shaping.prm_aggregation != "best_of_n" or compared, config, key + "prm_aggregation", fix)
    fix = "it must be a list of clip and delta"
    require(set(shaping.step_transforms) <= {"clip", "delta"}, config, key + "step_transforms", fix)
    fix = "it is a penalty: make it 0 or less"
    require(shaping.incorrect_answer_penalty <= 0, config, key + "incorrect_answer_penalty", fix)
    fix = f"with overlong_penalty set it must be at least overlong_buffer={shaping.overlong_buffer}"
    bounded = not shaping.overlong_penalty or shaping.overlong_buffer <= shaping.overlong_max_length
    require(bounded, config, key + "overlong_max_length", fix)
    require(_compiles(shaping.answer_pattern), config, key + "answer_pattern", "it is no regular expression of Python")


def _check_something_counts(config: TrainConfig) -> None:
    shaping, key = config.scoring.shaping, "scoring.shaping."
    counts = {
        "rules": shaping.outcome_weight or shaping.prm_acc_bonus_weight,
        "outcome_model": shaping.outcome_model_weight,
        "prm": shaping.process_weight or shaping.prm_aggregation == "per_step",
    }
    for source, kinds in {"any source": configured(config.scoring), **config.scoring.needs}.items():
        fix = (
            f"nothing that {source} needs ({', '.join(kinds)}) has a weight in the reward: give it one, or set "
            f"{key}prm_aggregation=per_step for an algorithm that reads the steps"
        )
        counted = shaping.environment_weight or any(counts[kind] for kind in kinds)
        require(bool(counted), config, key + "outcome_weight", fix)


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True
