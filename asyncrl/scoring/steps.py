"""Step scores: from what a process model says of every step to what the reward and the algorithms read.

scale (every step's score) -> earned (what hacks would add is taken away) -> aggregate (one number, for the reward)
                                                                         -> transformed (for the algorithms)
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.schema import ShapingConfig
from asyncrl.scoring.models.base import StepScores
from asyncrl.types import Trajectory

Scores = NDArray[np.float32]

_AGGREGATIONS: Mapping[str, Callable[[Scores], np.float32]] = {
    "mean_response": np.mean,
    "best_of_n": np.mean,
    "pooled_last": lambda scores: scores[-1],
    "min": np.min,
    "product": np.prod,
}

_NUMBER_IN_FRONT = re.compile(r"\A\s*(?:step\s*)?\(?\d+[).:]\s+", re.IGNORECASE)


def scale(scores: StepScores, config: ShapingConfig) -> Scores:
    """Every step's score, float32[K]: tanh of the logit, its sigmoid, or the model's own probability."""
    logit = scores.logit.astype(np.float64)
    if config.use_logit_tanh:
        return (config.tanh_rmax * np.tanh(logit / config.tanh_tau)).astype(np.float32)
    if config.prm_apply_sigmoid:
        return (0.5 * (1 + np.tanh(0.5 * logit))).astype(np.float32)
    return scores.probability


def middle(config: ShapingConfig) -> float:
    """The score of a step that is as likely right as wrong."""
    return 0.0 if config.use_logit_tanh else 0.5


@dataclass(frozen=True, slots=True)
class Said:
    """What the policy wrote at one step: its text without special tokens, its policy tokens, whether its turn calls
    tools, and in which branch it stands."""

    text: str
    tokens: int
    calls: bool = False
    branch: int = 0


def said_at(trajectory: Trajectory, texts: Sequence[str]) -> list[Said]:
    """The steps of a trajectory with their texts."""
    calling = [(turn.start, turn.end) for turn in trajectory.turns if turn.tool_calls]
    starts = [start for start, _ in trajectory.branches]
    return [
        Said(
            text,
            step.end - step.start,
            any(start <= step.start < end for start, end in calling),
            bisect_right(starts, step.start) - 1,
        )
        for step, text in zip(trajectory.steps, texts, strict=True)
    ]


def repeated(said: Iterable[Said]) -> list[bool]:
    """Which steps say what an earlier one of their branch said, apart from white space, case, a number in front and the
    last mark."""
    seen: set[tuple[int, str]] = set()
    found = []
    for step in said:
        bare = " ".join(_NUMBER_IN_FRONT.sub("", step.text).casefold().split()).rstrip(".,;:!?")
        found.append((step.branch, bare) in seen)
        seen.add((step.branch, bare))
    return found


def earned(scores: Scores, said: Sequence[Said], length: int, config: ShapingConfig) -> tuple[Scores, list[int]]:
    """The scores that count, float32[k], and which of the K steps they belong to. `length` is the episode's policy
    tokens.

    Steps that repeat another are left out, so that they neither earn nor cost anything. Behind the first final answer
    of a branch a step counts only where it costs: left out, it would let an answer that is announced early hide what
    follows. What is too long keeps only a score below 0.
    """
    if not config.enable_anti_hack:
        return scores, list(range(len(scores)))
    too_long = [length > config.max_resp_len or step.tokens > config.max_step_tokens for step in said]
    scores = np.where(too_long, np.minimum(scores, 0), scores).astype(np.float32)
    kept: list[int] = []
    answered: set[int] = set()
    for index, (step, is_repeated) in enumerate(zip(said, repeated(said), strict=True)):
        if not is_repeated and (step.branch not in answered or _costs(scores, kept, index, config)):
            kept.append(index)
        if config.stop_at_answer and _answers(step, config.answer_pattern):
            answered.add(step.branch)
    return scores[kept], kept


def _costs(scores: Scores, kept: list[int], index: int, config: ShapingConfig) -> bool:
    """Whether a further step lowers the one number of those that are kept, or is read as a penalty by algorithms."""
    aggregation = _AGGREGATIONS.get(config.prm_aggregation, np.mean)
    lowers = aggregation(scores[[*kept, index]]) < aggregation(scores[kept])
    return bool(lowers or scores[index] < (config.clip_eta if "clip" in config.step_transforms else 0))


def _answers(step: Said, pattern: str) -> bool:
    return not step.calls and re.search(pattern, step.text) is not None


def aggregate(scores: Scores, how: str) -> float | None:
    """Step scores float32[k], k > 0, as one number; None for `per_step`, where algorithms read the steps."""
    return None if how == "per_step" else float(_AGGREGATIONS[how](scores))


def transformed(scores: Scores, config: ShapingConfig) -> Scores:
    """What algorithms read of each step: min(r_k - eta, 0) for `clip`, r_k - r_{k+1} for `delta`, with nothing behind
    the last step, so that the steps from k on sum to r_k.

    Source: On Designing Effective RL Reward at Training Time for LLM Reasoning, 2024.
    """
    for name in config.step_transforms:
        if name == "clip":
            scores = np.minimum(scores - np.float32(config.clip_eta), np.float32(0))
        else:
            scores = scores - np.append(scores[1:], np.float32(0))
    return scores
