"""Computes from the scores of an episode its reward, the parts of the reward by name, and the step scores that count.

Step scores pass through these functions:

scale (every step's score) -> earned (without gains from reward hacks) -> aggregate (one number, for the reward)
                                                                  -> transformed (for the algorithms)
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.schema import ShapingConfig
from asyncrl.scoring.models.base import StepScores
from asyncrl.types import Trajectory

Scores = NDArray[np.float32]

_AGGREGATIONS: Mapping[str, Callable[[Scores], np.float32]] = {
    "mean_response": np.mean,
    "best_of_n": np.mean,
    # Algorithms read each step's score. The mean is only for `_costs`, which asks if a step lowers it.
    "per_step": np.mean,
    "pooled_last": lambda scores: scores[-1],
    "min": np.min,
    "product": np.prod,
}

_TURN_SCORES: Mapping[str, Callable[[Sequence[float]], float]] = {
    "sum": sum,
    "last": lambda scores: scores[-1],
    "mean": fmean,
    "max": max,
}

_LEADING_NUMBER = re.compile(r"\A\s*(?:step\s*)?\(?\d+[).:]\s+", re.IGNORECASE)


def scale(scores: StepScores, config: ShapingConfig) -> Scores:
    """Every step's score, float32[K]. The configuration says which it is: the tanh of the logit, the sigmoid of
    the logit, the logit, or the model's own probability."""
    logit = scores.logit.astype(np.float64)
    if config.use_logit_tanh:
        return (config.tanh_rmax * np.tanh(logit / config.tanh_tau)).astype(np.float32)
    if config.prm_apply_sigmoid:
        return (0.5 * (1 + np.tanh(0.5 * logit))).astype(np.float32)
    return scores.logit if config.use_raw_logit else scores.probability


def middle(config: ShapingConfig) -> float:
    """The score of a step whose probability of being right is a half."""
    is_logit = config.use_raw_logit and not config.prm_apply_sigmoid
    return 0.0 if config.use_logit_tanh or is_logit else 0.5


@dataclass(frozen=True, slots=True)
class StepText:
    """A step as text.

    - `text`: its text without special tokens
    - `tokens`: its number of policy tokens
    - `calls`: true if its turn calls tools
    - `branch`: the index of its branch (an agent that rewrites its history begins a new branch)
    """

    text: str
    tokens: int
    calls: bool = False
    branch: int = 0


def step_texts(trajectory: Trajectory, texts: Sequence[str]) -> list[StepText]:
    """The steps of a trajectory; `texts` are their texts."""
    starts = [start for start, _ in trajectory.branches]
    found = []
    for step, text in zip(trajectory.steps, texts, strict=True):
        calls = any(turn.start <= step.start < turn.end for turn in trajectory.turns if turn.tool_calls)
        found.append(StepText(text, step.end - step.start, calls, bisect_right(starts, step.start) - 1))
    return found


def repeated(steps: Iterable[StepText]) -> list[bool]:
    """True for each step that repeats an earlier step of its branch.

    White space, case, a leading number and trailing punctuation are ignored.
    """
    seen: set[tuple[int, str]] = set()
    found = []
    for step in steps:
        bare = " ".join(_LEADING_NUMBER.sub("", step.text).casefold().split()).rstrip(".,;:!?")
        found.append((step.branch, bare) in seen)
        seen.add((step.branch, bare))
    return found


def earned(scores: Scores, steps: Sequence[StepText], length: int, config: ShapingConfig) -> tuple[Scores, list[int]]:
    """The scores that count, float32[k], and the indices of their steps among the K steps. `length` is the number of
    the episode's policy tokens.

    Without `enable_anti_hack`, all scores count unchanged. With it, repeated steps are left out. After the first
    final answer of a branch, a step counts only if it lowers the result: later steps earn nothing, and an early answer
    does not hide later mistakes. In steps and episodes that are too long, scores above 0 become 0.
    """
    if not config.enable_anti_hack:
        return scores, list(range(len(scores)))
    too_long = [length > config.max_resp_len or step.tokens > config.max_step_tokens for step in steps]
    scores = np.where(too_long, np.minimum(scores, 0), scores).astype(np.float32)
    kept: list[int] = []
    answered: set[int] = set()
    for index, (step, is_repeated) in enumerate(zip(steps, repeated(steps), strict=True)):
        if not is_repeated and (step.branch not in answered or _costs(scores, kept, index, config)):
            kept.append(index)
        if config.stop_at_answer and not step.calls and re.search(config.answer_pattern, step.text):
            answered.add(step.branch)
    return scores[kept], kept


def _costs(scores: Scores, kept: list[int], index: int, config: ShapingConfig) -> bool:
    """True if step `index` lowers the aggregate of the kept steps, or if algorithms read the score of this step as a
    penalty."""
    lowers = aggregate(scores[[*kept, index]], config.prm_aggregation) < aggregate(scores[kept], config.prm_aggregation)
    return bool(lowers or scores[index] < (config.clip_eta if "clip" in config.step_transforms else 0))


def aggregate(scores: Scores, how: str) -> float:
    """Step scores float32[k], k > 0, as one number."""
    return float(_AGGREGATIONS[how](scores))


def environment(trajectory: Trajectory, config: ShapingConfig) -> float:
    """The sum of the tools' rewards, plus one number for the rewards of turns, such as their mean."""
    scores = trajectory.turn_scores
    of_user = _TURN_SCORES[config.turn_scores](scores) if scores else 0.0
    return float(sum(trajectory.rewards.values()) + of_user)


def transformed(scores: Scores, config: ShapingConfig) -> Scores:
    """The step scores for algorithms. With `clip`, the score r_k of step k becomes min(r_k - clip_eta, 0). With
    `delta`, it becomes r_k - r_{k+1}, where r_{k+1} is 0 for the last step. So the deltas from step k on sum to r_k.

    Source: On Designing Effective RL Reward at Training Time for LLM Reasoning, 2024.
    """
    for name in config.step_transforms:
        if name == "clip":
            scores = np.minimum(scores - np.float32(config.clip_eta), np.float32(0))
        else:
            scores = scores - np.append(scores[1:], np.float32(0))
    return scores


def accuracy(outcome: float) -> float:
    """1 for a right answer, 0 for a wrong one. An answer is right if `outcome`, the score of the first rule or of the
    manager, is more than a half."""
    return float(outcome > 0.5)


def shape(scores: Mapping[str, float], length: int, config: ShapingConfig) -> tuple[float, dict[str, float]]:
    """The reward of an episode of `length` policy tokens, and the reward's parts by name: unweighted scores, and
    weighted bonuses and penalties. A configured bonus is 0 for an episode that does not get it.

    `scores` may have the following scores. Kinds of scoring that the episode did not need are absent.

    - `rules`: the weighted sum of the rules
    - `manager`: a reward manager's reward
    - `outcome_model` and `process`: the scores of these models
    - `accuracy` and `environment`: see the functions of these names
    """
    weights = {
        "rules": config.outcome_weight,
        "manager": config.outcome_weight,
        "outcome_model": config.outcome_model_weight,
        "process": config.process_weight,
        "environment": config.environment_weight,
        "accuracy": config.prm_acc_bonus_weight,
    }
    bonuses = _bonuses(scores.get("accuracy"), length, config)
    parts = {name: scores[name] for name in weights if name in scores}
    reward = sum(weights[name] * score for name, score in parts.items()) + sum(bonuses.values())
    return reward, parts | bonuses


def _bonuses(accuracy: float | None, length: int, config: ShapingConfig) -> dict[str, float]:
    bonuses: dict[str, float] = {}
    if config.overlong_penalty:
        # Before it is weighted, the penalty is 0 for lengths up to overlong_max_length - overlong_buffer. Then it falls
        # linearly to -1 at overlong_max_length (DAPO).
        room = config.overlong_max_length - config.overlong_buffer - length
        bonuses["overlong"] = config.overlong_penalty * min(0.0, max(-1.0, room / config.overlong_buffer))
    if accuracy is not None and config.length_bonus_weight:
        distance = abs(length - config.target_response_length) / config.target_response_length
        bonuses["length_bonus"] = config.length_bonus_weight * accuracy * max(0.0, 1 - distance)
    if accuracy is not None and config.enable_anti_hack and config.incorrect_answer_penalty:
        bonuses["incorrect_answer"] = config.incorrect_answer_penalty * (1 - accuracy)
    return bonuses
